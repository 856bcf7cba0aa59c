"""The whole command over stand-in runs: what is run, skipped, refused and reported."""

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pandas as pd
import pytest
import yaml

from kerple.cli import compare, run_comparison
from kerple.compare import job as jobs
from tests.compare.fake_compare import stand_in
from tests.inline_ray import Inline

FAKE = Path(__file__).parents[1] / "compare" / "fake_run.py"


@pytest.fixture
def config(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, undrawn: None) -> Path:
    """A comparison of 2 strategies × 2 seeds; resolving needs no model: the flags stand for the configuration."""
    stand_in(monkeypatch.setattr)
    monkeypatch.setenv("FAKE_STEP", "0.001")
    monkeypatch.setattr(run_comparison.Pace, "due", lambda self: False)  # no report before the last
    (tmp_path / "base.yaml").write_text("{}")
    settings = {
        "name": "small",
        "base": [str(tmp_path / "base.yaml")],
        "strategies": {"KerpleLog": {}, "ALiBi": None},
        "seeds": [1, 2],
        "baseline": "KerpleLog",
        "runs": str(tmp_path / "runs"),
        "output": str(tmp_path / "report"),
    }
    path = tmp_path / "compare.yaml"
    path.write_text(yaml.safe_dump(settings, sort_keys=False))
    return path


def starts(config: Path) -> int:
    return sum(len(path.read_text().splitlines()) for path in config.parent.glob("runs/**/*.starts"))


def test_runs_everything_once_and_reports(config: Path, capsys: pytest.CaptureFixture[str]) -> None:
    compare.main(["--config", str(config), "--parallel", "2"])
    results = pd.read_csv(config.parent / "report" / "results.csv")
    assert results.groupby(["strategy", "seed"], sort=False).ngroups == 4
    assert list(results["strategy"].drop_duplicates()) == ["KerpleLog", "ALiBi"]  # in the order of the file
    assert "[4/4]" in capsys.readouterr().out

    before = (config.parent / "report" / "results.csv").read_bytes()
    compare.main(["--config", str(config)])
    assert starts(config) == 4
    assert (config.parent / "report" / "results.csv").read_bytes() == before
    assert "4 runs: 4 finished, 0 to do" in capsys.readouterr().out


def test_a_new_strategy_runs_alone_and_a_changed_setting_is_refused(config: Path) -> None:
    compare.main(["--config", str(config)])
    settings = yaml.safe_load(config.read_text())
    settings["strategies"]["T5"] = {}
    config.write_text(yaml.safe_dump(settings, sort_keys=False))
    compare.main(["--config", str(config)])
    assert starts(config) == 6

    settings["strategies"]["T5"] = {"flags": {"trainer.max_steps": 30}}
    config.write_text(yaml.safe_dump(settings, sort_keys=False))
    with pytest.raises(ValueError, match=r"T5 seed 1: flags\.trainer\.max_steps: \(not there\) -> '30'") as refused:
        compare.main(["--config", str(config)])
    assert "ALiBi" not in str(refused.value)
    assert starts(config) == 6

    compare.main(["--config", str(config), "--rerun-changed"])
    assert starts(config) == 8


def test_a_run_made_by_hand_is_taken_over_if_it_is_the_one(config: Path) -> None:
    by_hand = config.parent / "runs" / "ALiBi" / "seed-1"
    by_hand.parent.mkdir(parents=True)
    fit = [f"--run_dir={by_hand}", "--seed_everything=1", "--model.position=ALiBi"]
    subprocess.run([sys.executable, str(FAKE), "fit", *fit], check=True)
    (by_hand / "test").mkdir()
    (by_hand / "test" / "notes.txt").write_text("mine")
    written = {"flags": {"seed_everything": "1", "data.seed": "1", "model.position": "ALiBi"}, "logs": "logs"}
    written |= {"config": None, "model": {"position": "ALiBi"}, "data": {"class_path": "none", "filled in": 3}}
    path = by_hand / "config.yaml"
    path.write_text(yaml.safe_dump(written | {"data": {"class_path": "other"}}))
    with pytest.raises(ValueError, match=r"ALiBi seed 1: .*data\.class_path: 'other' -> 'none'"):
        compare.main(["--config", str(config)])
    path.write_text(yaml.safe_dump(written | {"flags": written["flags"] | {"config": "other.yaml"}}))
    with pytest.raises(ValueError, match=r"ALiBi seed 1: .*flags\.config: 'other\.yaml' -> "):
        compare.main(["--config", str(config)])
    path.write_text("[1]")
    with pytest.raises(ValueError, match="expected the options that `fit` writes"):
        compare.main(["--config", str(config)])
    assert starts(config) == 1

    base = str(config.parent / "base.yaml")
    path.write_text(yaml.safe_dump(written | {"flags": written["flags"] | {"config": base}}))
    compare.main(["--config", str(config)])
    resumed = [json.loads(line)["resume"] for line in by_hand.with_name("seed-1.starts").read_text().splitlines()]
    assert resumed == [False, True]  # resuming a run that has ended does nothing
    assert (by_hand / "test-by-hand-1" / "notes.txt").read_text() == "mine"
    assert [path.name for path in (by_hand / "test").iterdir()] == ["extrapolation.json"]


def test_a_folder_that_is_no_run_is_not_taken_for_ours(config: Path) -> None:
    by_hand = config.parent / "runs" / "ALiBi" / "seed-1"
    by_hand.mkdir(parents=True)
    for options in ([], ["--rerun-changed"]):
        with pytest.raises(ValueError, match=r"ALiBi seed 1: has no config\.yaml") as refused:
            compare.main(["--config", str(config), *options])
        assert f"move or remove {by_hand}" in str(refused.value)
        assert "--rerun_changed" not in str(refused.value)  # it does nothing for a folder that compare did not make
    assert starts(config) == 0
    assert by_hand.exists()


def test_a_refused_call_removes_and_takes_over_nothing(config: Path) -> None:
    compare.main(["--config", str(config), "--seeds", "[1]"])
    settings = yaml.safe_load(config.read_text())
    settings["strategies"] = {"KerpleLog": {"flags": {"trainer.max_steps": 30}}, "ALiBi": {}}
    config.write_text(yaml.safe_dump(settings, sort_keys=False))
    seed_2 = {name: config.parent / "runs" / name / "seed-2" for name in ("KerpleLog", "ALiBi")}
    for folder in seed_2.values():
        (folder / "checkpoints").mkdir(parents=True)
        (folder / "checkpoints" / "last.ckpt").touch()
    written = {"flags": {"seed_everything": "2", "data.seed": "2", "model.position": "ALiBi"}}
    (seed_2["ALiBi"] / "config.yaml").write_text(yaml.safe_dump(written | {"data": {"class_path": "none"}}))
    with pytest.raises(ValueError, match=r"KerpleLog seed 2: has no config\.yaml"):
        compare.main(["--config", str(config), "--rerun-changed"])
    assert (config.parent / "runs" / "KerpleLog" / "seed-1" / "test" / "extrapolation.json").exists()
    assert not seed_2["ALiBi"].with_suffix(".json").exists()


class Killed(BaseException):
    """As by kill -9: nothing catches it."""


def killed_before(number: int, monkeypatch: pytest.MonkeyPatch, call: Callable[[], None]) -> bool:
    """Whether a call came as far as this change to the disk."""
    changes = 0

    def counting(change: Callable[..., None]) -> Callable[..., None]:
        def counted(*arguments: Any, **options: Any) -> None:
            nonlocal changes
            changes += 1
            if changes == number:
                raise Killed
            change(*arguments, **options)

        return counted

    with monkeypatch.context() as patched:
        for name in ("replace", "unlink", "rmdir"):
            patched.setattr(os, name, counting(getattr(os, name)))
        try:
            call()
        except Killed:
            return True
    return False


@pytest.mark.parametrize("options", [[], ["--rerun-changed"]])
def test_killed_while_a_changed_run_is_removed_it_can_be_started_again(
    config: Path, monkeypatch: pytest.MonkeyPatch, options: list[str]
) -> None:
    monkeypatch.setattr(run_comparison, "_report", lambda comparison, work: None)
    settings = yaml.safe_load(config.read_text()) | {"strategies": {"KerpleLog": {}}, "seeds": [1]}
    config.write_text(yaml.safe_dump(settings))
    compare.main(["--config", str(config)])
    runs, kept = config.parent / "runs", config.parent / "kept"
    runs.rename(kept)
    config.write_text(yaml.safe_dump(settings | {"flags": {"trainer.max_steps": 30}}))
    (job,) = compare.Comparison(**settings | {"strategies": {"KerpleLog": None}}).jobs()

    # the mark, 3 files and 3 folders, the state
    for number in range(1, 9):
        shutil.copytree(kept, runs)
        assert killed_before(number, monkeypatch, lambda: jobs.forget(job))
        if number == 1 and not options:  # nothing has happened yet
            with pytest.raises(ValueError, match="add --rerun_changed"):
                compare.main(["--config", str(config)])
        else:
            compare.main(["--config", str(config), *options])
            assert starts(config) == 2
            assert [json.loads(line)["resume"] for line in job.beside(".starts").read_text().splitlines()][1] is False
            assert jobs.finished(job)
            assert jobs.state(job)["config"]["flags.trainer.max_steps"] == "30"
        shutil.rmtree(runs)
    shutil.copytree(kept, runs)
    assert not killed_before(9, monkeypatch, lambda: jobs.forget(job))
    assert not job.directory.exists()


@pytest.mark.parametrize(("removed", "fits"), [("test", 4), ("", 5)])
def test_what_was_removed_by_hand_is_made_again(config: Path, removed: str, fits: int) -> None:
    compare.main(["--config", str(config)])
    results = (config.parent / "report" / "results.csv").read_bytes()
    shutil.rmtree(config.parent / "runs" / "ALiBi" / "seed-2" / removed)
    compare.main(["--config", str(config), "--report-only"])
    assert "ALiBi seed 2" in (config.parent / "report" / "report.html").read_text()
    compare.main(["--config", str(config)])
    assert (config.parent / "report" / "results.csv").read_bytes() == results
    assert starts(config) == fits


def test_runs_that_were_copied_are_finished_where_they_are_now(config: Path) -> None:
    compare.main(["--config", str(config)])
    results = (config.parent / "report" / "results.csv").read_bytes()
    copy = config.parent / "runs-copy"
    shutil.copytree(config.parent / "runs", copy)
    compare.main(["--config", str(config), "--report-only", "--runs", str(copy)])
    assert (config.parent / "report" / "results.csv").read_bytes() == results


def test_report_only_runs_nothing_and_names_what_is_missing(config: Path) -> None:
    with pytest.raises(ValueError, match=r"runs: got .*, without a finished run of small"):
        compare.main(["--config", str(config), "--report-only"])
    compare.main(["--config", str(config), "--seeds", "[1]"])
    compare.main(["--config", str(config), "--report-only"])
    assert starts(config) == 2
    assert "KerpleLog seed 2, ALiBi seed 2" in (config.parent / "report" / "report.html").read_text()


def test_report_only_says_which_runs_were_made_otherwise(config: Path, capsys: pytest.CaptureFixture[str]) -> None:
    compare.main(["--config", str(config)])
    compare.main(["--config", str(config), "--report-only"])
    assert "another configuration" not in capsys.readouterr().out
    settings = yaml.safe_load(config.read_text())
    settings["strategies"]["ALiBi"] = {"flags": {"trainer.max_steps": 30}}
    config.write_text(yaml.safe_dump(settings, sort_keys=False))
    compare.main(["--config", str(config), "--report-only"])
    printed = capsys.readouterr().out
    warning = "ALiBi seed 2 was run with another configuration: flags.trainer.max_steps: (not there) -> '30'"
    assert warning in printed
    assert "KerpleLog seed 1 was" not in printed
    assert starts(config) == 4


def test_report_of_directories_from_anywhere_needs_no_comparison(config: Path, tmp_path: Path) -> None:
    compare.main(["--config", str(config)])
    folders = [str(tmp_path / "runs" / "ALiBi"), str(tmp_path / "runs" / "KerpleLog" / "seed-1")]
    output = str(tmp_path / "elsewhere")
    compare.main(["--report-only", "--directories", *folders, "--baseline", "ALiBi", "--output", output])
    results = pd.read_csv(tmp_path / "elsewhere" / "results.csv")
    assert set(zip(results["strategy"], results["seed"], strict=True)) == {("ALiBi", 1), ("ALiBi", 2), ("KerpleLog", 1)}


def test_a_directory_without_runs_is_named(config: Path, tmp_path: Path) -> None:
    compare.main(["--config", str(config)])
    folders = [str(tmp_path / "runs" / "ALiBi"), str(tmp_path / "runs" / "KerpelLog")]
    with pytest.raises(ValueError, match=f"got {folders[1]}, without a config.yaml"):
        compare.main(["--report-only", "--directories", *folders, "--baseline", "ALiBi", "--output", str(tmp_path)])


def test_another_test_of_directories_is_reported_if_asked_for(config: Path, tmp_path: Path) -> None:
    compare.main(["--config", str(config)])
    for folder in list((tmp_path / "runs").rglob("test")):
        folder.rename(folder.with_name("sliding"))
    asked = ["--report-only", "--directories", str(tmp_path / "runs"), "--baseline", "ALiBi"]
    asked += ["--output", str(tmp_path / "elsewhere")]
    compare.main([*asked, "--test_folder", "sliding"])
    assert len(pd.read_csv(tmp_path / "elsewhere" / "results.csv")) == 2 * 2 * 2  # strategies, seeds, lengths
    with pytest.raises(ValueError, match=r"/test/\*\.json"):
        compare.main(asked)


def test_parts_are_reported_together(config: Path) -> None:
    settings = yaml.safe_load(config.read_text())
    settings["parts"] = {"code": settings["base"], "prose": settings["base"]}
    config.write_text(yaml.safe_dump(settings, sort_keys=False))
    compare.main(["--config", str(config)])
    results = pd.read_csv(config.parent / "report" / "results.csv")
    assert starts(config) == 8
    assert set(results["protocol"]) == {"code full", "prose full"}


def test_a_stopped_comparison_counts_what_has_ended_and_says_what_comes_next(config: Path) -> None:
    compare.main(["--config", str(config), "--seeds", "[1]"])
    settings = yaml.safe_load(config.read_text())
    work = compare.Comparison(**settings | {"strategies": dict.fromkeys(settings["strategies"])}).jobs()
    _, _, resumed, _ = work  # KerpleLog and ALiBi, seed by seed
    resumed.checkpoint.parent.mkdir(parents=True)
    resumed.checkpoint.touch()
    assert list(run_comparison._stopped(work)) == [
        "stopped: 2 of 4 runs are done",
        f"KerpleLog seed 2: will be resumed from {resumed.checkpoint}",
        "the same command goes on from there and starts the other 1",
    ]


def test_a_failed_run_does_not_stop_the_others(config: Path, capsys: pytest.CaptureFixture[str]) -> None:
    settings = yaml.safe_load(config.read_text())
    settings["strategies"] = {"fail": {}, "KerpleLog": {}}
    config.write_text(yaml.safe_dump(settings, sort_keys=False))
    with pytest.raises(SystemExit) as end:
        compare.main(["--config", str(config)])
    assert end.value.code == 1
    assert "2 of 4 runs failed" in capsys.readouterr().out
    done = [list(json.loads(path.read_text())["tests"]) for path in sorted(config.parent.glob("runs/KerpleLog/*.json"))]
    assert done == [["test"], ["test"]]


def test_runs_sent_to_a_cluster_are_finished(config: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ray = Inline()
    monkeypatch.setitem(sys.modules, "ray", ray)
    monkeypatch.setenv("PYTHONPATH", os.environ.get("PYTHONPATH", ""))  # a worker sets it, which is this process here
    compare.main(["--config", str(config), "--engine", "ray", "--parallel", "2"])
    assert (ray.sent, starts(config)) == (4, 4)
    assert (config.parent / "report" / "results.csv").exists()


def test_ray_that_is_not_there_is_named(config: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(__import__("sys").modules, "ray", None)
    with pytest.raises(ValueError, match=r"pip install 'kerple\[ray\]'"):
        compare.main(["--config", str(config), "--engine", "ray"])


def test_nonsense_is_refused(config: Path) -> None:
    with pytest.raises(ValueError, match="parallel: got 0"):
        compare.main(["--config", str(config), "--parallel", "0"])


@pytest.mark.slow
def test_two_ray_workers_give_the_same_results(config: Path, tmp_path: Path) -> None:
    pytest.importorskip("ray")
    compare.main(["--config", str(config), "--engine", "ray", "--parallel", "2"])
    spread = (tmp_path / "report" / "results.csv").read_bytes()
    compare.main(["--config", str(config), "--runs", str(tmp_path / "local"), "--output", str(tmp_path / "again")])
    assert (tmp_path / "again" / "results.csv").read_bytes() == spread

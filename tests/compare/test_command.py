"""The whole command over stand-in runs: what is run, skipped, refused and reported."""

import json
import os
import shutil
import sys
from pathlib import Path

import pandas as pd
import pytest
import yaml

from kerple.cli import compare
from kerple.cli.main import main
from tests.compare.conftest import change, fits
from tests.inline_ray import Inline


def test_runs_everything_once_and_reports(config: Path, capsys: pytest.CaptureFixture[str]) -> None:
    compare.main(["--config", str(config), "--parallel", "2"])
    report = config.parent / "report" / "results.csv"
    results = pd.read_csv(report)
    assert results.groupby(["strategy", "seed"], sort=False).ngroups == 4
    assert list(results["strategy"].drop_duplicates()) == ["KerpleLog", "ALiBi"]  # in the order of the file
    assert "[4/4]" in capsys.readouterr().out

    before = report.read_bytes()
    compare.main(["--config", str(config)])
    assert sum(fits(config).values()) == 4
    assert report.read_bytes() == before
    assert "4 runs: 4 finished, 0 to do" in capsys.readouterr().out


def test_a_new_strategy_runs_alone_and_a_changed_setting_is_refused(config: Path) -> None:
    compare.main(["--config", str(config)])
    strategies = {"KerpleLog": {}, "ALiBi": {}, "T5": {}}
    change(config, strategies=strategies)
    compare.main(["--config", str(config)])
    assert sum(fits(config).values()) == 6

    change(config, strategies=strategies | {"T5": {"flags": {"trainer.max_steps": 30}}})
    with pytest.raises(ValueError, match=r"T5 seed 1: flags\.trainer\.max_steps: None -> '30'") as refused:
        compare.main(["--config", str(config)])
    assert "ALiBi" not in str(refused.value)
    assert sum(fits(config).values()) == 6

    compare.main(["--config", str(config), "--rerun-changed"])
    assert fits(config)["T5 seed-1"] == 2
    assert sum(fits(config).values()) == 8


def test_a_run_that_was_begun_otherwise_or_is_none_is_refused_and_nothing_is_removed(config: Path) -> None:
    folder = config.parent / "runs" / "ALiBi" / "seed-1"
    folder.mkdir(parents=True)
    (folder / "notes.txt").write_text("mine")
    with pytest.raises(ValueError, match=r"ALiBi seed 1: the folder has no config\.yaml"):
        compare.main(["--config", str(config)])
    written = {"flags": {"seed_everything": "1", "data.seed": "1"}, "data": {"class_path": "other"}}
    (folder / "config.yaml").write_text(yaml.safe_dump(written))
    with pytest.raises(ValueError, match=r"ALiBi seed 1: .*data\.class_path: 'other' -> 'none'"):
        compare.main(["--config", str(config)])
    assert (folder / "notes.txt").read_text() == "mine"
    assert fits(config) == {}


def test_another_test_tests_again_and_does_not_fit_again(config: Path) -> None:
    compare.main(["--config", str(config)])
    change(config, test={"trainer.precision": "32-true"})
    compare.main(["--config", str(config)])
    change(config, test={}, test_folder="other", output=str(config.parent / "second"))
    compare.main(["--config", str(config)])
    assert sum(fits(config).values()) == 4
    first, second = (pd.read_csv(config.parent / name / "results.csv") for name in ("report", "second"))
    assert first.equals(second)


@pytest.mark.parametrize(("removed", "number"), [("test", 4), ("", 5)])
def test_what_was_removed_by_hand_is_made_again(config: Path, removed: str, number: int) -> None:
    compare.main(["--config", str(config)])
    report = config.parent / "report"
    results = (report / "results.csv").read_bytes()
    shutil.rmtree(config.parent / "runs" / "ALiBi" / "seed-2" / removed)
    shutil.rmtree(report)
    compare.main(["--config", str(config), "--report-only"])
    assert "ALiBi seed 2" in (report / "report.html").read_text()
    compare.main(["--config", str(config)])
    assert (report / "results.csv").read_bytes() == results
    assert sum(fits(config).values()) == number


def test_a_test_made_by_hand_is_kept_aside(config: Path) -> None:
    compare.main(["--config", str(config)])
    test = config.parent / "runs" / "ALiBi" / "seed-2" / "test"
    content = json.loads((test / "results.json").read_text())
    del content["run"]
    (test / "results.json").write_text(json.dumps(content))
    (test / "notes.txt").write_text("mine")
    shutil.rmtree(config.parent / "report")
    compare.main(["--config", str(config)])
    (aside,) = test.parent.glob("test-*")
    assert (aside / "notes.txt").read_text() == "mine"


def test_report_only_runs_nothing_and_names_what_is_missing(config: Path) -> None:
    with pytest.raises(ValueError, match="no finished run of small"):
        compare.main(["--config", str(config), "--report-only"])
    compare.main(["--config", str(config), "--seeds", "[1]"])
    compare.main(["--config", str(config), "--report-only"])
    assert sum(fits(config).values()) == 2
    assert "KerpleLog seed 2, ALiBi seed 2" in (config.parent / "report" / "report.html").read_text()


def test_a_report_removes_nothing_that_lies_beside_it(config: Path) -> None:
    compare.main(["--config", str(config)])
    mine = config.parent / "report" / "loss-relative-to-mine.png"
    mine.write_text("mine")
    compare.main(["--config", str(config), "--report-only"])
    assert mine.read_text() == "mine"


def test_report_of_directories_from_anywhere_needs_no_comparison(config: Path, tmp_path: Path) -> None:
    compare.main(["--config", str(config)])
    folders = [str(tmp_path / "runs" / "ALiBi"), str(tmp_path / "runs" / "KerpleLog" / "seed-1")]
    rest = ["--baseline", "ALiBi", "--output", str(tmp_path / "elsewhere")]
    compare.main(["--report-only", "--directories", *folders, *rest])
    results = pd.read_csv(tmp_path / "elsewhere" / "results.csv")
    assert set(zip(results["strategy"], results["seed"], strict=True)) == {("ALiBi", 1), ("ALiBi", 2), ("KerpleLog", 1)}
    with pytest.raises(ValueError, match="KerpelLog, expected a directory with runs"):
        compare.main(["--report-only", "--directories", folders[0], str(tmp_path / "runs" / "KerpelLog"), *rest])
    with pytest.raises(ValueError, match=r"sliding/results\.json"):
        compare.main(["--report-only", "--directories", *folders, *rest, "--test_folder", "sliding"])


def test_parts_are_reported_together(config: Path) -> None:
    change(config, parts={"code": {"data.corpus": "a"}, "prose": {"data.corpus": "b"}})
    compare.main(["--config", str(config)])
    results = pd.read_csv(config.parent / "report" / "results.csv")
    assert sum(fits(config).values()) == 8
    assert set(results["protocol"]) == {"code full", "prose full"}


def test_a_failed_run_does_not_stop_the_others(config: Path, capsys: pytest.CaptureFixture[str]) -> None:
    change(config, strategies={"fail": {}, "Unmeasured": {}, "KerpleLog": {}})
    with pytest.raises(SystemExit) as end:
        compare.main(["--config", str(config)])
    assert end.value.code == 1
    printed = capsys.readouterr().out
    assert "4 of 6 runs failed" in printed
    assert "the position of the fake is not a position" in printed  # the end of its log
    assert "got no results" in printed
    assert len(list(config.parent.glob("runs/KerpleLog/*/test/results.json"))) == 2


def test_threads_are_shared_unless_the_user_says_how_many(config: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []

    def popen(command: list[str], env: dict[str, str], **_: object) -> None:
        asked.append((env["OMP_NUM_THREADS"], env["MKL_NUM_THREADS"]))
        raise KeyboardInterrupt

    monkeypatch.setattr("kerple.compare.job.subprocess.Popen", popen)
    monkeypatch.setattr("kerple.compare.engines.cores", lambda: 8)
    for variable in ("OMP_NUM_THREADS", "MKL_NUM_THREADS"):
        monkeypatch.delenv(variable, raising=False)
    for threads in (None, "1"):
        if threads:
            monkeypatch.setenv("OMP_NUM_THREADS", threads)
        with pytest.raises(SystemExit):
            compare.main(["--config", str(config), "--parallel", "2"])
    assert {*asked[:1], *asked[-1:]} == {("4", "4"), ("1", "1")}


def test_runs_sent_to_a_cluster_are_finished(config: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ray = Inline()
    monkeypatch.setitem(sys.modules, "ray", ray)
    monkeypatch.setenv("PYTHONPATH", os.environ.get("PYTHONPATH", ""))  # a worker sets it, which is this process here
    compare.main(["--config", str(config), "--engine", "ray", "--parallel", "2"])
    assert (ray.sent, sum(fits(config).values())) == (4, 4)
    assert (config.parent / "report" / "results.csv").exists()


def test_ray_that_is_not_there_is_named(config: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(ValueError, match="ray"):
        compare.main(["--config", str(config), "--engine", "ray"])


@pytest.mark.parametrize(
    "mistake",
    [
        {"strategie": {"T5": {}}},
        {"strategies": {"KerpleLog": {"option": {}}}},
        {"test_folder": "checkpoints"},
        {"seeds": [1, 1]},
        {"baseline": "T6"},
    ],
)
def test_a_mistake_in_the_file_is_one_line(config: Path, capsys: pytest.CaptureFixture[str], mistake: dict) -> None:
    change(config, **mistake)
    with pytest.raises(SystemExit) as end:
        main(["compare", "--config", str(config)])
    assert end.value.code == 2
    error = capsys.readouterr().err
    assert error.count("\n") == 1
    name = next(iter(mistake["strategies"]["KerpleLog"])) if "strategies" in mistake else next(iter(mistake))
    assert name in error
    assert fits(config) == {}


@pytest.mark.slow
def test_two_ray_workers_give_the_same_results(config: Path, tmp_path: Path) -> None:
    pytest.importorskip("ray")
    compare.main(["--config", str(config), "--engine", "ray", "--parallel", "2"])
    spread = (tmp_path / "report" / "results.csv").read_bytes()
    compare.main(["--config", str(config), "--runs", str(tmp_path / "local"), "--output", str(tmp_path / "again")])
    assert (tmp_path / "again" / "results.csv").read_bytes() == spread

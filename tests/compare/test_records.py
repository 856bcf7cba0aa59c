"""Committed records of runs: which of them are taken in place of a run that is asked for, and which are not."""

import csv
import json
import platform
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml
from tests.compare.fake_compare import stand_in

from kerple.cli import compare, run_comparison
from kerple.compare import records
from kerple.compare.comparison import Job
from kerple.evaluation.results import VERSION

Compare = Callable[..., str]


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Compare:
    """Runs a comparison of 2 strategies × 2 seeds with other flags for ALiBi; what it printed."""
    stand_in(monkeypatch.setattr)
    monkeypatch.setenv("FAKE_VERSION", str(VERSION))
    (tmp_path / "base.yaml").write_text("{}")

    def call(also: list[str] | None = None, output: str = "report", test_folder: str = "test", **flags: Any) -> str:
        settings = {
            "name": "small",
            "base": [str(tmp_path / "base.yaml")],
            "strategies": {"KerpleLog": {}, "ALiBi": {"flags": flags}},
            "seeds": [1, 2],
            "baseline": "KerpleLog",
            "runs": str(tmp_path / "runs"),
            "output": str(tmp_path / output),
            "test_folder": test_folder,
            "also": also or [],
        }
        (tmp_path / "compare.yaml").write_text(yaml.safe_dump(settings, sort_keys=False))
        capsys.readouterr()
        compare.main(["--config", str(tmp_path / "compare.yaml")])
        return capsys.readouterr().out

    return call


@pytest.fixture
def unreported(monkeypatch: pytest.MonkeyPatch) -> None:
    """No reports are written: they take longer than all the rest."""
    monkeypatch.setattr(run_comparison, "_write", lambda comparison, work: (Path(), None))
    monkeypatch.setattr(run_comparison, "_report", lambda comparison, work: None)


def fits(folder: Path) -> dict[str, int]:
    found = sorted((folder / "runs").rglob("*.starts"))
    return {f"{path.parent.name} {path.stem}": len(path.read_text().splitlines()) for path in found}


def test_without_logs_the_report_comes_from_the_committed_runs(run: Compare, tmp_path: Path) -> None:
    run()
    names = ("results.csv", "summary.csv", "table.md")
    before = {name: (tmp_path / "report" / name).read_bytes() for name in names}
    shutil.rmtree(tmp_path / "runs")

    printed = run()

    assert fits(tmp_path) == {}
    assert {name: (tmp_path / "report" / name).read_bytes() for name in names} == before
    assert "4 runs: 4 finished (4 of them were taken from committed runs), 0 to do" in printed
    assert f"ALiBi seed 2: taken from {tmp_path}/report/runs/ALiBi/seed-2.json" in printed


@pytest.mark.usefixtures("unreported")
def test_a_second_test_of_runs_that_were_taken_is_taken_too(run: Compare, tmp_path: Path) -> None:
    run()
    run(output="second", test_folder="sliding")
    shutil.rmtree(tmp_path / "runs")
    run()  # makes the folders, without checkpoints
    printed = run(output="second", test_folder="sliding")
    assert "4 runs: 4 finished (4 of them were taken from committed runs), 0 to do" in printed
    assert fits(tmp_path) == {}
    assert "4 runs: 4 finished, 0 to do" in run()  # and the first test is still there


def test_report_only_has_the_committed_runs_and_trains_no_other(run: Compare, tmp_path: Path) -> None:
    run()
    shutil.rmtree(tmp_path / "runs")
    (tmp_path / "report/runs/ALiBi/seed-2.json").unlink()

    compare.main(["--config", str(tmp_path / "compare.yaml"), "--report-only"])

    assert fits(tmp_path) == {}
    with (tmp_path / "report/results.csv").open() as file:
        found = {(row["strategy"], row["seed"]) for row in csv.DictReader(file)}
    assert found == {("KerpleLog", "1"), ("KerpleLog", "2"), ("ALiBi", "1")}


@pytest.mark.usefixtures("unreported")
def test_one_option_of_one_strategy_trains_only_its_runs(run: Compare, tmp_path: Path) -> None:
    run()
    shutil.rmtree(tmp_path / "runs")

    printed = run(**{"trainer.max_steps": 30})

    assert fits(tmp_path) == {"ALiBi seed-1": 1, "ALiBi seed-2": 1}
    assert "ALiBi seed 1: not from " in printed
    assert "has another configuration: flags.trainer.max_steps: (not there) -> '30'" in printed
    shutil.rmtree(tmp_path / "runs")
    run(**{"trainer.max_steps": 30})  # what was trained in its place is committed now
    assert fits(tmp_path) == {}


@pytest.mark.usefixtures("unreported")
def test_runs_committed_beside_another_report_are_taken_where_they_are_the_same(run: Compare, tmp_path: Path) -> None:
    run()
    shutil.rmtree(tmp_path / "runs")

    first = str(tmp_path / "report")
    printed = run(also=[str(tmp_path / "nowhere"), first], output="second", **{"trainer.max_steps": 30})

    assert fits(tmp_path) == {"ALiBi seed-1": 1, "ALiBi seed-2": 1}
    assert f"KerpleLog seed 2: taken from {first}/runs/KerpleLog/seed-2.json" in printed
    assert f"ALiBi seed 2: not from {first}/runs/ALiBi/seed-2.json: has another configuration" in printed
    shutil.rmtree(tmp_path / "runs")
    shutil.rmtree(first)
    run(output="second", **{"trainer.max_steps": 30})  # what was taken is kept beside this report too
    assert fits(tmp_path) == {}


def changed(path: Path, change: Callable[[dict[str, Any]], None]) -> None:
    record = json.loads(path.read_text())
    change(record)
    path.write_text(json.dumps(record))


@pytest.mark.usefixtures("unreported")
def test_a_record_that_is_not_the_run_is_refused_with_the_reason(run: Compare, tmp_path: Path) -> None:
    run()
    path = tmp_path / "report" / "runs" / "ALiBi" / "seed-2.json"
    whole = path.read_text()
    for change, reason in (
        (lambda record: record.update(version=VERSION - 1), f"has results of version {VERSION - 1}"),
        (lambda record: record.update(data="0" * 64), f"from those here (Python {platform.python_version()})"),
        (lambda record: record.update(test={"flags": ["--x"], "configs": {}}), "was tested otherwise"),
        (lambda record: record["config"].update(extra=1), "has a configuration that is not the one of its hash"),
        (lambda record: record.pop("run"), "cannot be read (KeyError: 'run')"),
        (lambda record: record["run"].update(test=[]), "cannot be read (AttributeError"),
        (lambda record: record["run"]["test"]["extrapolation.json"].update(documents=True), "was tested by an earlier"),
    ):
        shutil.rmtree(tmp_path / "runs")
        path.write_text(whole)
        changed(path, change)
        assert reason in run()
        assert fits(tmp_path) == {"ALiBi seed-2": 1}, reason


@pytest.mark.usefixtures("unreported")
def test_a_record_that_may_hold_anything_leaves_nothing_behind(run: Compare, tmp_path: Path) -> None:
    run()
    whole = (tmp_path / "report" / "runs" / "ALiBi" / "seed-2.json").read_text()
    config, broken = json.loads(whole)["config"], tmp_path / "broken.json"
    directory = tmp_path / "elsewhere" / "seed-2"
    job = Job("ALiBi", 2, directory, ("--fit",), (f"--run_dir={directory / 'test'}",))
    for change in (
        lambda record: record["run"].pop("config.yaml"),
        lambda record: record["run"].update({"config.yaml": [1]}),
        lambda record: record["run"]["test"].update({"..": []}),
        lambda record: record["run"]["test"].update({"\0": []}),
        lambda record: record["run"]["test"]["extrapolation.json"]["rows"][0].update(length="x"),
        lambda record: record["run"].update({"cost.json": 1}),
        lambda record: record["run"].update({"cost.json": {"environment": 1}}),
        lambda record: record.pop("hash"),
    ):
        broken.write_text(whole)
        changed(broken, change)
        assert "cannot be read (" in (records.take(job, config, None, broken) or "")
        assert list(directory.parent.iterdir()) == []
    broken.write_text(whole)
    assert records.take(job, config, None, broken) is None
    assert records.take(job, config, None, broken) is None  # as by another comparison at the same time
    assert (directory / "test" / "extrapolation.json").exists()


@pytest.mark.usefixtures("unreported")
def test_a_run_that_was_made_again_elsewhere_replaces_its_record(run: Compare, tmp_path: Path) -> None:
    run()
    kept = tmp_path / "report" / "runs" / "ALiBi" / "seed-2.json"
    changed(kept, lambda record: record["config"].update({"flags.trainer.max_steps": "30"}))
    run()  # the run is there, so that nothing is taken
    assert "flags.trainer.max_steps" not in json.loads(kept.read_text())["config"]
    whole = kept.read_text()
    kept.write_text(whole[:100])
    run()
    assert kept.read_text() == whole


def test_where_data_lies_is_no_difference_if_it_has_checksums(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(records, "choose", lambda accelerator: ("bf16-mixed", f"said of {accelerator}"))
    place = "data.init_args."
    always = {f"{place}seed": 1, f"{place}corpus_share": 0.5, "trainer.gradient_clip_val": 1.0}
    config = {f"{place}directory": "here", f"{place}corpus": "a", f"{place}cache": "b", "trainer.precision": "auto"}
    settled = always | {"trainer.precision": "bf16-mixed"}
    assert records._settled(always | config | {f"{place}workers": 4}, "checksum") == settled
    assert records._settled(always | config | {f"{place}workers": 4}, None) == config | settled


def test_a_run_without_a_limit_has_a_record_of_strict_json(tmp_path: Path) -> None:
    job = Job("ALiBi", 1, tmp_path / "seed-1", (), (f"--run_dir={tmp_path / 'seed-1' / 'test'}",))
    (job.test_folder).mkdir(parents=True)
    (job.directory / "config.yaml").write_text("trainer: {gradient_clip_val: .inf}")
    records.keep(job, {"trainer.gradient_clip_val": float("inf")}, None, tmp_path / "record.json")
    record = json.loads((tmp_path / "record.json").read_text(), parse_constant=pytest.fail)
    assert record["config"] == {"trainer.gradient_clip_val": "Infinity"}


def test_tables_that_were_condensed_once_read_the_same(tmp_path: Path) -> None:
    from kerple.compare.collect import read
    from kerple.compare.files import results_of, unpack

    from tests.compare.runs_on_disk import write_run

    directory = write_run(tmp_path / "run", "ALiBi", 1236, (20.0, 19.0, 18.5, 18.25))
    rows = "".join(f"0,{distance},{-0.1 * distance:.17g}\n" for distance in range(2048))
    (directory / "test" / "kernels.csv").write_text(f"head,distance,bias\n{rows}")
    unpack(json.loads(json.dumps(results_of(directory))), tmp_path / "again")
    ours, again = (read([run_comparison.Run("ALiBi", 1236, folder)]) for folder in (directory, tmp_path / "again"))
    assert again.results.equals(ours.results)
    assert again.blocks.equals(ours.blocks)
    assert again.costs.equals(ours.costs)
    assert again.analyses["kernels"].equals(ours.analyses["kernels"])
    assert list(again.configs.values()) == list(ours.configs.values())
    assert len(again.analyses["kernels"]) < 100


def test_a_record_says_with_which_precision_and_data_its_run_began(tmp_path: Path) -> None:
    job = Job("ALiBi", 1, tmp_path / "seed-1", (), (f"--run_dir={tmp_path / 'seed-1' / 'test'}",))
    job.test_folder.mkdir(parents=True)
    (job.directory / "config.yaml").write_text("trainer: {precision: bf16-true}")  # no machine's own choice
    job.beside(".json").write_text(json.dumps({"config": {}, "data": "then", "fitted": True, "tests": {}}))
    records.keep(job, {"trainer.precision": "auto"}, "now", tmp_path / "record.json")
    record = json.loads((tmp_path / "record.json").read_text())
    assert (record["config"], record["data"]) == ({"trainer.precision": "bf16-true"}, "then")


@pytest.mark.usefixtures("unreported")
def test_runs_on_data_that_was_replaced_are_refused_or_made_again(
    run: Compare, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(records, "fingerprint", lambda data: "a")
    run()
    monkeypatch.setattr(records, "fingerprint", lambda data: "b")
    with pytest.raises(ValueError, match=r"KerpleLog seed 1, .*ALiBi seed 2: began on data with other checksums"):
        run(output="another")
    config = str(tmp_path / "compare.yaml")
    compare.main(["--config", config, "--rerun_changed"])
    assert set(fits(tmp_path).values()) == {2}
    kept = json.loads((tmp_path / "another/runs/ALiBi/seed-1.json").read_text())
    assert kept["data"] == "b"

"""A record of a finished run is reused instead of training if its configuration, data and test are the same."""

import gzip
import json
import math
import re
import shutil
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import pytest

from kerple.cli import compare
from kerple.compare import committed_records, resolution
from kerple.compare.comparison_file import read_comparison
from kerple.compare.finished_runs import read_runs
from kerple.compare.planned_run import PlannedRun
from kerple.compare.run_discovery import PACKED, record_folders, recorded_runs
from kerple.measure import results_table
from tests.compare.conftest import WHOLE_TABLE, change, fits, resolve, run, runs_in

ROOT = Path(__file__).parents[2]
ROWS = gzip.compress(b"metric,value\n" + b"ppl,1.25\n" * 40)  # a compressed table
# without results/earlier/retrofit, whose runs start from a model that is not in the repository
COMMITTED = sorted([*ROOT.glob("configs/compare/*.yaml"), *ROOT.glob("results/earlier/[!r]*/comparison.yaml")])


@pytest.mark.slow
def test_records_replace_runs_whose_folders_are_missing(config, capsys, monkeypatch):
    report, names = config.parent / "report", (WHOLE_TABLE, "summary.csv", "table.md", "costs.csv", PACKED)
    run(config)
    before = {name: (report / name).read_bytes() for name in names}
    shutil.rmtree(config.parent / "runs")
    run(config)
    assert {name: (report / name).read_bytes() for name in names} == before
    assert fits(config) == {}
    assert f"KerpleLog seed 1 and 3 other runs: reused from {report}\n" in capsys.readouterr().out
    shutil.rmtree(config.parent / "runs")
    with monkeypatch.context() as patch:
        patch.setattr(resolution, "prepare_and_checksum", lambda data: pytest.fail("a report reads no corpus"))
        run(config, "--report_only", "true")
    assert {name: (report / name).read_bytes() for name in names} == before
    shutil.rmtree(config.parent / "runs")
    shutil.copytree(record_folders(report)[1], report / "runs")
    (report / PACKED).unlink()
    (report / "runs/ALiBi/seed-2" / results_table.ABOUT).write_text("{")
    (mine := report / "runs/KerpleLog/seed-1/figures/mine.txt").parent.mkdir()
    mine.write_text("mine")
    run(config)  # trains this run again, and writes its record
    assert [path for path in (report / "runs").rglob("*") if path.is_file()] == [mine]
    shutil.rmtree(report / "runs")
    assert fits(config) == {"ALiBi seed-2": 1}
    assert len(read_runs(recorded_runs(report)).configs) == 4

    # records of another report are reused if they are those of the same runs
    shutil.rmtree(config.parent / "runs")
    strategies = {"KerpleLog": {}, "ALiBi": {"flags": {"trainer.max_steps": 30}}}
    reuse_from = [str(config.parent / "nowhere"), str(report)]
    change(config, strategies=strategies, reuse_from=reuse_from, output=str(config.parent / "second"))
    compare.main(["--config", str(config)])
    assert fits(config) == {"ALiBi seed-1": 1, "ALiBi seed-2": 1}
    printed = capsys.readouterr().out
    assert f"warning: compare: reuse_from: {config.parent}/nowhere does not exist" in printed
    assert f"KerpleLog seed 1 and 1 other run: reused from {report}\n" in printed
    assert f"ALiBi seed 1 and 1 other run: not reused from {report}: has another fit: flags." in printed
    assert {run.strategy for run in recorded_runs(config.parent / "second")} == {"ALiBi"}

    own = config.parent / "runs/KerpleLog/seed-1/test" / results_table.ABOUT  # of a test that the user started
    own.write_text("{}")
    compare.main(["--config", str(config), "--report_only", "true"])
    assert own.read_text() == "{}"


@pytest.mark.slow
def test_a_run_with_damaged_results_is_not_in_the_report_and_is_tested_again(config, capsys):
    change(config, seeds=[1])
    before = run(config)
    for name in ("kernels.csv", results_table.TABLE):
        path = config.parent / "runs/ALiBi/seed-1/test" / name
        path.write_bytes(path.read_bytes()[:10] if path.is_file() else b"")
        run(config, "--report_only", "true")
        assert runs_in(config.parent / "report") == {("KerpleLog", 1)}
        assert capsys.readouterr().out.count(f"warning: {path}: ") == 1
        if name == "kernels.csv":
            path.unlink()
    assert run(config) == before


def test_a_damaged_record_is_written_again_and_not_packed(config: Path) -> None:
    change(config, seeds=[1])
    run(config)
    report = config.parent / "report"
    packed, record = (report / PACKED).read_bytes(), report / "runs/ALiBi/seed-1"
    for content in (b"", ROWS[:-9]):
        shutil.copytree(record_folders(report)[1] / "ALiBi/seed-1", record)
        (record / results_table.TABLE).write_bytes(content)
        with pytest.raises(ValueError, match=re.escape(f"{record / results_table.TABLE}: cannot be read")):
            committed_records.pack(report)
        assert (report / PACKED).read_bytes() == packed
        run(config)
        assert not record.exists()
        assert (report / PACKED).read_bytes() == packed


def test_commands_that_reuse_the_same_records_do_it_one_after_the_other(config: Path) -> None:
    run(config)
    report, commands = config.parent / "report", []
    for output in "abcd":
        change(config, runs=str(config.parent / "other"), output=str(config.parent / output), reuse_from=[str(report)])
        comparison = read_comparison(str(config))
        commands.append((resolution.plan_runs(comparison, 1, report_only=True), comparison, True))
    with ThreadPoolExecutor(len(commands)) as pool:
        assert list(pool.map(lambda command: resolution.reuse_records(*command), commands)) == [{}] * 4
    for of_run in commands[0][0]:
        record = of_run.record(record_folders(report)[1])
        assert {path.name: path.read_bytes() for path in of_run.test_folder.iterdir()} == {
            path.name: path.read_bytes() for path in record.iterdir()
        }


def test_a_damaged_or_different_record_is_refused_with_the_reason_and_not_copied(config: Path, tmp_path: Path) -> None:
    change(config, strategies={"KerpleLog": {}}, seeds=[2])
    run(config)
    whole, record, folder = recorded_runs(tmp_path / "report")[0].folder, tmp_path / "broken", tmp_path / "reused"
    flags = [f"--config={tmp_path}/base.yaml", "--seed_everything=2", "--data.seed=2"]
    job = PlannedRun("KerpleLog", 2, "", folder, folder / "test", [], flags, ["--model.position=KerpleLog"])
    job = replace(resolve(job), data="a checksum", inputs={"mine.Root": "1"})
    about = json.loads((whole / results_table.ABOUT).read_text())
    for name, content, reason in (
        (results_table.ABOUT, about | {"version": 1}, "version 1"),
        (results_table.ABOUT, about | {"run": about["run"] | {"data": "0"}}, "its data has another checksum"),
        (results_table.ABOUT, about | {"run": about["run"] | {"test": {"x": 1}}}, "has another test"),
        (results_table.ABOUT, about | {"run": about["run"] | {"inputs": {"mine.Root": "0"}}}, "mine.Root has changed"),
        (results_table.ABOUT, about | {"run": None}, "cannot be read"),
        (results_table.ABOUT, "[" * 100_000, "cannot be read"),
        (results_table.TABLE, "nothing", "cannot be read"),
        ("results.csv", "a\n1\n", "cannot be read"),  # would replace a table of the report
        (results_table.TABLE, ROWS[:-9], "cannot be read"),  # the end is missing
        ("kernels.csv.gz", ROWS[:-9], "cannot be read"),
        ("kernels.csv.gz", ROWS[:20] + b"\xff\xff" + ROWS[22:], "cannot be read"),
    ):
        shutil.copytree(whole, record)
        content = content if isinstance(content, str | bytes) else json.dumps(content)
        (record / name).write_bytes(content if isinstance(content, bytes) else content.encode())
        assert reason in committed_records.reuse(job, record)
        assert not folder.exists(), reason
        shutil.rmtree(record)
    folder.touch()
    with pytest.raises(OSError, match="Not a directory"):  # an error of this folder, not of the record
        committed_records.reuse(job, whole)
    folder.unlink()
    (folder / "test").mkdir(parents=True)
    (folder / "test" / "kernels.csv").write_text("a\n1\n")  # of an earlier test
    assert committed_records.reuse(job, whole) is None
    assert not (folder / "test" / "kernels.csv").exists()
    assert (folder / "test" / results_table.TABLE).exists()
    job = replace(job, test_config=job.test_config | {"limit": math.inf})  # which JSON cannot represent
    committed_records.complete(job)
    assert committed_records.changed_test(results_table.read(folder / "test")[1]["run"], job) == []
    assert committed_records.finished(job)
    for lacking in ("config", "data", "test"):
        run_entry = {key: value for key, value in about["run"].items() if key != lacking}
        (folder / "test" / results_table.ABOUT).write_text(json.dumps(about | {"run": run_entry}))
        assert not committed_records.finished(job)


@pytest.mark.slow
@pytest.mark.parametrize("path", COMMITTED, ids=lambda path: f"{path.parent.name}-{path.stem}")
def test_a_committed_record_is_one_of_the_run_that_its_comparison_describes_today(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(ROOT)  # paths in comparison files are relative to the current folder
    comparison = read_comparison(str(path))
    records = {}
    for planned in {planned.label: planned for planned in comparison.planned_runs()}.values():
        folders = [planned.record(folder) for folder in comparison.records]
        records[planned] = [folder for folder in folders if (folder / results_table.ABOUT).is_file()]
    if not any(records.values()):
        pytest.skip("no committed records")
    for planned, (record, *_) in records.items():
        entry, now = results_table.read(record)[1]["run"], resolution.resolve(planned)
        changed = committed_records.changed_fit(entry, now) + committed_records.changed_test(entry, now)
        # PoPE's phase was added to queries, and is added to keys now
        assert changed == (["model.position.init_args.phase: 0.0 -> None"] if planned.label == "PoPE" else [])

"""`compare` from the first run to the report: a run is trained once, and again only if its configuration changes."""

import json
import math
import shutil
import sys
from dataclasses import replace
from io import StringIO
from pathlib import Path
from typing import Any
from zipfile import ZipFile

import pandas as pd
import pytest
import yaml

from kerple.cli import compare
from kerple.cli.main import main
from kerple.compare import comparison_duration, resolution, run_process, workflow
from kerple.compare.planned_run import PlannedRun
from kerple.compare.run_discovery import PACKED
from kerple.config.user_code_digests import package_digest
from kerple.measure import results_table
from tests.compare.conftest import WHOLE_TABLE, change, fits, resolve, run, runs_in
from tests.compare.runs_on_disk import CURVES, write_run


def test_each_run_is_trained_and_tested_once_and_reported(config: Path, capsys: pytest.CaptureFixture[str]) -> None:
    change(config, seeds=[1])
    with pytest.raises(ValueError, match="no finished run of small"):
        run(config, "--report_only", "true")
    assert fits(config) == {}
    before, table = run(config, "--parallel", "2"), pd.read_csv(config.parent / "report" / WHOLE_TABLE)
    assert len(runs_in(config.parent / "report")) == 2
    assert list(table["strategy"].drop_duplicates()) == ["KerpleLog", "ALiBi"]  # in the order of the file
    assert "[2/2]" in capsys.readouterr().out
    change(config, test_folder="other")
    assert run(config) == before
    assert "2 runs: 0 finished, 2 to do" in capsys.readouterr().out
    assert len(list(config.parent.glob("runs/*/*/test/results.json"))) == 2  # the first test is kept
    assert sum(fits(config).values()) == 2
    assert set(pd.read_csv(config.parent / "report/costs.csv")["parallel"]) == {2}  # at the fit, not at the last test
    assert run(config) == before
    assert "2 runs: 2 finished, 0 to do" in capsys.readouterr().out


@pytest.mark.slow
def test_the_parts_of_a_comparison_are_compared_with_the_baseline(config, capsys):
    change(config, name="a ### b", parts={"copy": {}, "sort": {}}, baseline="ALiBi")
    run(config)
    assert "ratio to ALiBi" in (config.parent / "report/table.md").read_text()
    assert "ratio to ALiBi" in capsys.readouterr().out  # the first table


def test_a_report_of_folders_needs_no_comparison_file_and_removes_no_file(tmp_path: Path) -> None:
    for label, seed in (("ALiBi", 1235), ("ALiBi", 1236), ("KerpleLog", 1235)):
        write_run(tmp_path / "runs" / label / f"seed-{seed}", label, seed, CURVES[label])
    test = write_run(tmp_path / "whole", "RoPE", 1237, CURVES["RoPE"])
    shutil.copytree(test, tmp_path / "mine" / "test")  # a folder with only its test
    figure = tmp_path / "report" / "loss-relative-to-mine.png"
    figure.parent.mkdir()
    figure.write_text("mine")
    folders = [str(tmp_path / name) for name in ("runs/ALiBi", "runs/KerpleLog/seed-1235", "mine")]
    arguments = ["--report_only", "true", "--baseline", "ALiBi", "--output", str(figure.parent)]
    arguments += ["--directories", *folders]
    compare.main(arguments)
    assert runs_in(figure.parent) == {("ALiBi", 1235), ("ALiBi", 1236), ("KerpleLog", 1235), ("mine", 0)}
    assert figure.read_text() == "mine"
    with pytest.raises(ValueError, match="test_folder: got '/a/test', expected the name of a folder"):
        compare.main([*arguments, "--test_folder", "/a/test"])
    with pytest.raises(ValueError, match=r"sliding/results\.json"):
        compare.main([*arguments, "--test_folder", "sliding"])
    for mistake, message in (
        (["--output", str(tmp_path / "mine/test/results.json/report")], "results.json is not a folder"),
        (["--report_only", "false"], "report_only: got false, expected true"),
    ):
        with pytest.raises(ValueError, match=message):
            compare.main([*arguments, *mistake])


@pytest.mark.slow
def test_the_first_line_lists_deviations_from_the_plan(config: Path, capsys: pytest.CaptureFixture[str]) -> None:
    plan, page = config.with_name("plan.yaml"), config.with_name("page.md")
    page.write_text("the plan")
    shutil.copy(config, plan)
    change(config, plan=str(plan), plan_page=str(page), test={"blocks": "400"})
    change(plan, test={"blocks": "400"}, planned_data="a checksum")
    run(config)
    assert not (config.parent / "report/table.md").read_text().startswith("Not as planned")
    change(config, plan=str(config.parent / "folder" / ".." / plan.name))  # another path of the same file
    (config.parent / "folder").mkdir()
    run(config)
    assert not (config.parent / "report/table.md").read_text().startswith("Not as planned")
    change(config, plan=str(plan))
    change(plan, strategies={"KerpleLog": {"flags": {"trainer.max_steps": 30}}, "T5": {}}, seeds_seen_before_plan=[2])
    change(plan, planned_data="of the plan", planned_code="1", baseline="KerpleLog")
    change(plan, test={"blocks": "200"})
    page.write_text("another plan")
    run(config)
    line, *_ = (config.parent / "report/table.md").read_text().splitlines()
    assert line.startswith("Not as planned: missing: T5 seed 1, T5 seed 2; ")
    both, every = "KerpleLog seed 1, KerpleLog seed 2", "KerpleLog seed 1, ALiBi seed 1, KerpleLog seed 2, ALiBi seed 2"
    for what in (
        f"flags.trainer.max_steps: None -> '30': {both}",
        f"test: blocks: '400' -> '200': {both}",
        "not planned: ALiBi seed 1, ALiBi seed 2",
        f"other data, checksum a checksum: {every}",
        f"other code, digest {package_digest()}: {every}",
        f"another version of {plan} at training: {every}",
        f"another version of {page} at training: {every}",
        "results known before the plan: KerpleLog seed 2, ALiBi seed 2",
    ):
        assert what in line
    assert line in capsys.readouterr().out
    change(plan, seeds_seen_before_plan=[], looked_at=[2])  # the option's name in committed plans
    run(config)
    assert (config.parent / "report/table.md").read_text().startswith(line)


@pytest.mark.slow
def test_a_repeated_test_keeps_the_version_of_the_plan_at_training(config: Path) -> None:
    plan, page, report = config.with_name("plan.yaml"), config.with_name("page.md"), config.parent / "report"
    page.write_text("the plan")
    shutil.copy(config, plan)
    change(config, plan=str(plan), plan_page=str(page))
    run(config, "--seeds", "[1]")
    page.write_text("another plan")
    for test, to_repeat in (({}, ""), ({"blocks": "9"}, ""), ({"blocks": "9"}, "runs/*/*/test"), ({}, "runs/*/*/test")):
        for folder in (report, *(config.parent.glob(to_repeat) if to_repeat else ())):
            shutil.rmtree(folder)
        change(config, test=test)
        run(config, "--seeds", "[1]")
        assert f"another version of {page} at training: KerpleLog seed 1, ALi" in (report / "table.md").read_text()
    second = config.with_name("second.yaml")  # the plan of another test of the same runs
    shutil.copy(config, second)
    change(config, plan=str(second), plan_page=None, test_folder="second")
    run(config, "--seeds", "[1]")
    assert "another version" not in (report / "table.md").read_text()


@pytest.mark.slow
def test_another_corpus_than_the_planned_one_is_a_deviation(config: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def with_corpus(planned: PlannedRun) -> PlannedRun:
        planned = resolve(planned)
        data = {"data": {"class_path": "none", "corpus": planned.config["flags"].pop("corpus")}}
        return replace(planned, config=planned.config | data, test_config=planned.test_config | data)

    for module in (resolution, workflow):
        monkeypatch.setattr(module, "resolve", with_corpus)
    plan = config.with_name("plan.yaml")
    shutil.copy(config, plan)
    change(plan, flags={"corpus": "code"})
    change(config, flags={"corpus": "rfc"}, plan=str(plan))
    for data, number in ((None, 1), ("a checksum", 0)):  # equal data may have another name
        change(plan, planned_data=data)
        run(config)
        line, *_ = (config.parent / "report/table.md").read_text().splitlines()
        assert line.count("its data has another corpus: 'rfc' -> 'code': KerpleLog seed 1, ALiBi seed 1, ") == number


@pytest.mark.slow
def test_diverged_and_missing_runs_are_named(config: Path, capsys: pytest.CaptureFixture[str]) -> None:
    change(config, plan=str(config), strategies={"KerpleLog": {}, "ALiBi": {"seeds": 1}}, seeds=[1, 2, 3])
    run(config)
    assert "Not as planned" not in capsys.readouterr().out
    for seed, factor in ((1, 1.6), (2, 1.0), (3, math.inf)):
        test = config.parent / f"runs/KerpleLog/seed-{seed}/test"
        results_table.write_table(test, results_table.read(test)[0].assign(sum=lambda table: table["sum"] * factor))  # noqa: B023
    (config.parent / "report" / PACKED).unlink()
    run(config, "--report_only", "true")
    assert "diverged, loss not finite or above 1.5 times the median: KerpleLog seed 3.\n" in capsys.readouterr().out
    shutil.rmtree(config.parent / "runs/KerpleLog/seed-3")
    (config.parent / "report" / PACKED).unlink()
    run(config, "--report_only", "true")
    printed = capsys.readouterr().out
    assert "missing: KerpleLog seed 3\n" in printed
    assert "Not as planned: missing: KerpleLog seed 3" in printed
    assert runs_in(config.parent / "report") == {("ALiBi", 1)}  # no interim look at KerpleLog
    for folder in ("runs/ALiBi", "report"):
        shutil.rmtree(config.parent / folder)
    with pytest.raises(ValueError, match="no strategy with all its runs"):
        run(config, "--report_only", "true")


@pytest.mark.slow
def test_a_report_without_a_complete_strategy_is_refused_before_the_options_of_runs_are_read(
    config: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    resolved, resolve = [], resolution.resolve
    monkeypatch.setattr(resolution, "resolve", lambda run_: resolved.append(run_.name) or resolve(run_))
    change(config, plan=str(config))
    with pytest.raises(ValueError, match="no strategy with all its runs of small"):
        run(config, "--report_only", "true")
    run(config)
    for label in ("KerpleLog", "ALiBi"):
        shutil.rmtree(config.parent / f"runs/{label}/seed-2")
    (config.parent / "report" / PACKED).unlink()
    assert len(resolved) == 4  # of `run` without a report only
    with pytest.raises(ValueError, match="no strategy with all its runs of small"):
        run(config, "--report_only", "true")
    assert len(resolved) == 4
    change(config, plan=None)
    run(config, "--report_only", "true")
    assert len(resolved) == 8
    assert runs_in(config.parent / "report") == {("KerpleLog", 1), ("ALiBi", 1)}


@pytest.mark.slow
def test_a_new_strategy_is_trained_and_a_changed_run_is_refused(config: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run(config)
    strategies = {"KerpleLog": {}, "ALiBi": {}, "T5": {}}
    change(config, strategies=strategies)
    run(config)
    assert sum(fits(config).values()) == 6
    change(config, strategies=strategies | {"T5": {"flags": {"trainer.max_steps": 30}}})
    with pytest.raises(ValueError, match=r"T5 seed 1: flags\.trainer\.max_steps: None -> '30'") as refused:
        run(config)
    assert "ALiBi" not in str(refused.value)
    assert sum(fits(config).values()) == 6
    run(config, "--rerun_changed", "true")
    assert (fits(config)["T5 seed-1"], sum(fits(config).values())) == (2, 8)
    monkeypatch.setattr(resolution, "prepare_and_checksum", lambda data: "another")
    change(config, output=str(config.parent / "report" / "second"))  # without the records of the first report
    shutil.rmtree(config.parent / "runs" / "ALiBi" / "seed-2" / "test")
    with pytest.raises(ValueError, match="KerpleLog seed 1: its data has another checksum"):
        run(config)


@pytest.mark.slow
def test_finished_runs_of_another_corpus_are_refused(config: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def use(corpus: str, directory: str) -> None:
        data = {"class_path": "kerple.data.TokenShards", "init_args": {"corpus": corpus, "directory": directory}}
        for module in (resolution, workflow):
            monkeypatch.setattr(module, "resolve", lambda planned: with_data(resolve(planned), {"data": data}))

    def with_data(planned: PlannedRun, data: dict[str, Any]) -> PlannedRun:
        return replace(planned, config=planned.config | data, test_config=planned.test_config | data)

    monkeypatch.setattr(resolution, "prepare_and_checksum", lambda data: f"checksum of {data['init_args']['corpus']}")
    change(config, strategies={"KerpleLog": {}}, seeds=[1])
    use("a", f"{config.parent}/a")
    before = run(config)
    use("a", f"{config.parent}/elsewhere")
    assert run(config) == before
    assert sum(fits(config).values()) == 1
    use("b", f"{config.parent}/b")
    with pytest.raises(ValueError, match="KerpleLog seed 1: its data has another corpus: 'a' -> 'b'"):
        run(config)
    with pytest.raises(ValueError, match="no finished run"):
        run(config, "--report_only", "true")
    run(config, "--rerun_changed", "true")
    assert sum(fits(config).values()) == 2
    use("c", f"{config.parent}/b")
    with monkeypatch.context() as patch:
        patch.setattr(resolution, "read_checksum", lambda data: "checksum of b")  # the same data with another name
        assert run(config) == before
    use("b", f"{config.parent}/b")
    for name in ("read_checksum", "prepare_and_checksum"):
        monkeypatch.setattr(resolution, name, lambda data: "another")
    with pytest.raises(ValueError, match="KerpleLog seed 1: its data has another checksum"):
        run(config)
    (config.parent / "runs/KerpleLog/seed-1/test" / results_table.ABOUT).unlink()  # a fit without a test
    with pytest.raises(ValueError, match=r"KerpleLog seed 1: .*its data has another checksum"):
        run(config)


def test_links_out_of_the_folders_are_refused_before_anything_is_written(config: Path, tmp_path: Path) -> None:
    change(config, strategies={"KerpleLog": {}}, seeds=[1])
    run(config)
    mine, report, folder = tmp_path / "mine", tmp_path / "report", tmp_path / "runs/KerpleLog/seed-1"
    (mine / "seed-1").mkdir(parents=True)
    (mine / "seed-1" / results_table.ABOUT).write_text("mine")
    shutil.move(report / PACKED, tmp_path)
    (report / "runs").mkdir()
    (report / "runs/KerpleLog").symlink_to(mine)  # the record of the finished run would be written here
    for arguments in ((), ("--report_only", "true")):
        with pytest.raises(ValueError, match=r"output: .* is a link out of"):
            run(config, *arguments)
    shutil.rmtree(report / "runs")
    shutil.move(tmp_path / PACKED, report)
    shutil.rmtree(folder)
    folder.mkdir()
    (folder / "test").symlink_to(mine / "seed-1")  # the record would be copied to here
    for arguments in ((), ("--report_only", "true")):
        with pytest.raises(ValueError, match=r"runs: .* is a link out of"):
            run(config, *arguments)
    assert [path.read_text() for path in mine.rglob("*.*")] == ["mine"]


@pytest.mark.slow
def test_no_changed_run_is_deleted_before_the_user_agrees(config: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    before = run(config)
    change(config, flags={"trainer.max_steps": 30})
    monkeypatch.setattr(comparison_duration, "training_seconds", lambda configs, parallel: 1e6)
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    for answer, number_of_fits in (("", 4), ("n\n", 4), ("y\n", 8)):  # the first is Ctrl-D
        monkeypatch.setattr(sys, "stdin", StringIO(answer))
        monkeypatch.setattr(sys.stdin, "isatty", lambda: True)
        assert run(config, "--rerun_changed", "true") == before  # the results of a fake run depend on no flag
        assert sum(fits(config).values()) == number_of_fits
        assert len(list(config.parent.glob("runs/*/*/test/results.json"))) == 4
    change(config, flags={"trainer.max_steps": 40})
    with pytest.raises(ValueError, match="compare: cpus: got 0"):
        run(config, "--rerun_changed", "true", "--yes", "true", "--engine", "ray", "--cpus", "0")
    assert len(list(config.parent.glob("runs/*/*/test/results.json"))) == 4

    other = ("--rerun_changed", "true", "--yes", "true")  # a command that makes all runs before the answer
    monkeypatch.setattr(workflow, "_is_confirmed", lambda question: bool(run(config, *other)))
    run(config, "--rerun_changed", "true")
    assert sum(fits(config).values()) == 12


@pytest.mark.slow
def test_a_folder_without_a_run_or_with_another_run_is_an_error_and_stays(config, monkeypatch):
    folder = config.parent / "runs" / "ALiBi" / "seed-1"
    folder.mkdir(parents=True)
    (folder / "notes.txt").write_text("mine")
    with pytest.raises(ValueError, match=r"ALiBi seed 1: the folder has no config\.yaml"):
        run(config)
    begun = {"flags": {"seed_everything": "1", "data.seed": "1"}, "data": {"class_path": "other"}}
    (folder / "config.yaml").write_text(yaml.safe_dump(begun))
    with pytest.raises(ValueError, match=r"ALiBi seed 1: .*data\.class_path: 'other' -> 'none'"):
        run(config)
    assert (folder / "notes.txt").read_text() == "mine"
    assert fits(config) == {}
    shutil.rmtree(folder)
    (folder / "provenance/0").mkdir(parents=True)  # of a process that was killed during its start
    (folder / "events.out.tfevents.1").touch()
    run(config)
    # another command trains a run after this command has compared the configurations
    (content := yaml.safe_load((folder / "run.yaml").read_text()))["config"]["flags"]["model.dim"] = "9"
    monkeypatch.setattr(sys, "stdin", StringIO(yaml.safe_dump(content)))
    monkeypatch.setattr(sys, "argv", ["run_process.py"])  # not the arguments of pytest
    with pytest.raises(SystemExit, match=r"another configuration: flags\.model\.dim: None -> '9'"):
        run_process.main()


@pytest.mark.parametrize(
    ("name", "config", "test"),
    [
        ("tests.compare.conftest.Fork", {"model": {"class_path": "tests.compare.conftest.Fork"}}, {}),
        ("tests.compare.conftest.Fork", {}, {"measure": {"class_path": "tests.compare.conftest.Fork"}}),
        ("weights.ckpt", {"weights": "weights.ckpt"}, {}),
    ],
)
def test_a_class_or_model_that_has_changed_since_the_start_of_the_comparison_is_an_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, config: dict[str, Any], test: dict[str, Any]
) -> None:
    """The results would be recorded with the digests of the earlier source and model."""
    monkeypatch.chdir(tmp_path)
    with ZipFile("weights.ckpt", "w") as checkpoint:
        checkpoint.writestr("data", "")
    folder = tmp_path / "seed-1"
    digests = {("test " if test else "") + name: "another"}
    config = {"data": {"class_path": "none"}} | config
    job = PlannedRun("ALiBi", 1, "", folder, folder / "test", config=config, test_config=config | test, inputs=digests)
    monkeypatch.setattr(sys, "stdin", StringIO(job.description()))
    monkeypatch.setattr(sys, "argv", ["run_process.py"])  # not the arguments of pytest
    with pytest.raises(SystemExit, match=rf"^{name} has changed since the comparison was started"):
        run_process.main()
    assert not folder.exists()


@pytest.mark.slow
def test_a_changed_test_is_repeated_without_a_fit(config: Path, capsys: pytest.CaptureFixture[str]) -> None:
    settings = config.parent / "test.yaml"
    for text, flags, to_do in (
        ("measures: [Kernels]", {}, 2),
        ("measures: [Kernels, Needle]", {}, 2),
        ("# as before\nmeasures: [Kernels, Needle]\n", {}, 0),
        ("measures: [Kernels, Needle]", {"precision": "32-true"}, 2),
        ("data: {class_path: none, corpus: a}", {}, 2),
        ("data: {class_path: none, corpus: b}", {}, 2),
    ):
        settings.write_text(text)
        change(config, test={"config": str(settings)} | flags)
        run(config, "--seeds", "[1]")
        assert f"{to_do} to do" in capsys.readouterr().out
    assert sum(fits(config).values()) == 2


@pytest.mark.slow
def test_removed_folders_are_written_again_and_unfinished_runs_of_earlier_code_continue(config: Path) -> None:
    before, report, runs = run(config), config.parent / "report", config.parent / "runs" / "ALiBi"
    shutil.rmtree(runs / "seed-1")
    shutil.rmtree(runs / "seed-2" / "test")
    as_earlier_code_stopped(runs / "seed-2")
    of_user = config.parent / "runs/KerpleLog/seed-2/test"
    about = json.loads((of_user / results_table.ABOUT).read_text())
    (of_user / results_table.ABOUT).write_text(json.dumps({key: about[key] for key in about if key != "run"}))
    (of_user / "notes.txt").write_text("mine")
    shutil.rmtree(report)
    run(config, "--report_only", "true")
    assert runs_in(report) == {("KerpleLog", 1)}
    assert "KerpleLog seed 2, ALiBi seed 2" in (report / "report.html").read_text()
    assert run(config) == before
    assert sum(fits(config).values()) == 4 + 3  # a finished fit without a test starts again, and ends immediately
    (renamed,) = of_user.parent.glob("test-*")  # the test by the user
    assert (renamed / "notes.txt").read_text() == "mine"
    assert "ckpt_path" in (runs / "seed-2.starts").read_text().splitlines()[1]
    finished = json.loads((runs / "seed-2/test" / results_table.ABOUT).read_text())
    assert finished["run"]["code"] == [package_digest()]
    assert yaml.safe_load((runs / "seed-2/run.yaml").read_text())["label"] == "ALiBi"


def as_earlier_code_stopped(folder: Path) -> None:
    """Make the run look as if code without run.yaml had stopped it at step 10. Its files were next to the folder."""
    (folder / "run.yaml").unlink()
    state = {"step": 0, "value": 2, "position": "ALiBi"}  # as `fake_run.fit` starts and continues
    while state["step"] < 10:
        state |= {"step": state["step"] + 1, "value": (state["value"] * 31 + state["step"]) % 1009}
    (folder / "checkpoints" / "last.ckpt").write_text(json.dumps(state))
    folder.with_name(f"{folder.name}.test.task.json").write_text("{}")


def test_a_failed_run_does_not_stop_the_others(config: Path, capsys: pytest.CaptureFixture[str]) -> None:
    change(config, strategies={"fail": {}, "Unmeasured": {}, "KerpleLog": {}}, seeds=[1])
    with pytest.raises(SystemExit) as end:
        run(config)
    assert end.value.code == 1
    printed = capsys.readouterr().out
    assert "2 of 3 runs failed" in printed
    assert "the position of the fake is not a position" in printed  # the end of its log
    assert "got no results" in printed
    assert len(list(config.parent.glob("runs/KerpleLog/*/test/results.json"))) == 1


def test_an_error_in_the_file_is_reported_in_one_line(config: Path, capsys: pytest.CaptureFixture[str]) -> None:
    before = config.read_text()
    for mistake, name in (
        ({"strategies": {"KerpleLog": {"optoins": {"bass": 1}}}}, "optoins"),
        ({"test_folder": "checkpoints"}, "test_folder"),
        ({"parts": {"../a": {}}}, "../a"),
        ({"name": "../a"}, "../a"),
        ({"output": str(config.parent)}, "where the report keeps its records"),
        ({"base": ["missing.yaml"]}, "missing.yaml"),
        ({"strategies": {64: {}}}, "strategies: got 64, expected text; put it in quotes"),
        ({"parts": {"a": {}, "a b": {}}, "strategies": {"KerpleLog": {}, "ALiBi": {}, "b ALiBi": {}}}, "a b ALiBi"),
        ({"parts": {"a": {1: 2}}}, "parts: a: got 1, expected text"),
        ({"plan_page": "missing.md"}, "missing.md"),
        ({"output": f"{config}/report"}, "compare.yaml is not a folder"),
        ({"flags": {"data.init_args.seed": 7}}, "flags"),
        ({"strategies": {"KerpleLog": {}, "RoPE": {}}}, "figure_strategies: got ALiBi, expected some of"),
    ):
        config.write_text(before)
        change(config, **mistake)
        with pytest.raises(SystemExit) as end:
            main(["compare", "--config", str(config), "--figure_strategies", "KerpleLog", "ALiBi"])
        error = capsys.readouterr().err
        assert (end.value.code, error.count("\n"), name in error) == (2, 1, True), error
    assert fits(config) == {}

import json
import math
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from dataclasses import replace
from pathlib import Path
from zipfile import ZipFile

import pandas as pd
import pytest
import yaml

from kerple.base.sources import package_digest
from kerple.cli import compare
from kerple.cli.main import main
from kerple.compare import engines, records
from kerple.compare import job as jobs
from kerple.compare.comparison import Job
from kerple.compare.runs import PACKED, read_runs, recorded_runs
from kerple.measure import results
from tests.compare.conftest import change, command, fits, resolve, written
from tests.inline_ray import Inline

WHOLE_TABLE = "results.csv"


def run(config: Path, *arguments: str) -> bytes:
    """Run the comparison; the bytes of its results."""
    compare.main(["--config", str(config), *arguments])
    return (config.parent / "report" / WHOLE_TABLE).read_bytes()


def runs_in(folder: Path) -> set[tuple[str, int]]:
    """Strategy and seed of each run in a report."""
    table = pd.read_csv(folder / WHOLE_TABLE)
    return set(zip(table["strategy"], table["seed"], strict=True))


def test_runs_everything_once_and_reports(config: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(ValueError, match="no finished run of small"):
        run(config, "--report-only")
    assert fits(config) == {}
    before = run(config, "--parallel", "2")
    table = pd.read_csv(config.parent / "report" / WHOLE_TABLE)
    assert len(runs_in(config.parent / "report")) == 4
    assert list(table["strategy"].drop_duplicates()) == ["KerpleLog", "ALiBi"]  # in the order of the file
    assert "[4/4]" in capsys.readouterr().out
    assert run(config) == before
    assert "4 runs: 4 finished, 0 to do" in capsys.readouterr().out
    change(config, test_folder="other", output=str(config.parent / "second"))  # beside the first test
    run(config)
    assert (config.parent / "second" / WHOLE_TABLE).read_bytes() == before
    assert sum(fits(config).values()) == 4

    # a report of directories needs no comparison and removes nothing
    mine = config.parent / "elsewhere" / "loss-relative-to-mine.png"
    mine.parent.mkdir()
    mine.write_text("mine")
    folders = [str(config.parent / "runs" / name) for name in ("ALiBi", "KerpleLog/seed-1")]
    rest = ["--baseline", "ALiBi", "--output", str(mine.parent)]
    compare.main(["--report-only", "--directories", *folders, *rest])
    assert runs_in(mine.parent) == {("ALiBi", 1), ("ALiBi", 2), ("KerpleLog", 1)}
    assert mine.read_text() == "mine"
    with pytest.raises(ValueError, match=r"sliding/results\.json"):
        compare.main(["--report-only", "--directories", *folders, *rest, "--test_folder", "sliding"])


def test_the_first_line_says_what_is_not_as_planned(config: Path, capsys: pytest.CaptureFixture[str]) -> None:
    plan, page = config.with_name("plan.yaml"), config.with_name("page.md")
    page.write_text("the plan")
    shutil.copy(config, plan)
    change(config, plan=str(plan), plan_page=str(page), test={"trainer.blocks": "400"})
    change(plan, test={"trainer.blocks": "400"}, planned_data="a checksum")
    run(config)
    assert not (config.parent / "report/table.md").read_text().startswith("Not as planned")
    change(plan, strategies={"KerpleLog": {"flags": {"trainer.max_steps": 30}}, "T5": {}}, looked_at=[2])
    change(plan, planned_data="of the plan", planned_code="1", baseline="KerpleLog")
    change(plan, test={"trainer.blocks": "200"})
    page.write_text("another plan")
    run(config)
    line, *_ = (config.parent / "report/table.md").read_text().splitlines()
    assert line.startswith("Not as planned: missing: T5 seed 1, T5 seed 2; ")
    both, every = "KerpleLog seed 1, KerpleLog seed 2", "KerpleLog seed 1, ALiBi seed 1, KerpleLog seed 2, ALiBi seed 2"
    for what in (
        f"flags.trainer.max_steps: None -> '30': {both}",
        f"test: trainer.blocks: '400' -> '200': {both}",
        "not planned: ALiBi seed 1, ALiBi seed 2",
        f"other data, checksum a checksum: {every}",
        f"other code, digest {package_digest()}: {every}",
        f"{plan} was another: {every}",
        f"{page} was another: {every}",
        "a seed that was looked at before: KerpleLog seed 2, ALiBi seed 2",
    ):
        assert what in line
    assert line in capsys.readouterr().out


def test_a_run_that_diverged_and_a_missing_one_are_named(config: Path, capsys: pytest.CaptureFixture[str]) -> None:
    change(config, plan=str(config), strategies={"KerpleLog": {}}, seeds=[1, 2, 3])
    run(config)
    assert "Not as planned" not in capsys.readouterr().out
    for seed, factor in ((1, 1.6), (2, 1.0), (3, math.inf)):
        test = config.parent / f"runs/KerpleLog/seed-{seed}/test"
        results.write_table(test, results.read(test)[0].assign(sum=lambda table: table["sum"] * factor))  # noqa: B023
    (config.parent / "report" / PACKED).unlink()
    run(config, "--report-only")
    assert "diverged, loss not finite or above 1.5 times the median: KerpleLog seed 3.\n" in capsys.readouterr().out
    shutil.rmtree(config.parent / "runs/KerpleLog/seed-3")
    (config.parent / "report" / PACKED).unlink()
    run(config, "--report-only")
    printed = capsys.readouterr().out
    assert "missing: KerpleLog seed 3\n" in printed
    assert "Not as planned: missing: KerpleLog seed 3" in printed


def test_a_new_strategy_runs_alone_and_changed_settings_or_data_are_refused(
    config: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
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
    run(config, "--rerun-changed")
    assert (fits(config)["T5 seed-1"], sum(fits(config).values())) == (2, 8)
    monkeypatch.setattr(compare, "prepare_and_checksum", lambda data: "another")
    change(config, output=str(config.parent / "report" / "second"))  # else its runs are finished, and nothing is read
    shutil.rmtree(config.parent / "runs" / "ALiBi" / "seed-2" / "test")
    with pytest.raises(ValueError, match="KerpleLog seed 1: its data has another checksum"):
        run(config)


def test_a_folder_that_is_no_run_or_another_is_refused_and_nothing_is_removed(config: Path) -> None:
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


def test_another_test_is_something_to_do_and_fits_nothing(config: Path, capsys: pytest.CaptureFixture[str]) -> None:
    settings = config.parent / "test.yaml"

    def to_do(text: str, **flags: str) -> str:
        settings.write_text(text)
        change(config, test={"config": str(settings)} | flags)
        capsys.readouterr()
        run(config, "--seeds", "[1]")
        return capsys.readouterr().out.partition(" runs: ")[2].partition("\n")[0]

    assert "2 to do" in to_do("trainer: {callbacks: [Kernels]}")
    assert "2 to do" in to_do("trainer: {callbacks: [Kernels, Needle]}")
    assert "0 to do" in to_do("# as before\ntrainer:\n  callbacks: [Kernels, Needle]\n")
    assert "2 to do" in to_do(settings.read_text(), **{"trainer.precision": "32-true"})
    assert sum(fits(config).values()) == 2


def test_what_was_removed_by_hand_is_made_again_and_a_test_made_by_hand_is_kept_aside(config: Path) -> None:
    before, report, runs = run(config), config.parent / "report", config.parent / "runs" / "ALiBi"
    shutil.rmtree(runs / "seed-1")
    shutil.rmtree(runs / "seed-2" / "test")
    by_hand = config.parent / "runs/KerpleLog/seed-2/test"
    about = json.loads((by_hand / results.ABOUT).read_text())
    (by_hand / results.ABOUT).write_text(json.dumps({key: about[key] for key in about if key != "run"}))
    (by_hand / "notes.txt").write_text("mine")
    shutil.rmtree(report)
    run(config, "--report-only")
    assert runs_in(report) == {("KerpleLog", 1)}
    assert "KerpleLog seed 2, ALiBi seed 2" in (report / "report.html").read_text()
    assert run(config) == before
    assert sum(fits(config).values()) == 4 + 3  # a fit whose checkpoint is its last ends at once
    (aside,) = by_hand.parent.glob("test-*")
    assert (aside / "notes.txt").read_text() == "mine"


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


def test_a_mistake_in_the_file_is_one_line(config: Path, capsys: pytest.CaptureFixture[str]) -> None:
    before = config.read_text()
    for mistake, name in (
        ({"strategies": {"KerpleLog": {"optoins": {"bass": 1}}}}, "optoins"),
        ({"test_folder": "checkpoints"}, "test_folder"),
        ({"parts": {"../a": {}}}, "../a"),
        ({"name": "../a"}, "../a"),
        ({"output": str(config.parent)}, "is for records"),
        ({"base": ["missing.yaml"]}, "missing.yaml"),
        ({"flags": {"data.init_args.seed": 7}}, "flags"),
    ):
        config.write_text(before)
        change(config, **mistake)
        with pytest.raises(SystemExit) as end:
            main(["compare", "--config", str(config)])
        error = capsys.readouterr().err
        assert (end.value.code, error.count("\n"), name in error) == (2, 1, True), error
    assert fits(config) == {}


def test_a_test_trusts_the_packages_whose_classes_the_comparison_names() -> None:
    named = {"data.init_args.task.class_path": "my_task.Rotate", "data.class_path": "kerple.tasks.TaskData"}
    named |= {"model.position.class_path": "mine.biases.Root", "model.position.init_args.first.class_path": "my_task.B"}
    assert jobs._trust(named) == ["--trust=mine,my_task"]
    assert jobs._trust({"model.position.class_path": "KerpleLog"}) == []


def test_runs_sent_to_a_cluster_are_finished(config: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ray = Inline()
    monkeypatch.setitem(sys.modules, "ray", ray)
    monkeypatch.setenv("PYTHONPATH", os.environ.get("PYTHONPATH", ""))  # a worker sets it, which is this process here
    run(config, "--engine", "ray", "--parallel", "2")
    assert (ray.sent, sum(fits(config).values())) == (4, 4)


# Committed runs


def test_without_logs_the_report_comes_from_the_committed_runs(
    config: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
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
        patch.setattr(compare, "prepare_and_checksum", lambda data: pytest.fail("a report reads no corpus"))
        run(config, "--report-only")
    assert {name: (report / name).read_bytes() for name in names} == before
    shutil.rmtree(config.parent / "runs")
    with ZipFile(report / PACKED) as archive:
        archive.extractall(report / "runs")
    (report / PACKED).unlink()
    (report / "runs/ALiBi/seed-2" / results.ABOUT).write_text("{")
    run(config)  # trains it in its place, and keeps it
    assert not (report / "runs").exists()
    assert fits(config) == {"ALiBi seed-2": 1}
    assert len(read_runs(recorded_runs(report)).configs) == 4

    # runs beside another report are reused where they are the same
    shutil.rmtree(config.parent / "runs")
    strategies = {"KerpleLog": {}, "ALiBi": {"flags": {"trainer.max_steps": 30}}}
    reuse_from = [str(config.parent / "nowhere"), str(report)]
    change(config, strategies=strategies, reuse_from=reuse_from, output=str(config.parent / "second"))
    compare.main(["--config", str(config)])
    assert fits(config) == {"ALiBi seed-1": 1, "ALiBi seed-2": 1}
    printed = capsys.readouterr().out
    assert f"KerpleLog seed 1 and 1 other run: reused from {report}\n" in printed
    assert f"ALiBi seed 1 and 1 other run: not reused from {report}: has another configuration: flags." in printed
    assert {run.strategy for run in recorded_runs(config.parent / "second")} == {"ALiBi"}


def test_a_broken_record_is_refused_with_the_reason_and_leaves_nothing(config: Path, tmp_path: Path) -> None:
    change(config, strategies={"KerpleLog": {}}, seeds=[2])
    run(config)
    whole, record, folder = recorded_runs(tmp_path / "report")[0].folder, tmp_path / "broken", tmp_path / "reused"
    flags = [f"--config={tmp_path}/base.yaml", "--seed_everything=2", "--data.seed=2"]
    job = Job("KerpleLog", 2, "", folder, folder / "test", [], flags, ["--model.position=KerpleLog"])
    job = replace(resolve(job), data="a checksum", inputs={"mine.Root": "1"})
    about = json.loads((whole / results.ABOUT).read_text())
    for name, content, reason in (
        (results.ABOUT, about | {"version": 1}, "version 1"),
        (results.ABOUT, about | {"run": about["run"] | {"data": "0"}}, "was trained on other data"),
        (results.ABOUT, about | {"run": about["run"] | {"test": {"x": 1}}}, "was tested otherwise"),
        (results.ABOUT, about | {"run": about["run"] | {"inputs": {"mine.Root": "0"}}}, "mine.Root has changed"),
        (results.ABOUT, about | {"run": None}, "cannot be read"),
        (results.ABOUT, "[" * 100_000, "cannot be read"),
        (results.TABLE, "nothing", "cannot be read"),
        ("results.csv", "a\n1\n", "cannot be read"),  # would replace a table of the report
    ):
        shutil.copytree(whole, record)
        (record / name).write_text(content if isinstance(content, str) else json.dumps(content))
        assert reason in records.reuse(job, record)
        assert not folder.exists(), reason
        shutil.rmtree(record)
    assert records.reuse(job, whole) is None
    assert (folder / "test" / results.TABLE).exists()


# Kills


def process_of(run: Path) -> int:
    """The process that holds a run's lock."""
    (pid,) = [int(line.split()[4]) for line in Path("/proc/locks").read_text().splitlines()
              if line.split()[5].endswith(f":{run.with_name(run.name + '.lock').stat().st_ino}")]  # fmt: skip
    return pid


def undisturbed(folder: Path) -> bytes:
    """The results of the comparison below that nobody kills."""
    return run(written(folder, strategies={"KerpleLog": {}}))


def runs_at_work(folder: Path) -> list[Path]:
    """The folders of both runs, as soon as they have checkpoints."""
    runs = [folder / "runs" / "KerpleLog" / f"seed-{seed}" for seed in (1, 2)]
    while not all((run / "checkpoints" / "last.ckpt").exists() for run in runs):
        time.sleep(0.01)
    return runs


@pytest.mark.parametrize(
    ("whom", "number", "status", "said"),
    [
        ("child", signal.SIGKILL, 1, "ended with status -9"),
        ("itself", signal.SIGTERM, 130, "stopped: 0 of 2 runs are done"),
        ("itself", signal.SIGHUP, 130, "stopped: 0 of 2 runs are done"),  # a closed terminal
    ],
)
def test_a_run_that_was_stopped_goes_on(
    config: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    whom: str,
    number: int,
    status: int,
    said: str,
) -> None:
    def kill() -> None:
        runs = runs_at_work(config.parent)
        os.kill(process_of(runs[0]) if whom == "child" else os.getpid(), number)

    change(config, strategies={"KerpleLog": {}})
    monkeypatch.setenv("FAKE_STEP", "0.05")
    before = signal.signal(signal.SIGHUP, signal.SIG_DFL)  # nohup, which may have started the tests, ignores it
    threading.Thread(target=kill).start()
    with pytest.raises(SystemExit) as end:
        run(config, "--parallel", "2")
    signal.signal(signal.SIGHUP, before)
    assert end.value.code == status
    assert said in capsys.readouterr().out
    monkeypatch.setenv("FAKE_STEP", "0.001")
    assert run(config) == undisturbed(config.parent / "undisturbed")
    assert fits(config)["KerpleLog seed-1"] == 2


def test_two_comparisons_at_once_do_every_run_once_and_runs_of_one_that_was_killed_are_waited_for(config: Path) -> None:
    """Processes as they really are; the command dies alone, and its runs go on."""
    change(config, strategies={"KerpleLog": {}})
    other = config.with_name("other.yaml")
    shutil.copy(config, other)
    change(other, output=str(config.parent / "second"))
    process = command(other)
    runs = runs_at_work(config.parent)
    killed = threading.Timer(0.3, process.kill)
    killed.start()
    table = run(config, "--parallel", "2")
    killed.join()
    assert not (config.parent / "second").exists()
    compare.main(["--config", str(other)])
    assert (config.parent / "second" / WHOLE_TABLE).read_bytes() == table == undisturbed(config.parent / "alone")
    assert fits(config) == {"KerpleLog seed-1": 1, "KerpleLog seed-2": 1}
    assert [len(recorded_runs(config.parent / name)) for name in ("report", "second")] == [2, 2]
    assert not any("Error" in run.with_name(run.name + ".log").read_text() for run in runs)


def test_a_lock_names_its_holder_and_a_second_signal_ends_runs_with_their_own_processes(tmp_path: Path) -> None:
    job = Job("ALiBi", 1, "", tmp_path / "seed-1", tmp_path / "seed-1/test", [])
    holder = rf"seed-1 is in use by process {os.getpid()} on .*, since"
    with jobs.locked(job), pytest.raises(ValueError, match=holder), jobs.locked(job, patient=False):
        pass
    script = "trap '' TERM; sleep 60 & echo $!; wait; wait"
    process = subprocess.Popen(["sh", "-c", script], process_group=0, stdout=subprocess.PIPE)
    assert process.stdout is not None
    worker = int(process.stdout.readline())
    jobs.hurry.set()
    jobs.stop([process])
    jobs.hurry.clear()
    assert process.returncode == -signal.SIGKILL
    while Path(f"/proc/{worker}/stat").exists() and Path(f"/proc/{worker}/stat").read_text().split()[2] != "Z":
        time.sleep(0.01)


def test_threads_are_shared_unless_the_user_says_how_many(config: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    threads_of_runs = []

    def popen(command: list[str], env: dict[str, str], **_: object) -> None:
        threads_of_runs.append((env["OMP_NUM_THREADS"], env["MKL_NUM_THREADS"]))
        raise KeyboardInterrupt

    monkeypatch.setattr(engines, "start", jobs.start)
    monkeypatch.setattr("kerple.compare.job.subprocess.Popen", popen)
    monkeypatch.setattr("kerple.compare.engines.cores", lambda: 8)
    for variable in ("OMP_NUM_THREADS", "MKL_NUM_THREADS"):
        monkeypatch.delenv(variable, raising=False)
    for threads in (None, "1"):
        if threads:
            monkeypatch.setenv("OMP_NUM_THREADS", threads)
        with pytest.raises(SystemExit):
            run(config, "--parallel", "2")
    assert {threads_of_runs[0], threads_of_runs[-1]} == {("4", "4"), ("1", "1")}

"""The order in which an engine executes runs that start from other runs, and a run with the real program."""

from pathlib import Path

import pytest

from kerple.cli import compare
from kerple.compare import committed_records, engines
from kerple.compare.planned_run import PlannedRun
from tests.cli.tiny import TINY
from tests.compare.conftest import runs_in, write_file

# writes the label when it starts, and fails if the label begins with "fail"
PROGRAM = """
import sys, time
label = sys.stdin.readline().split()[1]
with open(sys.argv[1], "a") as order:
    print(label, file=order)
time.sleep(0.05)
sys.exit(label.startswith("fail"))
"""


def test_a_run_waits_for_its_parent_and_fails_with_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def planned(label: str, parent: str | None = None) -> PlannedRun:
        folder = tmp_path / label / "seed-1"
        return PlannedRun(label, 1, "", folder, folder / "test", parent=parent and f"{parent} seed 1")

    order = tmp_path / "order.txt"
    monkeypatch.setattr(engines, "PROCESS", ["-c", PROGRAM, str(order)])
    monkeypatch.setattr(engines, "TICK", 0.001)
    monkeypatch.setattr(committed_records, "finished", lambda run: True)
    runs = [planned("grandchild", "child"), planned("lost-too", "lost"), planned("lost", "fails"), planned("fails")]
    runs += [planned("child", "parent"), planned("parent"), planned("of-a-finished-run", "finished-before")]
    ended = [pair for pair in engines.LocalProcesses(1).run(runs) if pair is not None]
    assert order.read_text().split() == ["fails", "parent", "child", "grandchild", "of-a-finished-run"]
    errors = {run.label: error for run, error in ended if error}
    assert "ended with status 1" in errors.pop("fails")
    assert errors == {
        "lost": "lost seed 1: not started, because it starts from fails seed 1, which has failed",
        "lost-too": "lost-too seed 1: not started, because it starts from lost seed 1, which has failed",
    }
    assert {run.label for run, _ in ended} == {run.label for run in runs}


def test_a_run_without_a_log_on_this_machine_is_one_line(tmp_path: Path) -> None:
    """As after a run on another machine that does not share the folders of the runs."""
    run = PlannedRun("RoPE", 1, "", tmp_path / "RoPE/seed-1", tmp_path / "RoPE/seed-1/test")
    error = f"RoPE seed 1: ended with status 0, but {run.sidecar('.log')} is missing; keep the runs on a shared disk"
    assert engines.ended_run(run, 0) == (run, error)


@pytest.mark.slow
def test_a_fit_on_two_devices_is_executed_and_tested(tmp_path: Path) -> None:
    """Lightning starts the second rank with the command line of the first."""
    trainer = TINY["trainer"] | {"devices": 2, "strategy": "ddp", "max_steps": 2}
    sections = {key: TINY[key] for key in ("model", "data")} | {"trainer": trainer}
    test = {"trainer.devices": 2, "trainer.strategy": "ddp"}
    config = write_file(tmp_path, sections, strategies={"ALiBi": {}}, baseline="ALiBi", seeds=[1], test=test)
    compare.main(["--config", str(config)])
    assert runs_in(tmp_path / "report") == {("ALiBi", 1)}
    log = (tmp_path / "runs/ALiBi/seed-1.log").read_text()
    assert log.count("GLOBAL_RANK: 1") == 2  # of the fit and of the test

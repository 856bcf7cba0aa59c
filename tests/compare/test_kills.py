"""Signals, kills, locks and threads of a comparison's processes."""

import multiprocessing
import os
import shutil
import signal
import subprocess
import threading
import time
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest

from kerple.base.processor_cores import CHOSEN
from kerple.cli import compare
from kerple.compare import engines, run_process
from kerple.compare.planned_run import PlannedRun
from kerple.compare.run_discovery import recorded_runs
from tests.compare.conftest import WHOLE_TABLE, change, fits, run, start, start_command, write_file


def process_of(run: Path) -> int:
    """The process that holds a run's lock."""
    (pid,) = [int(line.split()[4]) for line in Path("/proc/locks").read_text().splitlines()
              if line.split()[5].endswith(f":{run.with_name(run.name + '.lock').stat().st_ino}")]  # fmt: skip
    return pid


def wait_for_end(process: int) -> None:
    stat = Path(f"/proc/{process}/stat")
    while stat.exists() and stat.read_text().split()[2] != "Z":
        time.sleep(0.01)


@cache
def undisturbed() -> bytes:
    """The results of a comparison of KerpleLog without a signal."""
    with TemporaryDirectory() as folder:
        return run(write_file(Path(folder), strategies={"KerpleLog": {}}))


def runs_at_work(folder: Path) -> list[Path]:
    """Wait until both runs have checkpoints, and return their folders."""
    runs = [folder / "runs" / "KerpleLog" / f"seed-{seed}" for seed in (1, 2)]
    while not all((run / "checkpoints" / "last.ckpt").exists() for run in runs):
        time.sleep(0.01)
    return runs


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM, signal.SIGHUP])
def test_stopped_runs_are_resumed_by_the_same_command(config, monkeypatch, capsys, number):
    def kill() -> None:
        runs = runs_at_work(config.parent)
        os.kill(process_of(runs[0]) if number == signal.SIGKILL else os.getpid(), number)  # to a run, or to `compare`

    change(config, strategies={"KerpleLog": {}})
    monkeypatch.setenv("FAKE_STEP", "0.05")
    before = signal.signal(signal.SIGHUP, signal.SIG_DFL)  # it is ignored if nohup has started the tests
    threading.Thread(target=kill).start()
    with pytest.raises(SystemExit) as end:
        run(config, "--parallel", "2")
    signal.signal(signal.SIGHUP, before)
    status, message = (1, "status -9") if number == signal.SIGKILL else (130, "stopped: 0 of 2 runs are done")
    assert end.value.code == status
    assert message in capsys.readouterr().out
    monkeypatch.setenv("FAKE_STEP", "0.001")
    assert run(config) == undisturbed()
    assert fits(config)["KerpleLog seed-1"] == 2


@pytest.mark.slow
def test_two_comparisons_execute_each_run_once_and_wait_for_the_runs_of_a_killed_command(config: Path) -> None:
    """Runs are processes without forks. The command is killed without its runs, which continue."""
    change(config, strategies={"KerpleLog": {}})
    other = config.with_name("other.yaml")
    shutil.copy(config, other)
    change(other, output=str(config.parent / "second"))
    process, runs = start_command(other), runs_at_work(config.parent)
    killed = threading.Timer(0.3, process.kill)
    killed.start()
    table = run(config, "--parallel", "2")
    killed.join()
    assert not (config.parent / "second").exists()
    compare.main(["--config", str(other)])
    assert (config.parent / "second" / WHOLE_TABLE).read_bytes() == table == undisturbed()
    assert fits(config) == {"KerpleLog seed-1": 1, "KerpleLog seed-2": 1}
    assert [len(recorded_runs(config.parent / name)) for name in ("report", "second")] == [2, 2]
    assert not any("Error" in run.with_name(run.name + ".log").read_text() for run in runs)


# writes its id, and exits with the status 3 after SIGTERM, or with 0 if it has ended in time
COMMAND = """
import os, signal, sys, time
from pathlib import Path
signal.signal(signal.SIGTERM, lambda *_: sys.exit({status}))
Path("new").write_text(str(os.getpid()))
Path("new").rename("id")
time.sleep(60)
"""


@pytest.mark.parametrize(
    ("number", "status", "expected"),
    [(signal.SIGTERM, 3, 3), (signal.SIGTERM, 0, -signal.SIGTERM), (signal.SIGKILL, 3, -signal.SIGKILL)],
)
def test_a_signal_to_the_process_of_a_run_ends_the_command_of_the_run_too(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int, status: int, expected: int
) -> None:
    """After a signal, a command without an error is not followed by the next command."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(run_process, "PROGRAM", tmp_path / "program.py")
    monkeypatch.setattr(run_process, "SHARED", [])
    run_process.PROGRAM.write_text(COMMAND.format(status=status))
    process = multiprocessing.get_context("fork").Process(
        target=run_process._call, args=("fit",), kwargs={"config": {}}
    )
    process.start()
    while not Path("id").exists():
        time.sleep(0.001)
    assert process.pid is not None
    os.kill(process.pid, number)
    process.join()
    assert process.exitcode == expected
    wait_for_end(int(Path("id").read_text()))


def test_a_lock_names_its_holder_and_a_second_signal_kills(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The second signal kills a run that ignores SIGTERM, and its child process."""
    job = PlannedRun("ALiBi", 1, "", tmp_path / "seed-1", tmp_path / "seed-1/test", [])
    holder = rf"seed-1 is in use by process {os.getpid()} on .*, since"
    with run_process.locked(job), pytest.raises(ValueError, match=holder), run_process.locked(job, wait=False):
        pass
    script = "trap '' TERM; sleep 60 & echo $!; wait; wait"
    process = subprocess.Popen(["sh", "-c", script], process_group=0, stdout=subprocess.PIPE)
    assert process.stdout is not None
    worker = int(process.stdout.readline())
    monkeypatch.setattr(engines, "signals", [signal.SIGINT] * 2)
    engines.LocalProcesses(1).stop([process])
    assert process.returncode == -signal.SIGKILL
    wait_for_end(worker)


def test_runs_share_the_free_cores_unless_the_user_sets_threads(config: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    threads_of_runs = []

    def popen(command: list[str], env: dict[str, str], **_: object) -> None:
        threads_of_runs.append((env["OMP_NUM_THREADS"], env["MKL_NUM_THREADS"], CHOSEN in env))
        raise KeyboardInterrupt

    monkeypatch.setattr(engines.LocalProcesses, "start", start)
    monkeypatch.setattr("kerple.compare.engines.subprocess.Popen", popen)
    monkeypatch.setattr("kerple.compare.engines.free_cores", lambda: 8)
    for variable in ("OMP_NUM_THREADS", "MKL_NUM_THREADS", CHOSEN):
        monkeypatch.delenv(variable, raising=False)
    for threads in (None, "1"):
        if threads:
            monkeypatch.setenv("OMP_NUM_THREADS", threads)
        with pytest.raises(SystemExit):
            run(config, "--parallel", "2")
    assert {threads_of_runs[0], threads_of_runs[-1]} == {("4", "4", True), ("1", "1", False)}

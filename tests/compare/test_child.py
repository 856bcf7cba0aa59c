"""The process of a run: how long it may take to end."""

import threading
import time
from pathlib import Path

import pytest

from kerple.compare.child import Child, Failed
from kerple.compare.comparison import Job

DEAF = """
import signal, sys, time
from pathlib import Path
signal.signal(signal.SIGTERM, signal.SIG_IGN)  # as a test is that reads a long segment
Path(__file__).with_name("started").touch()
time.sleep(600)
"""


def test_a_test_that_does_not_end_when_asked_is_killed(tmp_path: Path) -> None:
    program = tmp_path / "run.py"
    program.write_text(DEAF)
    (tmp_path / "KerpleLog").mkdir()
    job = Job("KerpleLog", 1, tmp_path / "KerpleLog" / "seed-1", (), ())
    with (tmp_path / "lock").open("w") as lock, Child(job, 1, program) as child:
        child.lock = lock.fileno()

        def stop() -> None:
            while not (tmp_path / "started").exists():
                time.sleep(0.05)
            child.stop()

        stopping = threading.Thread(target=stop)
        stopping.start()
        with pytest.raises(Failed, match="test ended with status -9"):
            child.call("test")
        stopping.join()


def test_what_was_stopped_before_its_first_command_does_not_start(tmp_path: Path) -> None:
    job = Job("KerpleLog", 1, tmp_path / "seed-1", (), ())
    with Child(job, 1, tmp_path / "run.py") as child:
        child.stop()
        with pytest.raises(Failed, match="stopped before fit"):
            child.call("fit")
    assert not job.beside(".log").exists()


def test_an_interrupt_inside_stops_it_at_once(tmp_path: Path) -> None:
    program = tmp_path / "run.py"
    program.write_text("import time; time.sleep(600)")
    (tmp_path / "KerpleLog").mkdir()
    job = Job("KerpleLog", 1, tmp_path / "KerpleLog" / "seed-1", (), ())
    child = Child(job, 1, program)
    with (tmp_path / "lock").open("w") as lock:
        child.lock, child._command = lock.fileno(), "test"
        child._start(job.beside(".log"))
    process = child._process
    child.__exit__(KeyboardInterrupt, KeyboardInterrupt(), None)
    assert process is not None
    assert process.returncode is not None

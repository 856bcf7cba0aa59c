"""`Child`: starts and watches the process that runs the commands of one run; its other end is `worker`."""

import contextlib
import json
import os
import select
import subprocess
import sys
from pathlib import Path

import kerple
from kerple.base.progress import VARIABLE
from kerple.compare.comparison import Job

PATIENCE = {"fit": 60.0, "test": 2.0}  # seconds that each command may take to end: a fit saves first, a test cannot
WORKER = Path(__file__).with_name("worker.py")


class Failed(RuntimeError):
    """A fit or a test ended with an error; the message has the end of what it printed."""


class Child:
    """The process a run's commands are called in, started with the first of them.

    Args:
        job: The run; what the process prints is appended to its log, and its progress goes to a file beside it.
        threads: CPU threads it may use.
        program: What is called as ``run.py``.

    Attributes:
        lock: File descriptor that the process keeps open, and with it the run's lock; set it before the first command.
        stopped: Whether it was asked to stop.
    """

    def __init__(self, job: Job, threads: int, program: Path) -> None:
        self.job, self.threads, self.program = job, threads, program
        self.lock, self.stopped = -1, False
        self._process: subprocess.Popen[str] | None = None
        self._asked: subprocess.Popen[str] | None = None
        self._status, self._command = -1, ""

    def __enter__(self) -> "Child":
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if self._process is None:
            return
        if kind is not None and not issubclass(kind, Exception):  # Ctrl-C, or a cluster cancels the run
            self.stop()
        assert self._process.stdin is not None
        with contextlib.suppress(OSError):
            self._process.stdin.close()  # it ends after what it is at
        try:
            self._process.wait()
        except BaseException:
            self.stop()
            raise
        finally:
            os.close(self._status)
            self._process = None

    def ask_to_stop(self) -> None:
        """Have it save what it can and end, without waiting for that. From any thread."""
        self.stopped, process = True, self._process
        if process is not None and process is not self._asked and process.poll() is None:
            self._asked = process  # a second signal would end it before it has saved
            process.terminate()

    def stop(self) -> None:
        """Have it save what it can and end; if that takes longer than `PATIENCE` it is killed. From any thread."""
        self.ask_to_stop()
        process = self._process
        if process is None or process.poll() is not None:
            return
        try:
            process.wait(PATIENCE[self._command])
        except subprocess.TimeoutExpired:
            process.kill()

    def call(self, *arguments: str) -> None:
        """Call a command and wait for its end.

        Raises:
            Failed: If it fails, or the process is stopped.
        """
        log, self._command = self.job.beside(".log"), arguments[0]
        if self._process is None and not self.stopped:
            self._start(log)
        if self.stopped:  # before it was started, or while it was
            self.stop()
            raise Failed(f"{self.job.name}: was stopped before {self._command}")
        assert self._process is not None
        assert self._process.stdin is not None
        with contextlib.suppress(BrokenPipeError):  # it was stopped between two commands
            self._process.stdin.write(json.dumps(arguments) + "\n")
            self._process.stdin.flush()
        told = b""
        while not told.endswith(b"\n"):
            if not select.select([self._status], [], [], 1.0)[0]:
                continue  # a thread that waits without an end would not hear that a cluster cancels the run
            piece = os.read(self._status, 64)
            if not piece:
                break
            told += piece
        status = told.decode().strip() or str(self._process.wait())
        if status != "0":
            tail = "\n".join(log.read_text(errors="replace").splitlines()[-15:])
            raise Failed(f"{self.job.name}: {arguments[0]} ended with status {status}, see {log}:\n{tail}")

    def _start(self, log: Path) -> None:
        paths = [str(Path(kerple.__file__).parents[1]), os.environ.get("PYTHONPATH", "")]
        environment = os.environ | {
            "PYTHONPATH": os.pathsep.join(filter(None, paths)),
            "OMP_NUM_THREADS": str(self.threads),
            "MKL_NUM_THREADS": str(self.threads),
            VARIABLE: str(self.job.beside(".progress").absolute()),
        }
        self._status, write = os.pipe()
        with log.open("a") as output:
            self._process = subprocess.Popen(
                [sys.executable, "-u", str(WORKER), str(self.program), str(write)],
                stdin=subprocess.PIPE,
                stdout=output,
                stderr=subprocess.STDOUT,
                env=environment,
                pass_fds=(self.lock, write),
                text=True,
            )
        os.close(write)

"""Engines, which execute the runs of a comparison. `LocalProcesses` executes them on this machine.

`kerple.compare.ray_engine` has an engine for several machines.
"""

import contextlib
import os
import signal
import subprocess
import sys
import time
from abc import ABC, abstractmethod
from collections.abc import Generator, Iterator, Sequence
from pathlib import Path
from tempfile import TemporaryFile
from typing import Generic, TypeVar

import kerple
from kerple.base.atomic import no_follow
from kerple.base.errors import UserError
from kerple.base.processor_cores import CHOSEN, free_cores
from kerple.compare import committed_records, run_process
from kerple.compare.planned_run import PlannedRun

Handle = TypeVar("Handle")
Ended = tuple[PlannedRun, str | None]
"""A run that has ended, and its error message, which is None if the run is finished."""
TICK = 0.1  # seconds between two checks whether a run has ended
STOP_TIMEOUT = 60.0  # seconds in which a terminated run can save its checkpoint
PROCESS = ["-m", run_process.__name__]  # arguments of Python for the process of a run
signals: list[int] = []  # signals that the comparison has received; after the second one, active runs are killed


class Engine(ABC, Generic[Handle]):
    """Executes runs, several at a time. A subclass defines how a run is started, observed and stopped.

    A run with a parent starts when the parent is finished. If the parent fails, the run is not started and fails too.

    Args:
        parallel: Number of runs at a time.
    """

    def __init__(self, parallel: int) -> None:
        self.parallel = parallel

    @abstractmethod
    def start(self, run: PlannedRun) -> Handle:
        """Start a run, and return an object with which it is observed and stopped."""

    @abstractmethod
    def poll(self, run: PlannedRun, handle: Handle) -> Ended | None:
        """Return the run and its error message when it has ended; None while it is active."""

    @abstractmethod
    def stop(self, handles: list[Handle]) -> None:
        """Let active runs save and end, and wait for them."""

    def run(self, runs: Sequence[PlannedRun]) -> Generator[Ended | None]:
        """Execute runs. If the generator is closed or raises an error, active runs are stopped.

        Args:
            runs: The runs. A parent that is not among them counts as finished.

        Yields:
            Each run that has ended. While no run ends, None every `TICK` seconds.

        Raises:
            KeyboardInterrupt: After a signal that the context `interruptible` has received.
        """
        waiting, active, failed = list(runs), dict[PlannedRun, Handle](), set[str]()
        try:
            while waiting or active:
                if signals:
                    raise KeyboardInterrupt
                while lost := next((run for run in waiting if run.parent in failed), None):
                    waiting.remove(lost)
                    failed.add(lost.name)
                    yield lost, f"{lost.name}: not started, because it starts from {lost.parent}, which has failed"
                unfinished = {run.name for run in (*waiting, *active)}
                ready = [run for run in waiting if run.parent not in unfinished]
                assert ready or active or not waiting, f"these runs start from each other: {unfinished}"
                for run in ready[: self.parallel - len(active)]:
                    waiting.remove(run)
                    active[run] = self.start(run)
                ended = [pair for run, handle in active.items() if (pair := self.poll(run, handle))]
                for run, error in ended:
                    del active[run]
                    failed |= {run.name} if error else set()
                    yield run, error
                if not ended:
                    time.sleep(TICK)
                    yield None
        finally:
            self.stop(list(active.values()))


class LocalProcesses(Engine["subprocess.Popen[bytes]"]):
    """Executes each run in a process of this machine, see `kerple.compare.run_process`. They share the free cores."""

    def __init__(self, parallel: int) -> None:
        super().__init__(parallel)
        self.threads = max(1, free_cores() // parallel)

    def start(self, run: PlannedRun) -> "subprocess.Popen[bytes]":
        """Start the process of a run. Its output is appended to the run's log.

        If another process holds the run's lock, the new process waits for it, and a message says so. An environment
        variable OMP_NUM_THREADS of the user replaces the number of threads.
        """
        try:
            with run_process.locked(run, wait=False):
                pass
        except UserError as busy:
            print(f"{run.name} waits: {busy}", flush=True)
        environment = os.environ | thread_variables(self.threads)
        return start_process(PROCESS, run.description(), run.sidecar(".log"), environment)

    def poll(self, run: PlannedRun, handle: "subprocess.Popen[bytes]") -> Ended | None:
        """See `Engine.poll`."""
        return None if (status := handle.poll()) is None else ended_run(run, status)

    def stop(self, handles: "list[subprocess.Popen[bytes]]") -> None:
        """See `stop_processes`."""
        stop_processes(handles)


def thread_variables(threads: int) -> dict[str, str]:
    """Return OMP_NUM_THREADS of the user, or ``threads``, which is then recorded as chosen by `compare`."""
    given = os.environ.get("OMP_NUM_THREADS")
    return {"OMP_NUM_THREADS": str(threads), CHOSEN: "1"} if given is None else {"OMP_NUM_THREADS": given}


def start_process(
    program: list[str], description: str, log: Path, environment: dict[str, str], pipe: int | None = None
) -> "subprocess.Popen[bytes]":
    """Start the process of a run.

    Args:
        program: Arguments of Python, such as `PROCESS`.
        description: See `PlannedRun.description`.
        log: File to which the output of the process is appended.
        environment: Environment variables, with OMP_NUM_THREADS.
        pipe: Reading end of a pipe. The process is killed when the writing end is closed. None for no pipe.
    """
    environment.setdefault("MKL_NUM_THREADS", environment["OMP_NUM_THREADS"])
    paths = filter(None, [str(Path(kerple.__file__).parents[1]), environment.get("PYTHONPATH")])
    environment |= {"PYTHONPATH": os.pathsep.join(paths), "PYTHONUNBUFFERED": "1"}
    # a file, because a pipe would block if the description is long
    with TemporaryFile() as file, open(log, "ab", opener=no_follow) as output:
        file.write(description.encode())
        file.seek(0)
        return subprocess.Popen(
            [sys.executable, *program, *([] if pipe is None else [str(pipe)])],
            stdin=file,
            stdout=output,
            stderr=subprocess.STDOUT,
            env=environment,
            process_group=0,  # Ctrl-C reaches only this process, which then terminates the run's process
            pass_fds=[] if pipe is None else [pipe],
        )


def ended_run(run: PlannedRun, status: int) -> Ended:
    """Return a run and its error message, which consists of the exit status and the last lines of the run's log."""
    if status == 0 and committed_records.finished(run):
        return run, None
    log = run.sidecar(".log")
    if not log.exists():
        return run, f"{run.name}: ended with status {status}, but {log} is missing; keep the runs on a shared disk"
    tail = "\n".join(log.read_text(encoding="utf-8", errors="replace").splitlines()[-15:])
    return run, f"{run.name}: ended with status {status}, see {log}:\n{tail}"


def stop_processes(processes: "list[subprocess.Popen[bytes]]") -> None:
    """Terminate processes, and wait for their end. They are killed after `STOP_TIMEOUT` or a second signal."""
    for process in processes:
        process.terminate()
    end = time.monotonic() + STOP_TIMEOUT
    while any(process.poll() is None for process in processes):
        time.sleep(0.05)
        if len(signals) > 1 or time.monotonic() > end:
            for process in processes:
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGKILL)  # with its data workers
                process.wait()


@contextlib.contextmanager
def interruptible() -> Iterator[None]:
    """Return a context in which SIGINT, SIGTERM and SIGHUP are only appended to `signals`.

    An exception in the handler could come between the start of a process and its entry in the dict ``active`` of
    `Engine.run`, which would then not stop the process. An ignored signal, such as SIGHUP under nohup, stays ignored.
    """
    handlers = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)}
    signals.clear()
    for number, handler in handlers.items():
        if handler is not signal.SIG_IGN:
            signal.signal(number, lambda received, _: signals.append(received))
    try:
        yield
    finally:
        for number, handler in handlers.items():
            signal.signal(number, handler)

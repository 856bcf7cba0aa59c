"""Execution of a comparison's runs on this machine, several at a time. A signal stops them."""

import contextlib
import signal
import time
from collections import deque
from collections.abc import Generator, Iterator, Sequence
from subprocess import Popen

from kerple.base.processor_cores import free_cores
from kerple.compare.planned_run import PlannedRun
from kerple.compare.run_process import signals, start, stop, wait

TICK = 0.1  # seconds between two checks whether a run has ended


def execute(
    jobs: Sequence[PlannedRun], parallel: int, program: list[str]
) -> Generator[tuple[PlannedRun, str | None] | None]:
    """Execute runs, each in a process with an equal part of the free cores.

    If the generator is closed or raises an error, it asks the active processes to save and end, and waits for them.

    Args:
        jobs: The runs.
        parallel: Number of runs at a time.
        program: Arguments of Python for the process of a run, see `kerple.compare.run_process.start`.

    Yields:
        For each run that has ended, a pair: the run, and an error message (None if it is finished). While no run ends,
        None every `TICK` seconds.

    Raises:
        KeyboardInterrupt: After a signal that the context `interruptible` has received.
    """
    threads = max(1, free_cores() // parallel)
    waiting, running = deque(jobs), dict[PlannedRun, Popen[bytes]]()
    try:
        while waiting or running:
            if signals:
                raise KeyboardInterrupt
            while waiting and len(running) < parallel:
                job = waiting.popleft()
                running[job] = start(job, threads, program)
            ended = [job for job, process in running.items() if process.poll() is not None]
            for job in ended:
                yield job, wait(job, running.pop(job))
            if not ended:
                time.sleep(TICK)
                yield None
    finally:
        stop(list(running.values()))


@contextlib.contextmanager
def interruptible() -> Iterator[None]:
    """Return a context in which SIGINT, SIGTERM and SIGHUP are only appended to `signals`.

    An exception in the handler could come between the start of a process and its entry in `execute`'s dict ``running``.
    `execute` would then not stop the process. A signal that is ignored, such as SIGHUP under nohup, stays ignored.
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

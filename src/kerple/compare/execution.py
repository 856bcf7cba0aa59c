"""Execution of a comparison's runs on this machine, several at a time, until a signal stops them."""

import contextlib
import signal
from collections.abc import Generator, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor
from concurrent.futures import wait as wait_for
from typing import Any

from kerple.base.resources import cores
from kerple.compare.job import Job
from kerple.compare.run_process import hurry, start, stop, wait

TICK = 0.25  # seconds


def execute(jobs: Sequence[Job], parallel: int, program: list[str]) -> Generator[tuple[Job, str | None] | None]:
    """Execute runs, each in a process with an equal part of the cores.

    If the generator is closed or raises an error, the processes are asked to save and end, and it waits for them.

    Args:
        jobs: The runs.
        parallel: Number of runs at a time.
        program: Arguments of Python for the process of a run, see `kerple.compare.run_process.start`.

    Yields:
        A run that has ended with its error message, which is None if it succeeded. None every `TICK` seconds in which
        no run has ended.
    """
    threads = max(1, cores() // parallel)
    processes: list[Any] = []
    stopped = False

    def run(job: Job) -> str | None:
        if stopped:
            return None
        process = start(job, threads, program)
        processes.append(process)
        if stopped:  # set by the main thread during `start`
            process.terminate()
        return wait(job, process)

    pool = ThreadPoolExecutor(parallel)
    running: dict[Future[str | None], Job] = {pool.submit(run, job): job for job in jobs}
    try:
        while running:
            done, _ = wait_for(running, TICK, FIRST_COMPLETED)
            for future in done:
                yield running.pop(future), future.result()
            if not done:
                yield None
    finally:
        stopped = True
        pool.shutdown(wait=False, cancel_futures=True)
        stop([process for process in processes if process.poll() is None])
        pool.shutdown()


@contextlib.contextmanager
def interruptible() -> Iterator[None]:
    """Context in which SIGTERM and SIGHUP raise KeyboardInterrupt like Ctrl-C, and a second signal sets `hurry`.

    A signal that is ignored, such as SIGHUP under nohup, stays ignored.
    """
    handlers = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)}
    handlers = {number: handler for number, handler in handlers.items() if handler is not signal.SIG_IGN}
    hurry.clear()

    def stop_runs(*_: Any) -> None:
        for number in handlers:
            signal.signal(number, lambda *_: hurry.set())
        raise KeyboardInterrupt

    for number in handlers:
        signal.signal(number, stop_runs)
    try:
        yield
    finally:
        for number, handler in handlers.items():
            signal.signal(number, handler)

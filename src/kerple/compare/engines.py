"""Engines that run a comparison's runs: side by side on this machine, or on a Ray cluster."""

import os
from collections.abc import Generator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor
from concurrent.futures import wait as wait_for
from typing import Any

from kerple.base.cluster import connect_to_ray, cores
from kerple.compare.comparison import Job
from kerple.compare.job import start, stop, wait

Ended = Generator[tuple[Job, str | None] | None, None, None]
TICK = 0.25  # seconds


def local(jobs: Sequence[Job], parallel: int, program: list[str]) -> Ended:
    """Run on this machine, ``parallel`` runs at a time, each with its share of the cores.

    Each is a process of Python with the arguments ``program``, see `kerple.compare.job.start`.
    When the iterator is closed or raises, the processes of the runs are asked to save and end, and it waits for them.

    Yields:
        A run that has ended and the error message, or None if it went well. In a quarter of a second in which no run
        has ended, it yields None instead.
    """
    threads = max(1, cores() // parallel)
    processes: list[Any] = []
    stopped = False

    def run(job: Job) -> str | None:
        if stopped:
            return None
        process = start(job, threads, program)
        processes.append(process)
        if stopped:  # meanwhile
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


def ray(jobs: Sequence[Job], parallel: int, program: list[str]) -> Ended:
    """Run on a Ray cluster whose machines share this folder.

    The cluster is that of RAY_ADDRESS or of this machine, or else one that is started here. A run takes 1 /
    ``parallel`` of this machine's cores, and a GPU if the cluster has any.

    Yields:
        As `local`.

    Raises:
        UserError: If Ray's cluster does not answer.
        ModuleNotFoundError: If Ray is not installed.
    """
    threads = max(1, cores() // parallel)
    folder, path = os.getcwd(), os.environ.get("PYTHONPATH", "")

    def remote(job: Job) -> str | None:
        os.chdir(folder)
        os.environ["PYTHONPATH"] = path
        process = start(job, threads, program)
        try:
            return wait(job, process)
        except BaseException:  # the task was cancelled
            stop([process])
            raise

    with connect_to_ray("compare: engine", "--engine local") as cluster:
        gpus = 1 if cluster.cluster_resources().get("GPU", 0) else 0
        run = cluster.remote(num_cpus=threads, num_gpus=gpus, max_retries=3)(remote)
        waiting = {run.remote(job): job for job in jobs}
        try:
            while waiting:
                done, _ = cluster.wait(list(waiting), timeout=TICK)
                for reference in done:
                    yield waiting.pop(reference), cluster.get(reference)
                if not done:
                    yield None
        finally:
            for reference in waiting:
                cluster.cancel(reference)
            if waiting:
                cluster.wait(list(waiting), num_returns=len(waiting), timeout=60)


ENGINES = {"local": local, "ray": ray}

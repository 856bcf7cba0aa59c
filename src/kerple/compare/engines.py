"""Engines that run a comparison's runs: side by side on this machine, or on a Ray cluster.

They share with `kerple.data.prepare.workers` how a cluster is joined (`kerple.base.cluster.joined`), and no more: a run
is a process of minutes that needs GPUs and a folder of its own, a portion of text comes back in milliseconds, in order.
"""

import os
from collections.abc import Callable, Generator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from typing import Any

from kerple.base.cluster import cores, joined
from kerple.base.progress import note
from kerple.compare import job as jobs
from kerple.compare.child import Child, Failed
from kerple.compare.comparison import Job

Work = Sequence[tuple[Job, dict[str, Any], str | None]]
Ended = Generator[tuple[Job, str | None] | None, None, None]
TICK = 0.25  # seconds


def local(work: Work, parallel: int) -> Ended:
    """Run on this machine, ``parallel`` runs at a time, each with its share of the cores.

    When the iterator is closed or raises, the processes of the runs are asked to save and end, and it waits for them.

    Args:
        work: The runs, each with its resolved configuration, flat, and the checksum of its data.
        parallel: Number of runs at a time.

    Yields:
        A run that has ended and the error message, or None if it went well. In a quarter of a second in which no run
        has ended, it yields None instead.
    """
    threads = max(1, cores() // parallel)
    children: list[Child] = []
    stopped = False

    def begun(child: Child) -> None:
        children.append(child)
        if stopped:
            child.stop()

    def run(job: Job, config: dict[str, Any], data: str | None) -> None:
        if not stopped:
            jobs.run(job, config, data, threads, _noting(job), jobs.RUN, begun)

    pool = ThreadPoolExecutor(parallel)
    running = {pool.submit(run, *asked): asked[0] for asked in work}
    try:
        while running:
            done, _ = wait(running, TICK, FIRST_COMPLETED)
            for future in done:
                yield running.pop(future), _error(future)
            if not done:
                yield None
    finally:
        stopped = True
        pool.shutdown(wait=False, cancel_futures=True)
        for child in children:
            child.ask_to_stop()  # all of them, before one is waited for
        for child in children:
            child.stop()
        pool.shutdown()


def _error(future: "Future[None]") -> str | None:
    error = future.exception()
    if error is not None and not isinstance(error, Failed):
        raise error
    return None if error is None else str(error)


def _noting(job: Job) -> Callable[[str], None]:
    return lambda message: note(job.beside(".progress"), doing=message.removeprefix(f"{job.name}: "))


def ray(work: Work, parallel: int) -> Ended:
    """Run on a Ray cluster whose machines share this folder.

    The cluster is that of RAY_ADDRESS or of this machine, or else one that is started here. A run takes 1 /
    ``parallel`` of this machine's cores, and a GPU if the cluster has any.

    Args:
        work: As `local` has it.
        parallel: Number of runs at a time on a machine.

    Yields:
        As `local`.

    Raises:
        UserError: If Ray is not installed.
    """
    threads = max(1, cores() // parallel)
    program = jobs.RUN
    folder, path = os.getcwd(), os.environ.get("PYTHONPATH", "")

    def remote(job: Job, config: dict[str, Any], data: str | None) -> str | None:
        os.chdir(folder)
        os.environ["PYTHONPATH"] = path
        children: list[Child] = []
        try:
            jobs.run(job, config, data, threads, _noting(job), program, children.append)
        except Failed as error:
            return str(error)
        except BaseException:  # the task was cancelled
            for child in children:
                child.stop()
            raise
        return None

    with joined("compare: engine", "--engine local") as cluster:
        gpus = 1 if cluster.cluster_resources().get("GPU", 0) else 0
        task = cluster.remote(num_cpus=threads, num_gpus=gpus, max_retries=3)(remote)
        waiting = {task.remote(*asked): asked[0] for asked in work}
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
            cluster.wait(list(waiting), num_returns=len(waiting), timeout=60) if waiting else None


ENGINES = {"local": local, "ray": ray}

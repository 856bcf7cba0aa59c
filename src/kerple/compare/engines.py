"""Where runs run: side by side on this machine, or over a cluster by Ray."""

import os
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from typing import Any

from kerple.compare import job as jobs
from kerple.compare.comparison import Job
from kerple.runs.cluster import cores, joined

Say = Callable[[str], None]


def local(work: Sequence[tuple[Job, dict[str, Any]]], parallel: int, say: Say) -> list[str]:
    """Run on this machine, ``parallel`` at a time, each with its share of the cores; messages of what failed."""
    threads = max(1, cores() // parallel)
    failed = []
    with ThreadPoolExecutor(parallel) as pool:
        running = {pool.submit(jobs.run, job, config, threads, say, jobs.RUN): job for job, config in work}
        try:
            for future in as_completed(running):
                if (error := future.exception()) is not None:
                    if not isinstance(error, jobs.Failed):
                        raise error
                    failed.append(str(error))
                    say(str(error))
        except BaseException:
            pool.shutdown(wait=False, cancel_futures=True)
            raise
    return failed


def ray(work: Sequence[tuple[Job, dict[str, Any]]], parallel: int, say: Say) -> list[str]:
    """Run on a Ray cluster whose machines share this folder; messages of what failed.

    Joins the cluster of RAY_ADDRESS or of the machine, else starts one here. A run takes 1 / ``parallel`` of this
    machine's cores, and a GPU where there are any.

    Raises:
        ValueError: If Ray is not installed.
    """
    threads = max(1, cores() // parallel)
    program = jobs.RUN
    folder, path = os.getcwd(), os.environ.get("PYTHONPATH", "")

    def remote(job: Job, config: dict[str, Any]) -> str | None:
        os.chdir(folder)
        os.environ["PYTHONPATH"] = path
        try:
            jobs.run(job, config, threads, lambda _: None, program)
        except jobs.Failed as error:
            return str(error)
        return None

    failed = []
    with joined("compare: engine", "--engine local") as cluster:
        gpus = 1 if cluster.cluster_resources().get("GPU", 0) else 0
        task = cluster.remote(num_cpus=threads, num_gpus=gpus, max_retries=3)(remote)
        waiting = {task.remote(job, config): job for job, config in work}
        while waiting:
            (done, *_), _ = cluster.wait(list(waiting))
            job = waiting.pop(done)
            message = cluster.get(done)
            say(message or f"{job.name}: done")
            failed += [message] if message else []
    return failed


ENGINES = {"local": local, "ray": ray}

"""`RayRuns`: an engine that executes the runs of a comparison on the nodes of a Ray cluster."""

import os
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

from kerple.base.errors import UserError, require
from kerple.base.ray_cluster import Cluster
from kerple.compare import engines
from kerple.compare.engines import (
    STOP_TIMEOUT,
    TICK,
    Ended,
    Engine,
    ended_run,
    signals,
    start_process,
    stop_processes,
    thread_variables,
)
from kerple.compare.planned_run import PlannedRun


class RayRuns(Engine[Any]):
    """Executes each run as a Ray task on a node of a cluster. The folders of the runs must be on a shared disk.

    A run whose worker or node is lost continues on another node from its last checkpoint.

    Args:
        parallel: Number of runs at a time.
        address: Address of the cluster, see `Cluster`.
        cpus: Number of cores of a run; None for an equal part of the cluster's cores.
        gpus: Number of GPUs of a run; None for one if the cluster has any.
    """

    def __init__(
        self, parallel: int, address: str | None = None, cpus: int | None = None, gpus: int | None = None
    ) -> None:
        super().__init__(parallel)
        for name, value, least in (("cpus", cpus, 1), ("gpus", gpus, 0)):
            require(value is None or value >= least, f"compare: {name}", value, f"{least} or more")
        self.cluster = Cluster("compare: engine", address)
        nodes = [node["Resources"] for node in self.cluster.ray.nodes() if node["Alive"]]
        cores = [int(node.get("CPU", 0)) for node in nodes]
        self.cpus = cpus or max(1, min(sum(cores) // parallel, max(cores)))
        gpus = int(any(node.get("GPU", 0) for node in nodes)) if gpus is None else gpus
        self._execute = self.cluster.task(execute_run, self.cpus, gpus)

    def start(self, run: PlannedRun) -> Any:
        """Submit a run to the cluster. Return a reference to its task."""
        run.directory.parent.mkdir(parents=True, exist_ok=True)
        threads = thread_variables(self.cpus)
        return self._execute(engines.PROCESS, run.description(), str(run.sidecar(".log")), threads)

    def poll(self, run: PlannedRun, handle: Any) -> Ended | None:
        """See `Engine.poll`."""
        if not self.cluster.ended(handle):
            return None
        try:
            return ended_run(run, self.cluster.result(handle))
        except UserError as error:
            return run, f"{run.name}: {error}"

    def stop(self, handles: list[Any]) -> None:
        """Let runs save and end, and wait for them. After `STOP_TIMEOUT` or a second signal, they are killed."""
        ray, end = self.cluster.ray, time.monotonic() + STOP_TIMEOUT
        with suppress(UserError):  # of a cluster that does not answer, whose nodes end their runs
            for handle in handles:
                ray.cancel(handle, force=False)
            while not all(self.cluster.ended(handle) for handle in handles):
                time.sleep(TICK)
                if len(signals) > 1 or time.monotonic() > end:
                    for handle in handles:
                        ray.cancel(handle, force=True)


def execute_run(program: list[str], description: str, log: str, threads: dict[str, str]) -> int:
    """Execute the process of a run, and return its exit status. This function runs on a worker of the cluster.

    The process ends with the worker, by a pipe that is closed when the worker ends.

    Args:
        program: Arguments of Python, see `kerple.compare.engines.start_process`.
        description: See `PlannedRun.description`.
        log: Path of the log.
        threads: Environment variables with the number of threads.
    """
    end_of_pipe, held_by_worker = os.pipe()
    process = start_process(program, description, Path(log), os.environ | threads, end_of_pipe)
    os.close(end_of_pipe)
    try:
        while (status := process.poll()) is None:
            time.sleep(TICK)
    except BaseException:  # the task was cancelled
        stop_processes([process])
        raise
    finally:
        os.close(held_by_worker)
    return status

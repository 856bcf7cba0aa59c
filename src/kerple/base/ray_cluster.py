"""A Ray cluster, on which `compare` and `prepare` can execute their work. Ray is an optional package."""

import os
import pickle
import platform
import signal
import socket
import time
from collections.abc import Callable
from contextlib import suppress
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import kerple
from kerple.base.errors import UserError, describe, require

SAME = ("torch", "numpy", "tokenizers")  # packages on which results depend
RETRIES = 20  # number of times that a task is repeated after its worker or node was lost
CHECK_EVERY = 2.0  # seconds between two checks whether the head of the cluster answers
GIVE_UP = 20.0  # seconds without an answer; after 60 seconds Ray would end this process


def versions() -> str:
    """Return the versions of Python, this package and `SAME` in this process, as text."""
    found = [f"Python {platform.python_version()}", f"kerple {kerple.__version__}"]
    for package in SAME:
        with suppress(PackageNotFoundError):
            found.append(f"{package} {version(package)}")
    return ", ".join(found)


class Cluster:
    """A connection of this process to a Ray cluster. All nodes must have the current folder, at the same path.

    Args:
        option: Name of the option that has selected Ray, for messages.
        address: Address HOST:PORT of the head of a cluster, or ``auto`` for a cluster that was started on this machine.
            None for the environment variable RAY_ADDRESS. Without it, a cluster of this machine is started, and ends
            with this process.

    Attributes:
        ray (Any): The module `ray`.

    Raises:
        UserError: The cluster does not answer, or has another version of Ray or Python.
        ModuleNotFoundError: Ray is not installed.
    """

    def __init__(self, option: str, address: str | None = None) -> None:
        import ray  # an optional package

        self.option, self.ray, self._answered, self._checked = option, ray, time.monotonic(), 0.0
        os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
        handler = signal.getsignal(signal.SIGTERM)
        if not ray.is_initialized():
            try:
                ray.init(address=address, log_to_driver=False, logging_level="ERROR")
            except Exception as error:  # of several classes, for each cause another
                expected = f"HOST:PORT of the head of a cluster, with Ray {ray.__version__} and this Python"
                reason = " ".join(str(error).split())[:300]  # several lines, with the versions of the cluster
                given = f"{address or os.environ.get('RAY_ADDRESS')}, which cannot be used ({reason})"
                raise UserError(f"{option}: address: got {given}, expected {expected}") from error
        signal.signal(signal.SIGTERM, handler or signal.SIG_DFL)  # Ray has replaced it
        host, _, port = ray.get_runtime_context().gcs_address.rpartition(":")
        self.head = host, int(port)

    def task(self, function: Callable[..., Any], cpus: float, gpus: float = 0) -> Callable[..., Any]:
        """Return a function that executes a function of this package as a Ray task, and returns a reference.

        Args:
            function: The function, on the top level of its module.
            cpus: Number of cores that the task reserves on its node.
            gpus: Number of GPUs that the task reserves.

        Raises:
            UserError: No node has so many cores and GPUs.
        """
        nodes = [node["Resources"] for node in self.ray.nodes() if node["Alive"]]
        fits = any(node.get("CPU", 0) >= cpus and node.get("GPU", 0) >= gpus for node in nodes)
        kinds = sorted({f"{node.get('CPU', 0):g} cores and {node.get('GPU', 0):g} GPUs" for node in nodes})
        available = f"those of a node, which have {'; '.join(kinds)}"
        require(fits, f"{self.option}: cpus, gpus", f"{cpus:g}, {gpus:g}", available)
        module, name, folder, expected = function.__module__, function.__name__, os.getcwd(), versions()
        paths = [str(Path(kerple.__file__).parents[1]), *filter(None, os.environ.get("PYTHONPATH", "").split(":"))]

        def call(pickled_arguments: bytes) -> Any:  # pickled by value, so that a node needs no copy of this package
            import os
            import pickle
            import socket
            import sys
            from importlib import import_module

            if not os.path.isdir(folder):
                raise RuntimeError(f"{socket.gethostname()} has no folder {folder}, which all nodes must share")
            os.chdir(folder)
            sys.path[:0] = [path for path in paths if path not in sys.path]
            try:
                found = import_module("kerple.base.ray_cluster").versions()
            except ImportError as error:
                found = f"no kerple with Ray ({error})"
            if found != expected:
                raise RuntimeError(f"{socket.gethostname()} has {found}, expected {expected}; install these versions")
            return getattr(import_module(module), name)(*pickle.loads(pickled_arguments))

        task = self.ray.remote(num_cpus=cpus, num_gpus=gpus, max_retries=RETRIES)(call)
        return lambda *arguments: task.remote(pickle.dumps(arguments))

    def result(self, reference: Any) -> Any:
        """Wait for a task, and return its result.

        Raises:
            UserError: The task has failed, or its node was lost too often. The message has one line.
        """
        while not self.ended(reference):
            time.sleep(0.01)
        try:
            return self.ray.get(reference)
        except self.ray.exceptions.RayError as error:
            cause = getattr(error, "cause", None) or error
            message = str(cause) if isinstance(cause, UserError | RuntimeError) else describe(cause)
            raise UserError(f"{self.option}: {' '.join(message.split())[:500]}") from error

    def ended(self, reference: Any) -> bool:
        """Return whether a task has ended.

        Raises:
            UserError: The head of the cluster has not answered for `GIVE_UP` seconds.
        """
        if time.monotonic() - self._checked >= CHECK_EVERY:
            with suppress(OSError), socket.create_connection(self.head, CHECK_EVERY):
                self._answered = time.monotonic()
            self._checked = time.monotonic()
        lost = time.monotonic() - self._answered > GIVE_UP
        advice = "start the cluster, then run the same command again, which continues"
        require(not lost, self.option, f"ray, whose head {':'.join(map(str, self.head))} does not answer", advice)
        return bool(self.ray.wait([reference], timeout=0)[0])

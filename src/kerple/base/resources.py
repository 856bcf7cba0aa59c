"""Resources for parallel work: the cores of this machine, or a Ray cluster."""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from kerple.base.errors import UserError


def cores() -> int:
    """Number of cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


@contextmanager
def connect_to_ray(setting: str, alternative: str) -> Iterator[Any]:
    """Connect this process to a Ray cluster during the context, which yields the module `ray`.

    The environment variable RAY_ADDRESS names the cluster. Without it, Ray uses a cluster that runs on this machine, or
    starts one and stops it at the end of the context. This package is sent to the machines of the cluster, which need
    its dependencies in the same versions. If the process is already connected to a cluster, it stays connected, and
    this package must be installed there.

    Args:
        setting: Name of the option that selected Ray, for messages.
        alternative: The option that avoids Ray, for messages.

    Raises:
        UserError: The cluster does not answer.
        ModuleNotFoundError: Ray is not installed.
    """
    import ray

    was_connected = ray.is_initialized()
    if not was_connected:
        try:
            ray.init(
                address=os.environ.get("RAY_ADDRESS"),
                log_to_driver=False,
                include_dashboard=False,
                runtime_env={"py_modules": [str(Path(__file__).parents[1])]},
            )
        except ConnectionError as error:
            raise UserError(f"{setting}: Ray does not answer ({error}); set RAY_ADDRESS, or {alternative}") from error
    try:
        yield ray
    finally:
        if not was_connected:
            ray.shutdown()

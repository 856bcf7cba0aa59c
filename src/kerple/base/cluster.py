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
def joined(setting: str, instead: str) -> Iterator[Any]:
    """Context in which this process belongs to a Ray cluster; it gives the module `ray`.

    The cluster is that of RAY_ADDRESS, or one that runs on this machine, or else one that is started here and ends with
    the context. This package is sent to the machines of the cluster, which need the packages that it depends on, in the
    same versions. If the process belonged to a cluster before, it stays in it, and that cluster needs the package too.

    Args:
        setting: The option that asked for Ray, for messages.
        instead: The option that does without Ray, for messages.

    Raises:
        UserError: Ray is not installed, or its cluster does not answer.
    """
    try:
        import ray
    except ImportError as error:
        raise UserError(f"{setting}: got 'ray', which is not installed; pip install ray, or {instead}") from error
    before = ray.is_initialized()
    if not before:
        try:
            ray.init(
                address=os.environ.get("RAY_ADDRESS"),
                log_to_driver=False,
                include_dashboard=False,
                runtime_env={"py_modules": [str(Path(__file__).parents[1])]},
            )
        except ConnectionError as error:
            raise UserError(
                f"{setting}: Ray's cluster does not answer ({error}); start it, set RAY_ADDRESS to one that runs or to "
                f"'local', set RAY_AUTH_MODE=token for one that was started with a token, or {instead}"
            ) from error
    try:
        yield ray
    finally:
        if not before:
            ray.shutdown()

"""What work can be spread over: the cores of this machine, or a Ray cluster."""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from kerple.errors import UserError


def cores() -> int:
    """Cores this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


@contextmanager
def joined(setting: str, instead: str) -> Iterator[Any]:
    """Ray, joined to the cluster of RAY_ADDRESS or of this machine, else to one started here.

    One that is started here ends with the block, one that was there is left with it. This package is sent to its
    machines; they need what it depends on, at the same versions. One that this process had joined before stays joined,
    and has to have the package.

    Args:
        setting: Who asked for Ray, for the message.
        instead: What to ask for without it, for the message.

    Raises:
        UserError: Ray is not installed, or its cluster does not answer.
    """
    try:
        import ray
    except ImportError as error:
        raise UserError(
            f"{setting}: got 'ray', which is not installed; pip install 'kerple[ray]', or {instead}"
        ) from error
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

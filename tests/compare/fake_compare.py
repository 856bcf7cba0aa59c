"""`run.py compare` over stand-in runs, in a process of its own: what it shows, and how it is stopped."""

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from kerple.cli import compare, run_comparison
from kerple.compare import board
from kerple.compare import job as jobs
from kerple.compare.comparison import Job


def resolve(job: Job) -> dict[str, Any]:
    """The flags stand for the configuration, so that no model is needed."""
    settings = dict(flag.removeprefix("--").split("=", 1) for flag in job.fit if "run_dir" not in flag)
    return {"flags": settings, "data": {"class_path": "none"}}


def stand_in(patch: Callable[[object, str, object], None] = setattr) -> None:
    """Make `compare` start stand-in runs in this process; a test gives ``monkeypatch.setattr``."""
    patch(jobs, "RUN", Path(__file__).with_name("fake_run.py"))
    patch(run_comparison, "resolve", resolve)
    patch(run_comparison, "check_test", lambda job, config: None)
    patch(run_comparison, "prepare", lambda data: None)


if __name__ == "__main__":
    stand_in()
    board.EVERY = 0.2
    compare.main(sys.argv[1:])

"""`run.py compare` over stand-in runs, in a process of its own: what it shows, and how it is stopped."""

import sys
from pathlib import Path
from typing import Any

from kerple.cli import compare, run_comparison
from kerple.compare import board
from kerple.compare import job as jobs
from kerple.compare.comparison import Job


def resolve(job: Job) -> dict[str, Any]:
    return {"flags": dict(f.removeprefix("--").split("=", 1) for f in job.fit if "run_dir" not in f), "data": None}


if __name__ == "__main__":
    jobs.RUN = Path(__file__).with_name("fake_run.py")
    board.EVERY = 0.2
    run_comparison.resolve = resolve
    run_comparison.prepare = lambda data: None
    compare.main(sys.argv[1:])

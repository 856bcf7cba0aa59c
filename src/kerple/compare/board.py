"""`Board`: the progress of a comparison, as a live table in a terminal or as lines in a file."""

import time
from collections.abc import Sequence
from typing import Any

from rich.console import Console
from rich.live import Live
from rich.table import Table

from kerple.base.progress import FILE, duration, progress_line, read_progress
from kerple.compare.job import Job

EVERY = 15.0  # seconds between two lines in a file
WARM_UP_SECONDS, WARM_UP_STEPS = 10.0, 5  # training before the time of a run is estimated from its pace


class Board:
    """Progress of a comparison: the number of finished runs, and step, loss, speed and remaining time of active runs.

    Args:
        total: Number of runs of the comparison.
        jobs: The unfinished runs, in order.
        parallel: Number of runs at a time.
        console: Console for the output. The table is live if it is a terminal.
    """

    def __init__(self, total: int, jobs: Sequence[Job], parallel: int, console: Console) -> None:
        self.total, self.unfinished, self.parallel, self.console = total, list(jobs), parallel, console
        self._pace: float | None = None  # seconds per run
        self._printed = time.monotonic()
        self._live = Live(console=console, auto_refresh=False, transient=True) if console.is_terminal else None

    def __enter__(self) -> "Board":
        for job in self.unfinished:  # files of runs that were stopped
            for folder in (job.directory, job.test_folder):
                (folder / FILE).unlink(missing_ok=True)
        if self._live:
            self._live.start()
        return self

    def __exit__(self, *_: object) -> None:
        if self._live:
            self._live.stop()

    def print(self, text: str) -> None:
        """Print a line above the live table."""
        self.console.print(f"[{self.total - len(self.unfinished)}/{self.total}] {text}", markup=False)

    def tick(self) -> None:
        """Show the progress. In a file, print at most one set of lines every `EVERY` seconds."""
        running = self.running()
        left = self.seconds_left(running)
        head = f"{self.total - len(self.unfinished)}/{self.total} done, {len(running)} running"
        starting = min(self.parallel, len(self.unfinished)) - len(running)  # runs without a progress file yet
        head += f", {starting} starting" if starting > 0 else ""
        head += "" if left is None else f", about {duration(left)} left"
        if self._live:
            table = Table(title=head, box=None, show_header=False)
            for name, progress in running.items():
                table.add_row(name, progress_line(progress))
            self._live.update(table, refresh=True)
        elif time.monotonic() - self._printed >= EVERY:
            self._printed = time.monotonic()
            for text in [f" {name}: {progress_line(progress)}" for name, progress in running.items()] or [""]:
                self.console.print(f"[{head}]{text}", markup=False)

    def running(self) -> dict[str, dict[str, Any]]:
        """The progress of each active run by its name."""
        folders = {job.name: (job.test_folder, job.directory) for job in self.unfinished}  # the test follows the fit
        states = {name: [read_progress(folder / FILE) for folder in of] for name, of in folders.items()}
        return {name: test or fit for name, (test, fit) in states.items() if test or fit}

    def seconds_left(self, running: dict[str, dict[str, Any]]) -> float | None:
        """Seconds until all runs are done, from the mean pace of training; None before a first pace is known."""
        paces = [progress["seconds"] + progress["seconds_left"] for progress in running.values() if has_pace(progress)]
        self._pace = sum(paces) / len(paces) if paces else self._pace
        if self._pace is None:
            return None
        seconds = sum(progress.get("seconds_left", 0.0) for progress in running.values())
        seconds += self._pace * (len(self.unfinished) - len(running))
        return seconds / max(1, min(self.parallel, len(self.unfinished)))


def has_pace(progress: dict[str, Any]) -> bool:
    """Whether a run has trained long enough to estimate its pace."""
    warm = progress.get("seconds", 0) >= WARM_UP_SECONDS and progress.get("done_since_start", 0) >= WARM_UP_STEPS
    return progress.get("stage") == "training" and "seconds_left" in progress and warm

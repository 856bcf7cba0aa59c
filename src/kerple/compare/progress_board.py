"""`Board`: the progress of a comparison, as a live table in a terminal or as lines in any other output."""

import time
from collections.abc import Sequence
from typing import Any

from rich.console import Console
from rich.live import Live
from rich.table import Table

from kerple.base.atomic import read_json
from kerple.base.run_progress import FILE, duration, progress_line
from kerple.compare.planned_run import PlannedRun

EVERY = 15.0  # seconds between two outputs if the console is not a terminal
WARM_UP_SECONDS, WARM_UP_STEPS = 10.0, 5  # minimum training of a run before its duration is estimated


class Board:
    """Progress of a comparison: the number of finished runs, and step, loss, speed and remaining time of active runs.

    As a context, it shows a live table if the console is a terminal.

    Args:
        total: Number of all runs of the comparison.
        runs: The unfinished runs. `ended` removes a run.
        parallel: Number of runs at a time.
        console: Console for the output.
    """

    def __init__(self, total: int, runs: Sequence[PlannedRun], parallel: int, console: Console) -> None:
        self.total, self.unfinished, self.parallel, self.console = total, list(runs), parallel, console
        self._duration: float | None = None  # estimated seconds of one run
        self._printed = time.monotonic()
        self._live = Live(console=console, auto_refresh=False, transient=True) if console.is_terminal else None

    def __enter__(self) -> "Board":
        for run in self.unfinished:  # the progress file of a stopped run would show it as an active run
            for folder in (run.directory, run.test_folder):
                (folder / FILE).unlink(missing_ok=True)
        if self._live:
            self._live.start()
        return self

    def __exit__(self, *_: object) -> None:
        if self._live:
            self._live.stop()

    def ended(self, run: PlannedRun, text: str) -> None:
        """Count a run as ended. Print the number of ended runs and a text, above the live table if there is one."""
        self.unfinished.remove(run)
        self.console.print(f"[{self.total - len(self.unfinished)}/{self.total}] {text}", markup=False)

    def tick(self) -> None:
        """Update the live table, or print a line per active run if `EVERY` seconds have passed since the last lines."""
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
        """The progress of each active run by its name: that of its test, or that of its fit before the test starts."""
        states = {
            run.name: read_json(run.test_folder / FILE) or read_json(run.directory / FILE) for run in self.unfinished
        }
        return {name: progress for name, progress in states.items() if progress}

    def seconds_left(self, running: dict[str, dict[str, Any]]) -> float | None:
        """Estimate, from the mean duration of a fit, the seconds until all runs are finished.

        Args:
            running: The progress of each active run by its name.

        Returns:
            The estimate; None before the duration of any fit could be estimated.
        """
        durations = [progress["seconds"] + progress["seconds_left"] for progress in running.values() if warm(progress)]
        self._duration = sum(durations) / len(durations) if durations else self._duration
        if self._duration is None:
            return None
        seconds = sum(progress.get("seconds_left", 0.0) for progress in running.values())
        seconds += self._duration * (len(self.unfinished) - len(running))
        return seconds / max(1, min(self.parallel, len(self.unfinished)))


def warm(progress: dict[str, Any]) -> bool:
    """Whether a run has trained long enough to estimate its duration from its progress."""
    timed = progress.get("stage") == "training" and "seconds_left" in progress
    return timed and progress["seconds"] >= WARM_UP_SECONDS and progress["done_since_start"] >= WARM_UP_STEPS

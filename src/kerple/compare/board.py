"""`Board`: the progress of a comparison, as a live table in a terminal, or as lines in a file."""

import time
from collections.abc import Sequence
from typing import Any

from rich.console import Console, Group
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from kerple.base.progress import duration, line, read
from kerple.compare.comparison import Job

EVERY = 15.0  # seconds between two lines in a file
SETTLED, STEPS = 10.0, 5  # seconds and steps of training after which its pace is believed


class Board:
    """All runs at a glance: done, running, to do, time left; of each that runs its step, loss, speed and time left.

    Args:
        work: All runs of the comparison.
        to_do: The runs that are not finished, in order.
        parallel: Number of runs at a time.
        console: Console to print to; the table is live if it is a terminal.
    """

    def __init__(self, work: Sequence[Job], to_do: Sequence[Job], parallel: int, console: Console) -> None:
        self.total, self.parallel, self.console = len(work), parallel, console
        self.open = list(to_do)
        self.done = self.total - len(self.open)
        self.took: list[float] = []  # seconds of each run that has ended here
        self._paces: list[float] = []  # seconds that the runs in training will have taken, as of when it was known last
        self._first_seen: dict[Job, float] = {}
        self._said = time.monotonic()
        self._advised = False
        self._live = Live(console=console, auto_refresh=False, transient=True) if console.is_terminal else None

    def __enter__(self) -> "Board":
        for job in self.open:
            job.beside(".progress").unlink(missing_ok=True)
        if self._live:
            self._live.start()
        return self

    def __exit__(self, *_: object) -> None:
        if self._live:
            self._live.stop()

    def ended(self, job: Job, well: bool) -> None:
        """Record that a run has ended, and whether it went well."""
        self.open.remove(job)
        self.done += well
        if well and job in self._first_seen:
            self.took.append(time.monotonic() - self._first_seen[job])
        job.beside(".progress").unlink(missing_ok=True)

    def tick(self) -> None:
        """Show the progress; in a file, only if enough time has passed."""
        running = self.running()
        for job in running:
            self._first_seen.setdefault(job, time.monotonic())
        if self._live:
            self._live.update(self._table(running), refresh=True)
        elif time.monotonic() - self._said >= EVERY:
            self._said = time.monotonic()
            head = self.summary(running)
            at_work = [f" {job.name}: {line(told)}" for job, told in running.items() if told.get("doing") != "done"]
            for text in at_work or [""]:
                self.console.print(f"[{head}]{text}", markup=False)

    def say(self, text: str) -> None:
        """Print a line above the live table."""
        self.console.print(f"[{self.done}/{self.total}] {text}", markup=False)

    def advise(self, minutes: float | None, smaller: str | None) -> None:
        """Once the pace of the first run is known: say how long all of it takes, and what would take less.

        Args:
            minutes: How long it is meant to take.
            smaller: A command for a smaller comparison, with ``{steps}`` for the steps of each run.
        """
        running = self.running()
        paces = [told for told in running.values() if settled(told)]
        left = self.left(running)
        if self._advised or not paces or left is None:
            return
        self._advised = True
        speed = f"{paces[0].get('tokens_per_second', 0):,.0f} tokens a second{' a run' if self.parallel > 1 else ''}"
        text = f"all of it takes about {duration(left)}, at {speed}"
        if minutes and smaller and left > 60 * minutes:
            steps = max(10, int(paces[0]["of"] * 60 * minutes / left) // 10 * 10)
            text += f"; Ctrl-C and `{smaller.replace('{steps}', str(steps))}` for what takes about {minutes:g} min"
        self.say(text)

    def running(self) -> dict[Job, dict[str, Any]]:
        """The progress of each run that is being executed."""
        told = {job: read(job.beside(".progress")) for job in self.open}
        return {job: content for job, content in told.items() if content}

    def summary(self, running: dict[Job, dict[str, Any]]) -> str:
        """Numbers of runs that are done, running and to do, and the time left, as text."""
        text = f"{self.done}/{self.total} done, {len(running)} running, {len(self.open) - len(running)} to do"
        left = self.left(running)
        return text if left is None else f"{text}, about {duration(left)} left"

    def left(self, running: dict[Job, dict[str, Any]]) -> float | None:
        """Seconds until all runs are done; None before the pace of the first one is known."""
        self._paces = [told["for"] + told["left"] for told in running.values() if settled(told)] or self._paces
        whole = self.took or self._paces
        if not whole:
            return None
        each = sum(whole) / len(whole)
        here = [told.get("left", 0.1 * each if told.get("doing") == "testing" else each) for told in running.values()]
        return (sum(here) + each * (len(self.open) - len(running))) / max(1, min(self.parallel, len(self.open)))

    def _table(self, running: dict[Job, dict[str, Any]]) -> Group:
        table = Table.grid(padding=(0, 2))
        for job, told in running.items():
            done, of = told.get("done", 0), max(told.get("of", 0), 1)
            what = line(told)
            bar = ProgressBar(of, done, width=min(20, self.console.width // 6))
            table.add_row(job.name, bar, Text(what, overflow="ellipsis", no_wrap=True))
        return Group(Text(self.summary(running), style="bold"), table)


def settled(told: dict[str, Any]) -> bool:
    """Whether a run has trained long enough for its pace to be a good estimate."""
    enough = told.get("for", 0) >= SETTLED and told.get("since", 0) >= STEPS
    return told.get("doing") == "training" and "left" in told and enough

"""Progress of a run: lines on the terminal, and a small JSON file that `compare` reads."""

import json
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, TypeVar

from kerple.base.atomic import write

T = TypeVar("T")
FILE = "progress.json"  # in the folder of a fit or a test


class Progress:
    """Prints the number of completed training steps, or blocks of a test, every few seconds, and writes it to a file.

    Args:
        path: The file, or None for no file.
        every: Seconds between two lines.
        file_every: Seconds between two writes of the file.
    """

    def __init__(self, path: Path | None = None, every: float = 15.0, file_every: float = 1.0) -> None:
        self.path, self.every, self.file_every = path, every, file_every
        self.begin("starting", 0)

    def begin(self, stage: str, total: int, done: int = 0) -> None:
        """Start counting ``total`` steps or blocks, of which ``done`` are already done."""
        self._stage, self._total, self._first = stage, total, done
        self._began = self._printed = time.monotonic()
        self._written = 0.0

    def advance(self, done: int, extra_entries: Callable[[float], dict[str, Any]] = lambda seconds: {}) -> None:
        """Set the number of completed steps or blocks, and print and write it if enough time has passed.

        Args:
            done: Number of completed steps or blocks.
            extra_entries: Function that receives the seconds since `begin` and returns further entries of the file and
                of the printed line, such as the loss. It is called in the first and last `advance`, and in other calls
                at most once in ``file_every`` seconds.
        """
        now = time.monotonic()
        last = 0 < self._total <= done
        if not (last or now - self._written >= self.file_every):
            return
        self._written = now
        seconds, since = now - self._began, done - self._first
        state: dict[str, Any] = {"stage": self._stage, "done": done, "total": self._total}
        state |= {"seconds": seconds, "done_since_start": since}
        if since > 0 and self._total > 0:
            state["seconds_left"] = seconds / since * (self._total - done)
        state |= extra_entries(seconds)
        if self.path is not None:
            write_progress(self.path, **state)
        if last or now - self._printed >= self.every:
            self._printed = now
            print(progress_line(state), flush=True)

    def count(self, items: Sequence[T]) -> Iterator[T]:
        """Yield the blocks of a test, which are blocks of text or batches of a task's examples, and count them."""
        self.begin("testing", len(items))
        for number, item in enumerate(items, 1):
            yield item
            self.advance(number)


def write_progress(path: Path, **content: Any) -> None:
    """Replace the content of a progress file atomically. Errors of the disk are ignored, because no run needs the file.

    Args:
        path: The file.
        **content: ``stage`` (starting, training or testing); ``done`` and ``total``, numbers of steps or blocks;
            ``done_since_start`` and ``seconds``, the number of steps or blocks and the time since `Progress.begin`; if
            known, ``seconds_left``, ``loss`` and ``tokens_per_second``.
    """
    with suppress(OSError):
        write(path, json.dumps(content), durable=False)


def duration(seconds: float) -> str:
    """Return a duration as text, such as 45 s, 3 min or 2 h 05 min."""
    if seconds < 90:
        return f"{seconds:.0f} s"
    minutes = round(seconds / 60)
    return f"{minutes} min" if minutes < 90 else f"{minutes // 60} h {minutes % 60:02} min"


def progress_line(content: dict[str, Any]) -> str:
    """Return the content of a progress file as one line of text."""
    if "done" not in content:
        return str(content.get("stage", "starting"))
    unit = "step" if content["stage"] == "training" else "block"
    parts = [content["stage"]]
    parts += [f"{unit} {content['done']:,} of {content['total']:,}"] if content["total"] > 0 else []
    left = content.get("seconds_left", 0)
    parts += [f"{duration(left)} left"] if left >= 0.5 else []  # not shown at the end
    parts += [f"loss {content['loss']:.3f}"] if "loss" in content else []
    parts += [f"{content['tokens_per_second']:,.0f} tokens/s"] if "tokens_per_second" in content else []
    return ", ".join(parts)

"""`ProgressLines`: prints lines that say how far a run is, and writes a file with the same, which `compare` reads."""

import signal
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, TypeVar

from pytorch_lightning import Callback, LightningModule, Trainer

from kerple.base.progress import FILE, line, write_progress
from kerple.training.lightning_types import log_directory, untyped

T = TypeVar("T")


class ProgressLines(Callback):
    """Prints a line every few seconds that says at which step or block a run is, and how much time is left.

    The command line adds it in place of Lightning's bar if the output is not a terminal. In training a line has the
    step, the loss, the tokens per second, and the time left at the average pace since this start. The same is written
    as JSON to ``progress.json`` in the run's folder, where `compare` reads it.

    Args:
        every: Seconds between two lines.
        file_every: Seconds between two writes of the file.
    """

    def __init__(self, every: float = 15.0, file_every: float = 1.0) -> None:
        super().__init__()
        self.every, self.file_every = every, file_every
        self._path: Path | None = None
        self.begin("starting", 0)

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._path = log_directory(trainer) / FILE
        self.begin("training", trainer.max_steps, trainer.global_step)

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: dict[str, Any], batch_idx: int
    ) -> None:
        rows, columns = batch["tokens"].shape
        self._tokens += rows * (columns - 1) * trainer.world_size
        self.advance(trainer, trainer.global_step, outputs)

    def on_test_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._path = log_directory(trainer) / FILE
        self.begin("testing", sum(int(n) for n in trainer.num_test_batches if n != float("inf")))

    def on_test_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int, *_: Any
    ) -> None:
        self.advance(trainer, batch_idx + 1)

    def begin(self, stage: str, total: int, done: int = 0) -> None:
        """Start counting ``total`` steps or blocks, of which ``done`` are already done."""
        self._stage, self._total, self._first = stage, total, done
        self._began = self._printed = time.monotonic()
        self._written = 0.0
        self._tokens = 0

    def advance(self, trainer: Trainer, done: int, outputs: Any = None) -> None:
        """Take note that ``done`` steps or blocks are done; print and write it if enough time has passed."""
        now, last = time.monotonic(), done >= self._total
        if not trainer.is_global_zero or not (last or now - self._written >= self.file_every):
            return
        self._written = now
        seconds, since = now - self._began, done - self._first
        state: dict[str, Any] = {"stage": self._stage, "done": done, "total": self._total}
        state |= {"seconds": seconds, "done_since_start": since}
        if since > 0 and self._total > 0:
            state["seconds_left"] = seconds / since * (self._total - done)
        if self._tokens:
            state["tokens_per_second"] = self._tokens / seconds
        if isinstance(outputs, dict) and "loss" in outputs:
            # a step's own loss is scaled where only some targets count; this waits for the device, but seldom
            state["loss"] = float(trainer.callback_metrics.get("train/loss") or outputs["loss"])
        if self._path is not None:
            write_progress(self._path, **state)
        if last or now - self._printed >= self.every:
            self._printed = now
            print(line(state), flush=True)


def with_progress(trainer: Trainer, blocks: Sequence[T]) -> Iterator[T]:
    """Yield the blocks that an analysis reads in a test; `ProgressLines` counts them, and SIGTERM ends the test."""
    counters = [c for c in untyped(trainer).callbacks if isinstance(c, ProgressLines) and trainer.testing]
    for counter in counters:
        counter.begin("testing", len(blocks))
    for number, block in enumerate(blocks):
        yield block
        for counter in counters:
            counter.advance(trainer, number + 1)
        if trainer.testing and trainer.received_sigterm:  # Lightning takes note of it, and looks when all are read
            raise SystemExit(128 + signal.SIGTERM)

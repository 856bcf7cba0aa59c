"""`ProgressLines`: lines of text that say how far a run is, and a file with the same, which `compare` reads."""

import math
import os
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, TypeVar

from pytorch_lightning import Callback, LightningModule, Trainer

from kerple.base.progress import VARIABLE, line, note
from kerple.evaluation.typed import untyped

T = TypeVar("T")


class ProgressLines(Callback):
    """Prints a line every few seconds that says at which step or block a run is, and how much time is left.

    The command line adds it in place of Lightning's bar if the output is not a terminal. In training a line has the
    step, the loss, the tokens per second, and the time left at the average pace since this start. The same is written
    as JSON to the file that the environment variable ``KERPLE_PROGRESS`` names, where `compare` reads it.

    Args:
        every: Seconds between two lines.
        file_every: Seconds between two writes of the file.
    """

    def __init__(self, every: float = 15.0, file_every: float = 1.0) -> None:
        super().__init__()
        self.every, self.file_every = every, file_every
        self._path = Path(os.environ[VARIABLE]) if os.environ.get(VARIABLE) else None
        self._what, self._total = "", 0
        self._begun_at = self._tokens = self._done = 0
        self._begun = self._said = self._noted = self._resting = self._rest_began = 0.0

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self.begin("training", trainer.max_steps, trainer.global_step)

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: dict[str, Any], batch_idx: int
    ) -> None:
        rows, columns = batch["tokens"].shape
        self._tokens += rows * (columns - 1) * trainer.world_size
        self.tell(trainer, trainer.global_step, outputs)

    def on_validation_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._rest_began = time.monotonic()

    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._resting += time.monotonic() - self._rest_began

    def on_test_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self.begin("testing", sum(int(n) for n in trainer.num_test_batches if n != float("inf")))

    def on_test_batch_end(
        self,
        trainer: Trainer,
        pl_module: LightningModule,
        outputs: Any,
        batch: Any,
        batch_idx: int,
        dataloader_idx: int = 0,
    ) -> None:
        self.tell(trainer, batch_idx + 1)

    def begin(self, what: str, total: int, done: int = 0) -> None:
        """Start counting ``total`` steps or blocks of ``what``, of which ``done`` are already done."""
        self._what, self._total, self._begun_at = what, total, done
        self._begun = self._said = time.monotonic()
        self._noted = self._resting = 0.0
        self._tokens = 0
        self._done = done

    def tell(self, trainer: Trainer, done: float, outputs: Any = None) -> None:
        """Take note that ``done`` steps or blocks are done; print and write it if enough time has passed."""
        self._done = math.floor(done)
        now = time.monotonic()
        last = done >= self._total
        if not trainer.is_global_zero or not (last or now - self._noted >= self.file_every):
            return
        self._noted = now
        took = now - self._begun
        new = done - self._begun_at
        told: dict[str, Any] = {"doing": self._what, "done": done, "of": self._total, "for": took, "since": new}
        if new > 0 and self._total > 0:
            told["left"] = took / new * (self._total - done)
        if self._tokens and took > self._resting:
            told["tokens_per_second"] = self._tokens / (took - self._resting)
        if isinstance(outputs, dict) and "loss" in outputs:
            told["loss"] = float(outputs["loss"])  # waits for the device, but only every `file_every` seconds
        if self._path is not None:
            note(self._path, **told)
        if last or now - self._said >= self.every:
            self._said = now
            print(line(told), flush=True)

    def part(self, trainer: Trainer, share: float) -> None:
        """Take note that a share of the current block is done; a long block takes minutes."""
        self.tell(trainer, self._done + round(min(share, 0.99), 2))


def _tellers(trainer: Trainer) -> list[ProgressLines]:
    """The trainer's `ProgressLines` in a test, none elsewhere."""
    return [c for c in untyped(trainer).callbacks if isinstance(c, ProgressLines) and trainer.testing]


def with_progress(trainer: Trainer, blocks: Sequence[T]) -> Iterator[T]:
    """Yield the blocks that a test scores after its batches, and let `ProgressLines` count them."""
    tellers = _tellers(trainer)
    for teller in tellers:
        teller.begin("testing", len(blocks))
    for number, block in enumerate(blocks):
        yield block
        for teller in tellers:
            teller.tell(trainer, number + 1)


def within(trainer: Trainer, parts: Sequence[T]) -> Iterator[T]:
    """Yield the parts of the work on one block of a test, and let `ProgressLines` count them."""
    tellers = _tellers(trainer)
    for number, part in enumerate(parts):
        yield part
        for teller in tellers if number + 1 < len(parts) else ():
            teller.part(trainer, (number + 1) / len(parts))

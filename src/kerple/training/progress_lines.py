"""`ProgressLines`: prints the progress of a run as lines, and writes it to a file that `compare` reads."""

import signal
from collections.abc import Iterator, Sequence
from typing import Any, TypeVar

from pytorch_lightning import Callback, LightningModule, Trainer

from kerple.base.run_progress import FILE, Progress
from kerple.training.trainer_access import log_directory, untyped

T = TypeVar("T")


class ProgressLines(Callback):
    """Prints the current step of a fit, or block of a test, and the remaining time every few seconds.

    The commands add this callback in place of Lightning's progress bar in a test, and in a fit whose output is not a
    terminal. In a fit, a line has the step, the remaining time at the average speed since the start, the loss, and the
    tokens per second. The same values are written as JSON to ``progress.json`` in the folder of the run.

    Args:
        every: Seconds between two lines.
        file_every: Seconds between two writes of the file.
    """

    def __init__(self, every: float = 15.0, file_every: float = 1.0) -> None:
        super().__init__()
        self.progress = Progress(None, every, file_every)

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        self.progress.path = log_directory(trainer) / FILE

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self.progress.begin("training", trainer.max_steps, trainer.global_step)
        self._tokens = 0

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: dict[str, Any], batch_idx: int
    ) -> None:
        self._tokens += batch["tokens"][:, 1:].numel() * trainer.world_size

        def extra_entries(seconds: float) -> dict[str, Any]:
            # the logged loss is preferred, because the returned one is scaled if only some targets are scored
            loss = trainer.callback_metrics.get("train/loss") or (outputs or {}).get("loss")
            # float() waits for the device, but `advance` calls this function at most once in ``file_every`` seconds
            return {"tokens_per_second": self._tokens / seconds} | ({} if loss is None else {"loss": float(loss)})

        if trainer.is_global_zero:
            self.progress.advance(trainer.global_step, extra_entries)


def with_progress(trainer: Trainer, blocks: Sequence[T]) -> Iterator[T]:
    """Yield the blocks of a measurement. In a test, `ProgressLines` counts them, and SIGTERM ends the process."""
    counters = [c.progress for c in untyped(trainer).callbacks if isinstance(c, ProgressLines) and trainer.testing]
    shown = counters[0].count(blocks) if counters and trainer.is_global_zero else blocks
    for block in shown:
        _end_on_sigterm(trainer)
        yield block
    _end_on_sigterm(trainer)


def _end_on_sigterm(trainer: Trainer) -> None:
    if trainer.testing and trainer.received_sigterm:  # Lightning reacts only after the last block
        raise SystemExit(128 + signal.SIGTERM)

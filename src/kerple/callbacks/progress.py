"""The progress bar of a fit on a GPU: it asks for numbers now and then."""

from typing import Any

from pytorch_lightning import LightningModule, Trainer
from pytorch_lightning.callbacks import RichProgressBar


class SteadyProgress(RichProgressBar):
    """Lightning's progress bar, moved on every ``trainer.log_every_n_steps`` micro-batches.

    Lightning's own turns the loss into a Python number after each of them, and so waits for the device each time.
    """

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        if (batch_idx + 1) % trainer.log_every_n_steps == 0 or trainer.is_last_batch:
            super().on_train_batch_end(trainer, pl_module, outputs, batch, batch_idx)

"""`SteadyProgress`: a progress bar for which the host does not wait for the GPU after every micro-batch."""

from typing import Any

from pytorch_lightning import LightningModule, Trainer
from pytorch_lightning.callbacks import RichProgressBar

from kerple.training.lightning_types import untyped


class SteadyProgress(RichProgressBar):
    """Lightning's progress bar, updated every ``trainer.log_every_n_steps`` micro-batches.

    Lightning's bar converts the loss to a Python number after each micro-batch, which waits for the device.
    """

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        if (batch_idx + 1) % untyped(trainer).log_every_n_steps == 0 or trainer.is_last_batch:
            super().on_train_batch_end(trainer, pl_module, outputs, batch, batch_idx)

    def _get_train_description(self, current_epoch: int) -> str:
        """The epoch without the number of epochs, because ``trainer.max_steps`` limits a run."""
        return f"Epoch {current_epoch}".ljust(len(self.validation_description))

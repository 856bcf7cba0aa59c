"""The checkpoint a stopped run resumes from."""

from pathlib import Path

from pytorch_lightning import LightningModule, Trainer
from pytorch_lightning.callbacks import ModelCheckpoint


class LastCheckpoint(ModelCheckpoint):
    """Keeps ``last.ckpt``: every so many steps and, unlike Lightning's own callback, after the last step of all.

    Args:
        every_n_train_steps: Optimiser steps between two checkpoints.
    """

    def __init__(self, every_n_train_steps: int = 1000) -> None:
        super().__init__(
            filename=self.CHECKPOINT_NAME_LAST, every_n_train_steps=every_n_train_steps, enable_version_counter=False
        )

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if trainer.global_step % self._every_n_train_steps:
            trainer.save_checkpoint(Path(self.dirpath) / f"{self.filename}{self.FILE_EXTENSION}")

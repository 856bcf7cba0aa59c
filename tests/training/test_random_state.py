"""What others draw during a training does not change the random numbers of the training."""

import random
from pathlib import Path
from typing import Any

import numpy as np
import torch
from pytorch_lightning import Callback, Trainer, seed_everything
from torch import Tensor

from kerple.training.random_state import RandomState
from tests.analyses.line import Line, fit


class Draws(Callback):
    """Draws random numbers between the batches, as a validation may."""

    def on_train_batch_end(self, trainer: Trainer, *_: Any) -> None:
        torch.rand(trainer.global_step)
        random.random()
        np.random.rand()  # noqa: NPY002


class Noise(Line):
    def training_step(self, batch: dict[str, Tensor], index: int) -> Tensor:
        self.seen += torch.rand(()).item(), random.random(), np.random.rand()  # noqa: NPY002
        return self.weight**2


def test_what_others_draw_between_batches_does_not_move_training(tmp_path: Path) -> None:
    alone, disturbed = Noise(), Noise()
    for model, others in ((alone, []), (disturbed, [Draws()])):
        seed_everything(5, verbose=False)
        fit(tmp_path / str(len(others)), model, RandomState(), *others)
    assert alone.seen == disturbed.seen
    assert len(set(alone.seen)) == 3 * 12

"""What others draw during a training does not change the random numbers of the training."""

import random
from pathlib import Path
from typing import Any

import numpy as np
import torch
from pytorch_lightning import Callback, Trainer
from torch import Tensor

from kerple.training.random_state import RandomState, capture, restore
from tests.analyses.line import Line, fit


class Draws(Callback):
    """Draws random numbers between the batches, as a validation may."""

    def on_train_batch_end(self, trainer: Trainer, *_: Any) -> None:
        torch.rand(trainer.global_step)


class Noise(Line):
    def training_step(self, batch: dict[str, Tensor], index: int) -> Tensor:
        self.seen.append(torch.rand(()).item())
        return self.weight**2


def test_what_others_draw_between_batches_does_not_move_training(tmp_path: Path) -> None:
    alone, disturbed = Noise(), Noise()
    for model, others in ((alone, []), (disturbed, [Draws()])):
        torch.manual_seed(5)
        fit(tmp_path / str(len(others)), model, RandomState(), *others)
    assert alone.seen == disturbed.seen
    assert len(set(alone.seen)) == 12


def test_the_state_has_every_generator() -> None:
    state = capture(torch.device("cpu"))
    first = (torch.rand(3).tolist(), random.random(), np.random.rand())  # noqa: NPY002
    restore(state, torch.device("cpu"))
    assert first == (torch.rand(3).tolist(), random.random(), np.random.rand())  # noqa: NPY002

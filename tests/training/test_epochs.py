"""A fit that is stopped at the end of an epoch continues with the samples and steps of an uninterrupted fit."""

from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch
from pytorch_lightning import Callback, LightningModule
from pytorch_lightning.callbacks import ModelCheckpoint
from torch import Tensor

from kerple.base.run_folder import LAST
from kerple.tasks import Parity, TaskData
from kerple.training.last_checkpoint import LastCheckpoint
from tests.toy import trainer

Steps = dict[int, tuple[int, list[Any]]]  # epoch and micro-batches of each step


class Stop(BaseException):
    """Ends a fit as SIGKILL does: no hook of a callback is called."""


class Seen(LightningModule):
    """Adds the micro-batches of each step to ``steps``, and stops before micro-batch number ``stop``."""

    def __init__(self, steps: Steps, stop: int | None) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.tensor(1.0))
        self.steps, self.stop, self.parts = steps, stop, list[Any]()
        self.micro_batches = 0

    def training_step(self, batch: dict[str, Tensor], index: int) -> Tensor:
        if self.micro_batches == self.stop:
            raise Stop
        self.micro_batches += 1
        self.parts.append(batch["tokens"].tolist())
        return self.weight

    def on_before_optimizer_step(self, _: Any) -> None:
        self.steps[self.trainer.global_step] = (self.trainer.current_epoch, self.parts)
        self.parts = []

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), 0.1)


def run(
    folder: Path,
    options: dict[str, Any],
    steps: Steps,
    stop: int | None = None,
    path: Path | None = None,
    *callbacks: Callback,
) -> None:
    data = TaskData(Parity(), 16, 12, batch_size=2, examples=20, seed=1)  # 10 micro-batches in an epoch
    fit = trainer(folder, LastCheckpoint(every_n_train_steps=1), *callbacks, limit_val_batches=0, **options)
    with suppress(Stop):
        fit.fit(Seen(steps, stop), data, ckpt_path=path, weights_only=False)


@pytest.mark.parametrize(
    ("options", "stops"),
    [
        ({"max_epochs": 3, "limit_train_batches": 7, "accumulate_grad_batches": 2}, [8]),
        ({"max_epochs": 3, "limit_train_batches": 0.7}, [7]),
        ({"max_epochs": 3}, [10, 4]),  # the second stop is in the next epoch
    ],
)
def test_a_fit_stopped_at_the_end_of_an_epoch_continues(
    options: dict[str, Any], stops: list[int], tmp_path: Path
) -> None:
    whole, parts = Steps(), Steps()
    run(tmp_path / "whole", options, whole)
    for number, stop in enumerate([*stops, None]):
        run(tmp_path / "parts", options, parts, stop, tmp_path / "parts" / LAST if number else None)
    assert parts == whole


@pytest.mark.parametrize("options", [{}, {"max_steps": 16, "limit_train_batches": 7, "accumulate_grad_batches": 2}])
def test_a_finished_fit_continues_with_whole_epochs(options: dict[str, Any], tmp_path: Path) -> None:
    whole, parts = Steps(), Steps()
    run(tmp_path / "whole", options | {"max_epochs": 4}, whole)
    run(tmp_path / "parts", options | {"max_epochs": 2}, parts)
    run(tmp_path / "parts", options | {"max_epochs": 4}, parts, None, tmp_path / "parts" / LAST)
    assert parts == whole


@pytest.mark.parametrize(
    "options", [{"max_steps": 12, "limit_train_batches": 10, "accumulate_grad_batches": 4}, {"max_epochs": 4}]
)
def test_a_fit_continues_from_a_checkpoint_at_the_end_of_an_epoch(options: dict[str, Any], tmp_path: Path) -> None:
    whole, rest = Steps(), Steps()
    each = ModelCheckpoint(tmp_path, "{epoch}", save_top_k=-1, save_on_train_epoch_end=True)
    run(tmp_path / "whole", options, whole, None, None, each)
    run(tmp_path / "rest", options, rest, None, tmp_path / "epoch=1.ckpt")
    assert rest == {step: parts for step, parts in whole.items() if parts[0] > 1}

"""When `last.ckpt` is written; what a resumed run makes of it is `tests/test_resume.py`'s affair."""

import signal
from pathlib import Path

import pytest
import torch
from pytorch_lightning import LightningModule, Trainer

import kerple.training.last_checkpoint as last_checkpoint
from kerple.training.last_checkpoint import LastCheckpoint
from tests.analyses.line import Line
from tests.toy import ToyData


class Clock:
    """Minutes that pass only where the test says so."""

    seconds = 1000.0

    def monotonic(self) -> float:
        return self.seconds


class Slow(Line):
    """A step takes a minute."""

    def __init__(self, clock: Clock) -> None:
        super().__init__(-1, "loss")
        self.clock = clock

    def on_train_batch_end(self, *_: object) -> None:
        self.clock.seconds += 60


class Recorded(LastCheckpoint):
    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        super().setup(trainer, pl_module, stage)
        self.steps: list[int] = []

    def save(self, trainer: Trainer) -> None:
        super().save(trainer)
        self.steps.append(trainer.global_step)
        self.heard = {signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGUSR1)}


@pytest.mark.parametrize(
    ("options", "steps"),
    [
        ({"every_minutes": 2.5}, [4, 7, 10]),  # a callback's turn is before the module's: a minute is seen late
        ({"every_minutes": None, "every_n_train_steps": 4}, [4, 8, 10]),
        ({"every_minutes": 4, "every_n_train_steps": 3}, [3, 6, 9, 10]),
        ({}, [10]),
    ],
)
def test_it_is_written_by_minutes_by_steps_and_at_the_end(options, steps, tmp_path: Path, monkeypatch) -> None:
    clock, callback = Clock(), Recorded(**options)
    monkeypatch.setattr(last_checkpoint, "time", clock)
    trainer = Trainer(
        default_root_dir=tmp_path, accelerator="cpu", max_steps=10, logger=False, enable_progress_bar=False,
        enable_model_summary=False, limit_val_batches=0, callbacks=[callback],
    )  # fmt: skip
    trainer.fit(Slow(clock), ToyData())
    assert callback.steps == steps
    assert callback.heard == {callback._signals._note}  # what comes during the last save ends nothing
    assert torch.load(tmp_path / "checkpoints" / "last.ckpt", weights_only=True)["global_step"] == 10

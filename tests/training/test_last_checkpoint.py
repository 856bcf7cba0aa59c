"""When `last.ckpt` is written; what a resumed run makes of it is `tests/test_resume.py`'s affair."""

import signal
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from pytorch_lightning import Trainer

import kerple.training.last_checkpoint as last_checkpoint
from kerple.training.last_checkpoint import LastCheckpoint
from tests.analyses.line import Line
from tests.toy import ToyData, trainer


class Recorded(LastCheckpoint):
    def save(self, trainer: Trainer) -> None:
        super().save(trainer)
        self.steps = [*getattr(self, "steps", []), trainer.global_step]
        self.handlers = {signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGUSR1)}


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
    minutes = [1000.0]  # that pass only with a step
    monkeypatch.setattr(last_checkpoint, "time", SimpleNamespace(monotonic=lambda: 60 * minutes[0]))

    class Slow(Line):
        def on_train_batch_end(self, *_: object) -> None:
            minutes[0] += 1

    callback = Recorded(**options)
    trainer(tmp_path, callback, max_steps=10, limit_val_batches=0).fit(Slow(), ToyData())
    assert callback.steps == steps
    assert callback.handlers == {callback._signals._note}  # what comes during the last save ends nothing
    assert torch.load(tmp_path / "checkpoints" / "last.ckpt", weights_only=True)["global_step"] == 10

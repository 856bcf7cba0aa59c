"""The progress bar asks for the loss as a number no more often than it is logged."""

from pathlib import Path

from pytorch_lightning import Trainer

from kerple.training.progress_bar import SteadyProgress
from tests.analyses.line import Line
from tests.toy import ToyData


def test_numbers_are_asked_for_every_few_steps(tmp_path: Path) -> None:
    class Counted(SteadyProgress):
        asked = 0

        def get_metrics(self, *arguments):
            self.asked += 1
            return super().get_metrics(*arguments)

    bar = Counted()
    trainer = Trainer(
        default_root_dir=tmp_path, accelerator="cpu", max_steps=20, logger=False, limit_val_batches=0,
        log_every_n_steps=5, enable_model_summary=False, enable_checkpointing=False, callbacks=[bar],
    )  # fmt: skip
    trainer.fit(Line(-1, "loss"), ToyData())
    assert 4 <= bar.asked <= 6  # of 20 steps; at the end of an epoch once more

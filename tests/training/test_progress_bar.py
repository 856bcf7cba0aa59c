"""The progress bar asks for the loss as a number no more often than it is logged."""

from pathlib import Path

from kerple.training.progress_bar import SteadyProgress
from tests.analyses.line import Line
from tests.toy import ToyData, trainer


def test_numbers_are_asked_for_every_few_steps(tmp_path: Path) -> None:
    class Counted(SteadyProgress):
        calls = 0

        def get_metrics(self, *arguments):
            self.calls += 1
            return super().get_metrics(*arguments)

    bar, options = Counted(), {"enable_progress_bar": True, "enable_checkpointing": False, "limit_val_batches": 0}
    trainer(tmp_path, bar, max_steps=20, log_every_n_steps=5, **options).fit(Line(), ToyData())
    assert 4 <= bar.calls <= 6  # of 20 steps; at the end of an epoch once more

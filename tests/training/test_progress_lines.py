"""Progress of a run, in lines and in a file."""

import os
import signal
from itertools import product
from pathlib import Path

import pytest
from jsonargparse import Namespace
from pytorch_lightning.callbacks import LearningRateMonitor, ModelCheckpoint

from kerple.base.atomic import read_json
from kerple.base.run_progress import FILE
from kerple.training.progress_lines import ProgressLines, with_progress
from kerple.training.required_callbacks import callback_options
from kerple.training.throughput import Throughput
from tests.toy import Line, ToyData, trainer

NAMES = ("logger", "fast_dev_run", "enable_progress_bar", "enable_checkpointing", "log_every_n_steps")
OPTIONS = dict.fromkeys(NAMES)  # of a Trainer


def test_progress_of_fits_and_measurements_is_printed_and_written(tmp_path: Path, capsys) -> None:
    states, blocks, stopped = [], [], False

    class Read(Line):
        def on_train_batch_start(self, batch: object, index: int) -> None:
            states.append(read_json(tmp_path / FILE))

        def training_step(self, batch: object, index: int) -> object:
            self.log("train/loss", 3 * self.weight**2)  # this loss is shown, not the returned one
            return super().training_step(batch, index)

        def test_step(self, batch: object, index: int) -> None: ...

        def on_test_epoch_end(self) -> None:
            for number in with_progress(self.trainer, range(3 + stopped)):
                blocks.append(read_json(tmp_path / FILE))
                if number == 2 and stopped:
                    os.kill(os.getpid(), signal.SIGTERM)

    options, model = {"max_steps": 4, "enable_checkpointing": False, "limit_val_batches": 0}, Read()
    trainer(tmp_path, ProgressLines(every=0.0, file_every=0.0), **options).fit(model, ToyData())
    assert [state.get("done") for state in states] == [None, 1, 2, 3]
    last = read_json(tmp_path / FILE)
    assert (last["stage"], last["done"], last["total"], last["seconds_left"]) == ("training", 4, 4, 0)
    for state, weight in zip([*states[1:], last], model.seen, strict=True):
        assert state["loss"] == pytest.approx(3 * weight**2)
        assert state["seconds_left"] == pytest.approx(state["seconds"] / state["done"] * (4 - state["done"]))
    # 4 rows of 8 targets a step
    assert last["tokens_per_second"] == pytest.approx(4 * 4 * 8 / last["seconds"])
    assert capsys.readouterr().out.count("training, step") == 4

    trainer(tmp_path, ProgressLines(every=60, file_every=0.0), limit_test_batches=2).test(model, ToyData())
    blocks.append(read_json(tmp_path / FILE))
    assert [(state["done"], state["total"]) for state in blocks[1:]] == [(1, 3), (2, 3), (3, 3)]
    stopped = True
    with pytest.raises(SystemExit, match="143"):
        trainer(tmp_path, ProgressLines(file_every=0.0), limit_test_batches=2).test(model, ToyData())
    assert read_json(tmp_path / FILE)["done"] == 3


@pytest.mark.parametrize("command", ["fit", "test"])
def test_progress_lines_of_the_user_are_the_only_ones(command: str) -> None:
    mine = ProgressLines(every=60)
    callbacks = callback_options(command, Namespace(**OPTIONS | {"callbacks": [mine]}))["callbacks"]
    assert [callback for callback in callbacks if isinstance(callback, ProgressLines)] == [mine]


def test_callbacks_that_only_log_or_save_are_left_out_without_a_logger_or_in_a_fast_dev_run() -> None:
    for logger, fast in product((False, None), (False, True)):
        callbacks = [LearningRateMonitor(), ModelCheckpoint(), Throughput()]
        given = Namespace(**OPTIONS | {"callbacks": callbacks, "logger": logger, "fast_dev_run": fast})
        kinds = [type(callback) for callback in callback_options("fit", given)["callbacks"]]
        found = [kind in kinds for kind in (LearningRateMonitor, ModelCheckpoint, Throughput)]
        assert found == [logger is None, not fast, True]

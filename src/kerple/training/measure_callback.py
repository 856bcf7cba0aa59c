"""`MeasureCallback`: makes a measurement in `test` and after each validation of a Lightning Trainer."""

from functools import partial
from typing import Any

from pytorch_lightning import Callback, LightningModule, Trainer

from kerple.base.errors import require
from kerple.measure.measure import Measure, check_names
from kerple.measure.result import Result
from kerple.measure.runner import Runner
from kerple.training.progress_lines import with_progress
from kerple.training.trainer_access import (
    log_directory,
    network_of,
    refuse_shards,
    tensorboard_writers,
    untyped,
)


class MeasureCallback(Callback):
    """Makes a measurement in `test` and after each validation, and logs its scalars as ``test/…`` and ``val/…``.

    A measurement whose property ``validates`` is False is made only in `test`. The callback measures on the text that
    the method ``text(split)`` of the data module returns. TensorBoard shows figures as ``analyses/<name>``.

    Args:
        measure: The measurement.

    Raises:
        UserError: In `setup`, if the network or the data does not suit the measurement, another measurement writes the
            same files, or a fit with sharded parameters makes the measurement after validations. Also if
            ``trainer.limit_test_batches`` is set, because it has no effect on measurements.
    """

    def __init__(self, measure: Measure) -> None:
        self.measure = measure

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        kind = type(self.measure).__name__
        check_names([c.measure for c in untyped(trainer).callbacks if isinstance(c, MeasureCallback)])
        if stage == "test":
            given = f"{trainer.limit_test_batches}, which has no effect on {kind}"
            no_limit = str(trainer.limit_test_batches) == "1.0"  # the integer 1 is one batch
            require(no_limit, "trainer.limit_test_batches", given, f"no limit; use the options of {kind}")
            self.measure.check(network_of(pl_module), self.text(trainer, "test"))
        elif self.measure.validates:
            if stage == "fit":
                refuse_shards(trainer, kind, "set its validation_blocks to 0, or leave it out of the fit")
            self.measure.check_validation(self.text(trainer, "validation"))

    def on_validation_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if not self.measure.validates or trainer.sanity_checking:
            return
        text = self.text(trainer, "validation")
        scalars = self.measure.validate(network_of(pl_module), text, runner(trainer, pl_module))
        pl_module.log_dict({f"val/{name}": value for name, value in scalars.items()}, sync_dist=True)

    def on_test_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        result = self.measure.run(network_of(pl_module), self.text(trainer, "test"), runner(trainer, pl_module))
        pl_module.log_dict({f"test/{name}": value for name, value in result.scalars.items()}, sync_dist=True)
        publish(result, trainer)

    def text(self, trainer: Trainer, split: str) -> Any:
        """Return the text of a split, or the examples of a task.

        Raises:
            UserError: If the data module has no method ``text``.
        """
        data, kind = untyped(trainer).datamodule, type(self.measure).__name__
        expected = f"TokenShards, TaskData or another data module with a method `text` for {kind}; or leave {kind} out"
        require(hasattr(data, "text"), "data", type(data).__name__, expected)
        return data.text(split)


def runner(trainer: Trainer, pl_module: LightningModule) -> Runner:
    """Return a `Runner` with the device, the precision and the processes of a Trainer."""
    context = trainer.precision_plugin.forward_context
    progress = partial(with_progress, trainer)
    precision, rank, processes = str(trainer.precision), trainer.global_rank, trainer.world_size
    return Runner(pl_module.device, context, precision, rank, processes, progress)


def publish(result: Result, trainer: Trainer) -> None:
    """Write a result into the log directory, log its figures, and print its report. Call it on every rank."""
    directory = log_directory(trainer)
    if trainer.is_global_zero:
        result.publish(directory, tensorboard_writers(trainer), trainer.global_step)

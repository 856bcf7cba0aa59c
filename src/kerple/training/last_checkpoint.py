"""`LastCheckpoint`: the checkpoint from which a run resumes."""

import math
import signal
import time
from pathlib import Path
from typing import Any

from pytorch_lightning import LightningModule, Trainer
from pytorch_lightning.callbacks import (
    Checkpoint,
    GradientAccumulationScheduler,
    ModelCheckpoint,
    StochasticWeightAveraging,
)
from pytorch_lightning.trainer.states import TrainerFn
from pytorch_lightning.utilities.rank_zero import rank_zero_info
from torch import Tensor

from kerple.base.errors import UserError, require
from kerple.base.run_folder import LAST
from kerple.data.remote_shards import UnreachableShards
from kerple.training.signals import Signals, requeue
from kerple.training.trainer_access import (
    accumulation_option,
    averaging,
    begin_next_epoch,
    copied_weights,
    inside_step,
    log_directory,
    log_step,
    restore_loader,
    set_unused_averages,
    untyped,
    use_epoch_averages,
    validation_ahead,
)

# Lightning's callbacks that set up an epoch when it starts. Lightning does not call them if it resumes inside an epoch.
AT_EPOCH_START = (GradientAccumulationScheduler, StochasticWeightAveraging)
ACCUMULATION, INSIDE_STEP, TRAINED = "accumulate_grad_batches", "inside_step", "weights_before_the_mean"


class LastCheckpoint(Checkpoint):
    """Writes ``checkpoints/last.ckpt`` at intervals, after the last step, and after a signal to stop.

    The checkpoint is written only between optimiser steps, because it does not contain accumulated gradients. If the
    checkpoint is written just before a validation, a resumed run starts with this validation. Lightning would skip it.

    After SIGINT (Ctrl-C), SIGTERM or SIGHUP (end of the terminal), the run finishes the optimiser step, saves, and ends
    with status 130, 143 or 129. After SIGUSR1 it also requeues its SLURM job, and ends with status 138. A signal during
    a validation takes effect after the validation and one step. Signals after the last step have no effect, because the
    run saves and ends anyway. A second Ctrl-C ends the process at once. A run of one process also saves before it ends
    because the next batch cannot be read from its URL.

    Args:
        every_n_train_steps: Number of optimiser steps between two checkpoints; null for no interval in steps.
        every_minutes: Minutes between two checkpoints by the clock of the first process; null for no interval in
            minutes. A crash loses at most this time of training. An interval in minutes limits the fraction of time
            for writing, even if steps are fast. A checkpoint of 162M parameters and the optimiser's moments has 2 GB.

    Raises:
        UserError: If a number is not positive, or both are null; in a fit, if a ModelCheckpoint writes the same file.
    """

    def __init__(self, every_n_train_steps: int | None = None, every_minutes: float | None = 10.0) -> None:
        super().__init__()
        numbers = [number for number in (every_n_train_steps, every_minutes) if number is not None]
        given = f"every_n_train_steps={every_n_train_steps} and every_minutes={every_minutes}"
        expected = "positive numbers or null, and not null for both"
        require(bool(numbers) and min(numbers) > 0, "LastCheckpoint", given, expected)
        self.every_n_train_steps, self.every_minutes = every_n_train_steps, every_minutes
        self.path: Path | None = None
        self._between_batches = False  # whether the checkpoint is saved because the next batch cannot be read
        self._stop = False  # whether another callback ends the fit after this step
        self._weights: dict[str, Tensor] | None = None  # at the end of the fit, before averages replace them
        self._trained: dict[str, Tensor] | None = None  # before the mean over epochs replaces them
        self._saved_step, self._saved_at = math.inf, time.monotonic()
        self._signals = Signals()

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        if stage == TrainerFn.FITTING:
            self.path, self._trained = log_directory(trainer) / LAST, None
            self._saved_step = math.inf  # before the training starts, the state of the loader is not restored

    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        for callback in untyped(trainer).checkpoint_callbacks:
            if isinstance(callback, ModelCheckpoint) and callback.save_last:
                last = Path(str(callback.dirpath), f"{callback.CHECKPOINT_NAME_LAST}{callback.FILE_EXTENSION}")
                expected = f"null, because LastCheckpoint writes {self.path}; or another dirpath"
                option = "trainer.callbacks: ModelCheckpoint: save_last"
                require(last != self.path, option, callback.save_last, expected)

    def on_sanity_check_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._signals.install()

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._saved_step, self._saved_at, self._stop = trainer.global_step, time.monotonic(), False
        restore_loader(trainer)
        begin_next_epoch(trainer)
        self._signals.install()
        self._signals.connect(trainer)
        if trainer.fit_loop.restarted_mid_epoch:
            groups = [group for optimizer in trainer.optimizers for group in optimizer.param_groups]
            options = [{**group} for group in groups]
            for callback in untyped(trainer).callbacks:
                if isinstance(callback, AT_EPOCH_START):
                    callback.on_train_epoch_start(trainer, pl_module)
            for group, before in zip(groups, options, strict=True):  # a new schedule has changed the learning rate
                group.update(before)

    def on_train_batch_end(self, trainer: Trainer, *_: Any) -> None:
        self._stop_between_steps(trainer)
        is_last_step = 0 < trainer.max_steps <= trainer.global_step  # `on_train_end` saves after this step
        if is_last_step or inside_step(trainer):
            return
        every = self.every_n_train_steps
        due = self._obey_signals(trainer) or (every is not None and trainer.global_step % every == 0)
        if due and trainer.global_step != self._saved_step:
            self.save(trainer)

    def on_validation_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if trainer.state.fn == TrainerFn.FITTING:
            set_unused_averages(trainer, pl_module)

    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._stop_between_steps(trainer)

    def on_train_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        set_unused_averages(trainer, pl_module)
        if averaging(trainer):
            self._weights = copied_weights(pl_module)

    def on_train_epoch_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._weights = None

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._trained = use_epoch_averages(trainer, pl_module)
        self.save(trainer)
        self._weights = None
        self._signals.restore()

    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        self._signals.restore()
        if not isinstance(exception, UnreachableShards) or trainer.world_size > 1:
            return  # with several processes, the others wait inside their next step, and cannot save
        reads_batches = trainer.training or (trainer.validating and trainer.state.fn == TrainerFn.FITTING)
        if reads_batches and trainer.global_step > self._saved_step and not inside_step(trainer):
            self._between_batches = True
            for callback in averaging(trainer) if trainer.validating else ():
                callback.on_validation_epoch_end(trainer, pl_module)  # which ends the use of averages as weights
            self.save(trainer)

    def on_save_checkpoint(self, trainer: Trainer, pl_module: LightningModule, checkpoint: dict[str, Any]) -> None:
        set_unused_averages(trainer, pl_module)  # in checkpoints of all callbacks; the tensors are those of the average
        checkpoint[ACCUMULATION] = accumulation_option(trainer)
        if "current_model_state" in checkpoint and self._weights is not None:
            checkpoint["current_model_state"] = self._weights
        if self._trained is not None:
            checkpoint[TRAINED] = self._trained
        checkpoint[INSIDE_STEP] = trainer.state.fn == TrainerFn.FITTING and inside_step(trainer)
        if self._between_batches and trainer.training:
            _repeat_batch_end(checkpoint["loops"]["fit_loop"])
        if validation_ahead(trainer) or (self._between_batches and trainer.validating):
            _expect_validation(checkpoint["loops"]["fit_loop"])

    def on_load_checkpoint(self, trainer: Trainer, pl_module: LightningModule, checkpoint: dict[str, Any]) -> None:
        if checkpoint.get(INSIDE_STEP) and trainer.state.fn == TrainerFn.FITTING:
            given = "got a checkpoint that was saved inside an optimiser step, without the accumulated gradients"
            raise UserError(f"ckpt_path: {given}; continue from {LAST}, or start a new fit with --weights")
        averaged = "current_model_state" in checkpoint and trainer.state.fn == TrainerFn.FITTING
        if averaged and not averaging(trainer):
            expected = "one, because the fit averaged its weights, and its checkpoint has the averages as weights"
            raise UserError(f"trainer.callbacks: got no WeightAveraging, expected {expected}")
        if trainer.state.fn == TrainerFn.FITTING and TRAINED in checkpoint:
            pl_module.load_state_dict(checkpoint[TRAINED])
        if trainer.state.fn == TrainerFn.FITTING and "loops" in checkpoint:
            _end_epoch(checkpoint["loops"]["fit_loop"])
        before, now = checkpoint.get(ACCUMULATION), trainer.accumulate_grad_batches
        # Lightning's loops count micro-batches, so the counts change with the number of micro-batches per step
        if before is not None and before != now:
            for counts in ("total", "current"):
                progress = checkpoint["loops"]["fit_loop"]["epoch_loop.batch_progress"][counts]
                incomplete = progress["processed"] - progress["completed"]
                count = progress["processed"] // before * now
                progress.update(ready=count, started=count, processed=count, completed=count - incomplete)

    def save(self, trainer: Trainer) -> None:
        """Write the checkpoint. Call it on every rank, between optimiser steps."""
        if untyped(trainer).fast_dev_run:
            return
        assert self.path is not None
        trainer.save_checkpoint(self.path)
        self._saved_step, self._saved_at = trainer.global_step, time.monotonic()

    def _stop_between_steps(self, trainer: Trainer) -> None:
        """If a callback such as Timer has stopped the fit inside a step, let it end after the step."""
        if trainer.state.fn == TrainerFn.FITTING:
            self._stop |= trainer.should_stop
            trainer.should_stop = self._stop and not inside_step(trainer)

    def _obey_signals(self, trainer: Trainer) -> bool:
        """Save and end the process if a signal has arrived. If not, return whether ``every_minutes`` have passed."""
        late = self.every_minutes is not None and time.monotonic() - self._saved_at >= 60 * self.every_minutes
        number, due = self._signals.synchronise(trainer, late and trainer.is_global_zero)
        if not number:
            return due
        rank_zero_info(f"{signal.Signals(number).name} at step {trainer.global_step}: saving {self.path}")
        log_step(trainer)
        self.save(trainer)
        if number == signal.SIGUSR1 and trainer.is_global_zero:
            requeue()
        # Lightning's launcher kills the first process if another process ends with a code other than 0
        environment = getattr(trainer.strategy, "cluster_environment", None)
        by_launcher = environment is not None and not environment.creates_processes_externally
        raise SystemExit(0 if by_launcher and not trainer.is_global_zero else 128 + number)


def _repeat_batch_end(loops: dict[str, Any]) -> None:
    """Set the counters in a checkpoint as in `on_train_batch_end`, where all other checkpoints are written."""
    for counts in ("total", "current"):
        progress = loops["epoch_loop.batch_progress"][counts]
        progress["completed"] = progress["processed"] - 1
    loops["epoch_loop.state_dict"]["_batches_that_stepped"] -= 1


def _end_epoch(loops: dict[str, Any]) -> None:
    """Set the counters in a checkpoint that was saved in on_train_epoch_end as after the epoch.

    Lightning would begin with the rest of this epoch, which has no batches, or with a step of its last batches.
    """
    epochs = loops["epoch_progress"]
    if epochs["current"]["completed"] < epochs["current"]["processed"]:
        for counts in ("total", "current"):
            epochs[counts]["completed"] = epochs[counts]["processed"]
        loops["epoch_loop.batch_progress"]["current"].update(ready=0, started=0, processed=0, completed=0)
        loops["epoch_loop.batch_progress"]["is_last_batch"] = False


def _expect_validation(loops: dict[str, Any]) -> None:
    """Set the counters in a checkpoint as if a validation was interrupted in its first batch.

    A resumed run then begins with this validation.
    """
    for counts in ("total", "current"):
        progress = loops["epoch_loop.batch_progress"][counts]
        progress["completed"] = progress["processed"]
    none = {"ready": 0, "started": 0, "processed": 0, "completed": 0}
    begun = none | {"ready": 1, "started": 1}
    loops["epoch_loop.val_loop.batch_progress"].update(total=begun, current=none, is_last_batch=False)

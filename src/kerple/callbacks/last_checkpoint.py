"""The checkpoint a stopped run resumes from."""

import time
from pathlib import Path
from typing import Any, NoReturn

from pytorch_lightning import LightningModule, Trainer
from pytorch_lightning.callbacks import Checkpoint
from pytorch_lightning.trainer.states import TrainerFn
from pytorch_lightning.utilities.rank_zero import rank_zero_info

from kerple.errors import UserError
from kerple.runs.signals import STOPPING, Signals, requeue

ACCUMULATION = "accumulate_grad_batches"


class LastCheckpoint(Checkpoint):
    """Keeps ``checkpoints/last.ckpt``: every so often, after the last step, and when a signal asks the run to stop.

    It is written between optimiser steps only, because gradients half accumulated are in no checkpoint. One written
    before or in a validation has the resumed run do that validation from its beginning (Lightning would skip it).

    SIGTERM saves and ends the process with 143. SIGUSR1 saves, requeues the job under SLURM and ends with 138. Between
    the last step and the end of the run both are ignored: it is about to save and end by itself.

    Args:
        every_n_train_steps: Optimiser steps between two checkpoints; null counts none.
        every_minutes: Minutes from one checkpoint to the next, by the first process's clock: what a crash can cost.
            A fast run that saves by steps spends its time on writing (162M parameters are 2 GB with their moments).

    Raises:
        UserError: If a number is not positive, or both are null.
    """

    def __init__(self, every_n_train_steps: int | None = None, every_minutes: float | None = 10.0) -> None:
        super().__init__()
        for name, number in (("every_n_train_steps", every_n_train_steps), ("every_minutes", every_minutes)):
            if number is not None and not number > 0:
                raise UserError(f"{name}: got {number}, expected a positive number, or null")
        if every_n_train_steps is None and every_minutes is None:
            raise UserError("every_n_train_steps, every_minutes: got null for both, expected one of them")
        self.every_n_train_steps, self.every_minutes = every_n_train_steps, every_minutes
        self._saved_at = 0.0  # seconds, of the monotonic clock
        self.path: Path | None = None
        self._saved_step = -1
        self._interrupts_validation = False
        self._signals = Signals()

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        if stage == TrainerFn.FITTING:
            directory = trainer.strategy.broadcast(trainer.log_dir or trainer.default_root_dir)
            self.path = Path(directory) / "checkpoints" / "last.ckpt"

    def on_sanity_check_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._signals.install()

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._saved_step, self._saved_at = trainer.global_step, time.monotonic()
        self._signals.install()
        self._signals.connect(trainer)
        if number := self._signals.agreed(trainer)[0]:
            rank_zero_info(f"{_name(number)} before the first step: there is nothing to save")
            self._leave(trainer, number)

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        if not _between_steps(trainer) or _last_step_done(trainer):
            return
        due = self._obey_signals(trainer)
        every = self.every_n_train_steps
        due = due or (every is not None and trainer.global_step % every == 0)
        if due and trainer.global_step != self._saved_step:
            self.save(trainer)

    def on_validation_batch_end(
        self,
        trainer: Trainer,
        pl_module: LightningModule,
        outputs: Any,
        batch: Any,
        batch_idx: int,
        dataloader_idx: int = 0,
    ) -> None:
        fitting = trainer.state.fn == TrainerFn.FITTING and not trainer.sanity_checking
        if fitting and _between_steps(trainer) and not _last_step_done(trainer):
            self._interrupts_validation = True
            self._obey_signals(trainer)
            self._interrupts_validation = False

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._signals.restore()
        self.save(trainer)

    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        self._signals.restore()

    def on_save_checkpoint(self, trainer: Trainer, pl_module: LightningModule, checkpoint: dict[str, Any]) -> None:
        checkpoint[ACCUMULATION] = trainer.accumulate_grad_batches
        if self._validation_ahead(trainer):
            _expect_validation(checkpoint["loops"]["fit_loop"])

    def on_load_checkpoint(self, trainer: Trainer, pl_module: LightningModule, checkpoint: dict[str, Any]) -> None:
        before, now = checkpoint.get(ACCUMULATION), trainer.accumulate_grad_batches
        if before is not None and before != now:  # the loops count micro-batches; a step has to begin with the first
            for counts in ("total", "current"):
                progress = checkpoint["loops"]["fit_loop"]["epoch_loop.batch_progress"][counts]
                lag = progress["processed"] - progress["completed"]
                done = progress["processed"] // before * now
                progress.update(ready=done, started=done, processed=done, completed=done - lag)

    def save(self, trainer: Trainer) -> None:
        """Write the checkpoint; to be called on every rank, between steps."""
        if trainer.fast_dev_run:
            return
        assert self.path is not None
        trainer.save_checkpoint(self.path)
        self._saved_step, self._saved_at = trainer.global_step, time.monotonic()

    def _obey_signals(self, trainer: Trainer) -> bool:
        """Save and end if a signal asks for it; otherwise whether the first process finds a checkpoint due."""
        late = self.every_minutes is not None and time.monotonic() - self._saved_at >= 60 * self.every_minutes
        number, due = self._signals.agreed(trainer, late and trainer.is_global_zero)
        if not number:
            return due
        rank_zero_info(f"{_name(number)} at step {trainer.global_step}: saving {self.path}")
        self.save(trainer)
        self._leave(trainer, number)

    def _leave(self, trainer: Trainer, number: int) -> NoReturn:
        if _name(number) == "SIGUSR1" and trainer.is_global_zero:
            requeue()
        # Lightning's launcher kills the first process when another one that it started ends with anything but 0
        launched = not trainer.is_global_zero and not _started_from_outside(trainer)
        raise SystemExit(0 if launched else 128 + number)

    def _validation_ahead(self, trainer: Trainer) -> bool:
        """Whether a checkpoint taken now lies between a batch and the end of the validation due after it."""
        if trainer.validating:  # best.ckpt comes when all of it is done
            return self._interrupts_validation
        loop = trainer.fit_loop.epoch_loop
        progress = loop.batch_progress.total
        if progress.completed == progress.processed:  # not in on_train_batch_end
            return False
        return loop._should_check_val_fx(trainer.fit_loop._data_fetcher)


def _expect_validation(loops: dict[str, Any]) -> None:
    """Make the saved counters those of a validation that was interrupted before its first batch ended."""
    for counts in ("total", "current"):
        progress = loops["epoch_loop.batch_progress"][counts]
        progress["completed"] = progress["processed"]
    none = {"ready": 0, "started": 0, "processed": 0, "completed": 0}
    loops["epoch_loop.val_loop.batch_progress"].update(
        total={**none, "ready": 1, "started": 1}, current=none, is_last_batch=False
    )


def _between_steps(trainer: Trainer) -> bool:
    return not trainer.fit_loop._should_accumulate()


def _last_step_done(trainer: Trainer) -> bool:
    return 0 < trainer.max_steps <= trainer.global_step


def _started_from_outside(trainer: Trainer) -> bool:
    environment = getattr(trainer.strategy, "cluster_environment", None)
    return environment is None or environment.creates_processes_externally


def _name(number: int) -> str:
    return next(s.name for s in STOPPING if s == number)

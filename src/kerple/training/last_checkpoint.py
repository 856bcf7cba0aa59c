"""`LastCheckpoint`: the checkpoint from which a run resumes."""

import signal
import time
from pathlib import Path
from typing import Any, NoReturn

from pytorch_lightning import LightningModule, Trainer
from pytorch_lightning.callbacks import Checkpoint
from pytorch_lightning.trainer.states import TrainerFn
from pytorch_lightning.utilities.rank_zero import rank_zero_info

from kerple.base.directories import LAST
from kerple.base.errors import UserError
from kerple.training.lightning_types import untyped
from kerple.training.signals import Signals, requeue

ACCUMULATION = "accumulate_grad_batches"


class LastCheckpoint(Checkpoint):
    """Writes ``checkpoints/last.ckpt`` at intervals, after the last step, and after a signal to stop.

    It is written only between optimiser steps, because a checkpoint has no accumulated gradients. If it is written just
    before a validation, the resumed run makes that validation, which Lightning would skip.

    Signals to stop are SIGINT (Ctrl-C), SIGTERM and SIGHUP (end of the terminal). The run saves and ends with the code
    130, 143 or 129. After SIGUSR1 it saves, requeues its SLURM job and ends with 138. The run stops after an optimiser
    step. A signal during a validation takes effect after the validation and one step. After the last step, signals are
    ignored, because the run saves and ends anyway. A second Ctrl-C ends the process at once.

    Args:
        every_n_train_steps: Number of optimiser steps between two checkpoints; null for no such interval.
        every_minutes: Minutes between two checkpoints by the clock of the first process; null for no such interval. A
            crash costs at most this time. Minutes suit fast runs better than steps, because writing takes time: a
            checkpoint of 162M parameters with the moments of the optimiser has 2 GB.

    Raises:
        UserError: If a number is not positive, or both are null.
    """

    def __init__(self, every_n_train_steps: int | None = None, every_minutes: float | None = 10.0) -> None:
        super().__init__()
        numbers = [number for number in (every_n_train_steps, every_minutes) if number is not None]
        if not numbers or not min(numbers) > 0:
            raise UserError(
                f"LastCheckpoint: every_n_train_steps, every_minutes: got {numbers}, expected at least one above 0"
            )
        self.every_n_train_steps, self.every_minutes = every_n_train_steps, every_minutes
        self._saved_at = 0.0  # seconds on the monotonic clock
        self.path: Path | None = None
        self._saved_step = -1
        self._signals = Signals()

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        if stage == TrainerFn.FITTING:
            directory = trainer.strategy.broadcast(trainer.log_dir or trainer.default_root_dir)
            self.path = Path(directory) / LAST

    def on_sanity_check_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._signals.install()

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._saved_step, self._saved_at = trainer.global_step, time.monotonic()
        self._signals.install()
        self._signals.connect(trainer)

    def on_train_batch_end(self, trainer: Trainer, *_: Any) -> None:
        if not _between_steps(trainer):
            return
        due = self._obey_signals(trainer)
        every = self.every_n_train_steps
        due = due or (every is not None and trainer.global_step % every == 0)
        if due and trainer.global_step != self._saved_step:
            self.save(trainer)

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self.save(trainer)
        self._signals.restore()

    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        self._signals.restore()

    def on_save_checkpoint(self, trainer: Trainer, pl_module: LightningModule, checkpoint: dict[str, Any]) -> None:
        checkpoint[ACCUMULATION] = trainer.accumulate_grad_batches
        if _validation_ahead(trainer):
            _expect_validation(checkpoint["loops"]["fit_loop"])

    def on_load_checkpoint(self, trainer: Trainer, pl_module: LightningModule, checkpoint: dict[str, Any]) -> None:
        before, now = checkpoint.get(ACCUMULATION), trainer.accumulate_grad_batches
        # the loops count micro-batches, of which a step now has another number
        if before is not None and before != now:
            for counts in ("total", "current"):
                progress = checkpoint["loops"]["fit_loop"]["epoch_loop.batch_progress"][counts]
                lag = progress["processed"] - progress["completed"]
                done = progress["processed"] // before * now
                progress.update(ready=done, started=done, processed=done, completed=done - lag)

    def save(self, trainer: Trainer) -> None:
        """Write the checkpoint. Call it on every rank, between optimiser steps."""
        if untyped(trainer).fast_dev_run:
            return
        assert self.path is not None
        trainer.save_checkpoint(self.path)
        self._saved_step, self._saved_at = trainer.global_step, time.monotonic()

    def _obey_signals(self, trainer: Trainer) -> bool:
        """Save and end the process after a signal. Without a signal, return whether ``every_minutes`` have passed."""
        late = self.every_minutes is not None and time.monotonic() - self._saved_at >= 60 * self.every_minutes
        number, due = self._signals.agreed(trainer, late and trainer.is_global_zero)
        if not number:
            return due
        rank_zero_info(f"{signal.Signals(number).name} at step {trainer.global_step}: saving {self.path}")
        trainer._logger_connector.update_train_step_metrics()  # Lightning does this after this hook
        self.save(trainer)
        self._leave(trainer, number)

    def _leave(self, trainer: Trainer, number: int) -> NoReturn:
        if number == signal.SIGUSR1 and trainer.is_global_zero:
            requeue()
        # Lightning's launcher kills the first process if another process ends with a code other than 0
        environment = getattr(trainer.strategy, "cluster_environment", None)
        by_launcher = environment is not None and not environment.creates_processes_externally
        raise SystemExit(0 if by_launcher and not trainer.is_global_zero else 128 + number)


def _validation_ahead(trainer: Trainer) -> bool:
    """Whether a validation is due after this batch, and a checkpoint written now precedes it."""
    loop = trainer.fit_loop.epoch_loop
    progress: Any = loop.batch_progress.total
    # completed and processed differ only in on_train_batch_end; best.ckpt is written after the validation
    if trainer.validating or progress.completed == progress.processed:
        return False
    fetcher: Any = trainer.fit_loop._data_fetcher
    return loop._should_check_val_fx(fetcher)


def _expect_validation(loops: dict[str, Any]) -> None:
    """Set the counters in a checkpoint as if a validation was interrupted in its first batch."""
    for counts in ("total", "current"):
        progress = loops["epoch_loop.batch_progress"][counts]
        progress["completed"] = progress["processed"]
    none = {"ready": 0, "started": 0, "processed": 0, "completed": 0}
    loops["epoch_loop.val_loop.batch_progress"].update(
        total={**none, "ready": 1, "started": 1}, current=none, is_last_batch=False
    )


def _between_steps(trainer: Trainer) -> bool:
    """Whether there are no accumulated gradients and this is not the last step."""
    last = 0 < trainer.max_steps <= trainer.global_step
    return not last and not trainer.fit_loop._should_accumulate()

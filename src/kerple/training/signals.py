"""Signals to stop a run. They are recorded when they arrive, and take effect when the run can be saved."""

import os
import signal
import subprocess
import threading
from contextlib import suppress
from typing import Any

import torch
from pytorch_lightning import Trainer
from pytorch_lightning.utilities.rank_zero import rank_zero_info, rank_zero_only, rank_zero_warn

from kerple.training.trainer_access import leave_signals

# 0 means no signal; if several of these signals arrive, the last one in this tuple takes effect
PRECEDENCE = (0, signal.SIGUSR1, signal.SIGHUP, signal.SIGINT, signal.SIGTERM)
CTRL_C_MESSAGE = b"\nCtrl-C: the run ends when this step is done and saved; a second Ctrl-C ends it at once\n"


class Signals:
    """Records the signals of `PRECEDENCE` that reach this process, and shares them with the other processes of the run.

    A second Ctrl-C (SIGINT) ends the process at once. Ignored signals, such as SIGHUP with nohup, stay ignored.

    These handlers replace the handlers of Lightning. Lightning's handlers save in the middle of a step, and wait for
    other ranks inside the handler. After Ctrl-C, Lightning saves nothing.
    """

    def __init__(self) -> None:
        self.received = 0
        self._earlier_handlers: dict[signal.Signals, Any] = {}
        self._group: Any = None  # process group with the backend gloo

    def install(self) -> None:
        """Set handlers for signals that are not ignored. Do nothing outside the main thread, or if handlers are set."""
        if self._earlier_handlers:
            return
        self.received = 0
        if threading.current_thread() is threading.main_thread():
            handled = [number for number in PRECEDENCE[1:] if signal.getsignal(number) is not signal.SIG_IGN]
            self._earlier_handlers = {number: signal.signal(number, self._record) for number in handled}

    def restore(self) -> None:
        """Restore the handlers from before `install`."""
        for number, handler in self._earlier_handlers.items():
            signal.signal(number, handler if handler is not None else signal.SIG_DFL)
        self._earlier_handlers = {}

    def connect(self, trainer: Trainer) -> None:
        """Connect the processes by gloo, so that `synchronise` does not wait for a GPU. Call it on every rank."""
        if trainer.world_size > 1 and self._group is None:
            self._group = torch.distributed.new_group(backend="gloo")
            leave_signals(trainer)

    def synchronise(self, trainer: Trainer, request: bool = False) -> tuple[int, bool]:
        """Return the signal that any process has received (or 0), and whether ``request`` is true in any process.

        If processes have received different signals, the last in `PRECEDENCE` is returned. Call this method on every
        rank, after `connect`.
        """
        if trainer.world_size == 1:
            return self.received, request
        state = torch.tensor([PRECEDENCE.index(self.received), int(request)])
        torch.distributed.all_reduce(state, torch.distributed.ReduceOp.MAX, group=self._group)
        received, requested = state.tolist()
        return PRECEDENCE[received], bool(requested)

    def _record(self, number: int, frame: Any) -> None:
        self.received = max(self.received, number, key=PRECEDENCE.index)
        if number == signal.SIGINT:
            signal.signal(number, signal.SIG_DFL)
            if getattr(rank_zero_only, "rank", 0) == 0:
                with suppress(OSError):
                    os.write(2, CTRL_C_MESSAGE)  # not print, because the signal may have interrupted a print


def requeue() -> None:
    """Requeue the SLURM job of this process. Outside SLURM, do nothing."""
    job = os.environ.get("SLURM_JOB_ID")
    if job is None:
        return
    if "SLURM_ARRAY_JOB_ID" in os.environ:
        job = f"{os.environ['SLURM_ARRAY_JOB_ID']}_{os.environ['SLURM_ARRAY_TASK_ID']}"
    try:
        subprocess.run(["scontrol", "requeue", job], check=True, timeout=60)
        rank_zero_info(f"Requeued the job {job}.")
    except (OSError, subprocess.SubprocessError) as error:
        rank_zero_warn(f"The job {job} could not be requeued ({error}); start it again by hand.")

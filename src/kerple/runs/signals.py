"""Signals that ask a run to stop: noted when they come, obeyed when the run is in a state that can be saved."""

import os
import re
import signal
import subprocess
import threading
from typing import Any

import torch
from pytorch_lightning import Trainer
from pytorch_lightning.utilities.rank_zero import rank_zero_info, rank_zero_warn

from kerple.errors import UserError

STOPPING = (signal.SIGTERM, signal.SIGUSR1)


class Signals:
    """SIGTERM and SIGUSR1 of this process, and of the others of the run.

    In place of Lightning's handlers, which save in the middle of a step and broadcast from inside the handler, where
    the other ranks do not answer. A handler that belongs to somebody else is put back by `restore`.
    """

    def __init__(self) -> None:
        self.received = 0
        self._before: dict[signal.Signals, Any] = {}
        self._group: Any = None  # of the processes, over gloo

    def install(self) -> None:
        """Listen from now on; nothing where we do already."""
        if self._before:
            return
        self.received = 0
        if threading.current_thread() is threading.main_thread():
            self._before = {number: signal.signal(number, self._note) for number in STOPPING}

    def restore(self) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler if handler is not None else signal.SIG_DFL)
        self._before = {}

    def connect(self, trainer: Trainer) -> None:
        """Have the processes agree from host to host, so that nothing waits for a GPU. To be called by all of them."""
        if trainer.world_size > 1 and self._group is None:
            self._group = torch.distributed.new_group(backend="gloo")
            # Lightning asks for signals at each micro-batch, on the device, and waits for it; it has no handler here
            trainer.fit_loop.epoch_loop._broadcast_sigterm_tensor = lambda: None  # type: ignore[method-assign]

    def agreed(self, trainer: Trainer, wish: bool = False) -> tuple[int, bool]:
        """The signal any process of the run has received, 0 for none, and whether any wishes for what it asks.

        To be called by all of them, after `connect`.
        """
        if trainer.world_size == 1:
            return self.received, wish
        state = torch.tensor([self.received, int(wish)])
        torch.distributed.all_reduce(state, torch.distributed.ReduceOp.MAX, group=self._group)
        received, wished = state.tolist()
        return received, bool(wished)

    def _note(self, number: int, frame: Any) -> None:
        self.received = max(self.received, int(number))


def requeue() -> None:
    """Put the SLURM job this process belongs to back into its queue; nothing outside SLURM."""
    job = os.environ.get("SLURM_JOB_ID")
    if job is None:
        return
    if "SLURM_ARRAY_JOB_ID" in os.environ:
        job = f"{os.environ['SLURM_ARRAY_JOB_ID']}_{os.environ['SLURM_ARRAY_TASK_ID']}"
    if not re.fullmatch(r"[0-9]+(_[0-9]+)?", job):
        raise UserError(f"SLURM_JOB_ID: got {job!r}, expected the number of a job")
    try:
        subprocess.run(["scontrol", "requeue", job], check=True, timeout=60)
        rank_zero_info(f"Requeued the job {job}.")
    except (OSError, subprocess.SubprocessError) as error:
        rank_zero_warn(f"The job {job} could not be requeued ({error}); start it again by hand.")

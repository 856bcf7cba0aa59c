"""`NonFiniteGuard`: stops a run if the loss, a gradient or a weight is not finite."""

import math
from typing import Any

import torch
from pytorch_lightning import Callback, LightningModule, Trainer
from torch import Tensor
from torch.nn.utils import get_total_norm
from torch.optim import Optimizer

from kerple.base.errors import UserError
from kerple.training.last_checkpoint import LastCheckpoint
from kerple.training.sharding import local_parts
from kerple.training.trainer_access import untyped


class NonFiniteGuard(Callback):
    """Checks all losses and gradients on all ranks before each step of the optimiser.

    The device makes this check. The host (the Python process) waits for the device when it reads the result. With
    torch's fused Adam or AdamW on a GPU, the host therefore reads the results only every few steps, and before each
    validation and checkpoint. If a loss or gradient is not finite, this callback sets the flag ``found_inf`` of the
    optimiser. The optimiser then skips this step and all later steps until the host reads the result. With other
    optimisers or ``precision: 16-mixed``, the host reads every result.

    With 16-mixed only the loss is checked, because the loss scaler skips steps whose gradients overflow. Weights are
    checked after a bad step, before each checkpoint, and at the end.

    Args:
        every_n_steps: Number of steps between two reads by the host with a fused optimiser. null means 1 on a CPU,
            and ``trainer.log_every_n_steps`` on a GPU.

    Raises:
        UserError: If a loss, a gradient or a weight is not finite. After a bad loss or gradient, the weights are those
            before the bad step. The message names the step and the last good checkpoint.
    """

    def __init__(self, every_n_steps: int | None = None) -> None:
        super().__init__()
        self.every_n_steps = every_n_steps
        self._losses: list[Tensor] = []  # of the micro-batches since the last step
        self._unchecked: list[tuple[int, Tensor]] = []  # step, and () bool on the device: loss and gradient are finite

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._losses, self._unchecked = [], []  # of an earlier fit, which was stopped inside a step

    def on_before_backward(self, trainer: Trainer, pl_module: LightningModule, loss: Tensor) -> None:
        self._losses.append(loss.detach())

    def on_before_optimizer_step(self, trainer: Trainer, pl_module: LightningModule, optimizer: Optimizer) -> None:
        finite = torch.stack(self._losses).isfinite().all()
        self._losses = []
        scaled = trainer.precision == "16-mixed"
        gradients = local_parts(p.grad for p in pl_module.parameters() if p.grad is not None)
        if gradients and not scaled:  # the norm is the largest entry, because a sum of squares could overflow
            finite = finite & get_total_norm(gradients, math.inf).isfinite()
        if trainer.world_size > 1:  # without strategy.reduce, whose barrier waits for the device
            everywhere = finite.int()
            torch.distributed.all_reduce(everywhere, torch.distributed.ReduceOp.MIN)
            finite = everywhere.bool()
        self._unchecked.append((trainer.global_step, finite))
        every = 1
        if not scaled and _can_skip_steps(optimizer):
            all_finite = torch.stack([step_finite for _, step_finite in self._unchecked]).all()
            optimizer.found_inf = 1 - all_finite.float()  # type: ignore[attr-defined]
            every = self.every_n_steps or (untyped(trainer).log_every_n_steps if finite.is_cuda else 1)
        if len(self._unchecked) >= every:
            self._check(trainer)

    def on_validation_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._check(trainer)

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._check(trainer)
        _check_weights(trainer)

    def on_save_checkpoint(self, trainer: Trainer, pl_module: LightningModule, checkpoint: dict[str, Any]) -> None:
        self.on_train_end(trainer, pl_module)

    def _check(self, trainer: Trainer) -> None:
        """Read the results since the last call. Raise a UserError if one is not finite. This waits for the device."""
        unchecked, self._unchecked = self._unchecked, []
        if not unchecked or torch.stack([finite for _, finite in unchecked]).all():
            return
        _check_weights(trainer)
        step = next(step for step, finite in unchecked if not finite)
        raise _non_finite(trainer, step, "the loss or a gradient is not finite, and the step was not made")


def _can_skip_steps(optimizer: Optimizer) -> bool:
    """Return whether the optimiser has a flag to skip steps. Subclasses may ignore the flag, so they are excluded."""
    fused = all(group.get("fused") for group in optimizer.param_groups)
    return fused and type(optimizer) in (torch.optim.AdamW, torch.optim.Adam)


def _check_weights(trainer: Trainer) -> None:
    weights = local_parts(p.detach() for p in trainer.lightning_module.parameters())
    if not trainer.strategy.reduce_boolean_decision(bool(get_total_norm(weights, math.inf).isfinite()), all=True):
        raise _non_finite(trainer, trainer.global_step, "weights are not finite")


def _non_finite(trainer: Trainer, step: int, reason: str) -> UserError:
    advice = "lower model.lr or trainer.gradient_clip_val, and start a new run"
    paths = [c.path for c in trainer.checkpoint_callbacks if isinstance(c, LastCheckpoint) and c.path is not None]
    if paths and paths[0].is_file():
        advice += f", from the last good weights with --weights {paths[0]}"
    return UserError(f"step {step}: {reason}; {advice}")

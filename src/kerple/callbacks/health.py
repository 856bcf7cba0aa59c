"""Stops a run, or skips a batch, whose loss or gradient is no longer a number."""

import math
from typing import Any, Literal

import torch
from pytorch_lightning import Callback, LightningModule, Trainer
from pytorch_lightning.utilities.rank_zero import rank_zero_warn
from torch import Tensor
from torch.nn.utils import get_total_norm

from kerple.callbacks.last_checkpoint import LastCheckpoint
from kerple.errors import UserError


class Finite(Callback):
    """Looks at every loss and every gradient before the optimiser does, on all ranks together.

    Costs one synchronisation with the device a step. With ``precision: 16-mixed`` only the loss is looked at: the loss
    scaler there expects gradients that overflow, and leaves such steps out itself.

    Args:
        action: ``stop`` raises before the weights change; ``skip`` leaves the batch out (weights and moments stay, the
            step counts for the schedule), warns, and logs how many as ``train/skipped_batches``.

    Raises:
        UserError: With ``stop``: names the step, the samples and the last good checkpoint.
    """

    def __init__(self, action: Literal["stop", "skip"] = "stop") -> None:
        super().__init__()
        if action not in ("stop", "skip"):
            raise UserError(f"Finite: action: got {action!r}, expected 'stop' or 'skip'")
        self.action = action
        self.skipped = 0
        self._samples: list[tuple[int, int] | list[int]] = []  # of the micro-batches since the last step
        self._finite: list[Tensor] = []  # whether the loss of each was

    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int) -> None:
        self._samples.append(_samples(trainer, batch))

    def on_before_backward(self, trainer: Trainer, pl_module: LightningModule, loss: Tensor) -> None:
        self._finite.append(loss.detach().isfinite().all())

    def on_before_optimizer_step(
        self, trainer: Trainer, pl_module: LightningModule, optimizer: torch.optim.Optimizer
    ) -> None:
        samples, losses = self._samples, self._finite
        self._samples, self._finite = [], []
        finite = torch.stack(losses).all()
        if trainer.precision != "16-mixed":
            gradients = [p.grad for group in optimizer.param_groups for p in group["params"] if p.grad is not None]
            if gradients:  # the largest entry: a sum of squares could overflow where nothing is wrong
                finite = finite & get_total_norm(gradients, math.inf).isfinite()
        if trainer.strategy.reduce_boolean_decision(bool(finite), all=True):
            return
        self._report(trainer, samples, [bool(f) for f in losses])
        optimizer.zero_grad(set_to_none=True)  # the optimiser leaves out a parameter without a gradient
        self.skipped += 1
        pl_module.log("train/skipped_batches", float(self.skipped))

    def state_dict(self) -> dict[str, Any]:
        return {"skipped": self.skipped} if self.skipped else {}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.skipped = state_dict["skipped"]

    def _report(self, trainer: Trainer, samples: list[Any], losses: list[bool]) -> None:
        bad = [s for s, finite in zip(samples, losses, strict=True) if not finite]
        what = "the loss of" if bad else "the gradient of"
        named = ", ".join(_spell(s) for s in bad or samples)
        message = f"step {trainer.global_step}: {what} {named} is not finite"
        if self.action == "skip":
            rank_zero_warn(f"{message}; left out, {self.skipped + 1} so far")
            return
        paths = [c.path for c in trainer.checkpoint_callbacks if isinstance(c, LastCheckpoint) and c.path is not None]
        good = (
            f"the last good checkpoint is {paths[0]}" if paths and paths[0].is_file() else "there is no checkpoint yet"
        )
        raise UserError(
            f"{message}. The weights are those before this step; {good}. Lower the learning rate or clip the gradient; "
            "--trainer.callbacks+=Finite --trainer.callbacks.action=skip leaves such batches out"
        )


def _samples(trainer: Trainer, batch: Any) -> tuple[int, int] | list[int]:
    """Numbers of the samples of this micro-batch: those it tells, or the range all ranks together have got."""
    if isinstance(batch, dict) and isinstance(batch.get("index"), Tensor):
        return batch["index"].flatten().tolist()
    loader = trainer.train_dataloader
    if hasattr(loader, "state_dict") and hasattr(loader, "samples"):
        after = sum(loader.state_dict().values())
        return after - loader.samples, after - 1
    return trainer.fit_loop.total_batch_idx, trainer.fit_loop.total_batch_idx


def _spell(samples: tuple[int, int] | list[int]) -> str:
    if isinstance(samples, tuple):
        return f"samples {samples[0]} to {samples[1]}"
    return f"samples {', '.join(map(str, samples))}"

"""`Finite`: stops a run, or skips a batch, if the loss or a gradient is not finite."""

import math
from dataclasses import dataclass
from typing import Any, Literal

import torch
from pytorch_lightning import Callback, LightningModule, Trainer
from pytorch_lightning.utilities.rank_zero import rank_zero_warn
from torch import Tensor
from torch.nn.utils import get_total_norm

from kerple.base.errors import UserError
from kerple.evaluation.typed import untyped
from kerple.training.last_checkpoint import LastCheckpoint


@dataclass(frozen=True)
class Seen:
    """A step that the host has not checked yet; the tensors are on the device."""

    step: int
    samples: list[tuple[int, int] | list[int]]  # samples of each micro-batch
    losses: Tensor  # (micro-batches,) bool, whether the loss of each was finite
    finite: Tensor  # () bool, whether all losses and gradients of the step were finite on all ranks


class Finite(Callback):
    """Checks all losses and gradients, on all ranks, before the optimiser uses them.

    A check by the host has to wait for the device. On a GPU, the device therefore skips a bad step by itself, through a
    flag of the fused optimiser that loss scaling uses too; with ``stop`` it also skips all steps after it. The host
    checks now and then, and always before a checkpoint. If the optimiser has no such flag, the host checks every step.

    With ``precision: 16-mixed`` only the loss is checked, because the loss scaler skips steps with gradients that
    overflow by itself.

    Weights that are not finite end the run with both actions, because all later batches would have to be skipped. They
    are checked with every bad batch, before a checkpoint is written, and at the end.

    Args:
        action: ``stop`` ends the run with the weights before the bad step. ``skip`` leaves out the batch: weights and
            moments stay, and the step counts for the schedule. It warns, and logs the number of skipped batches as
            ``train/skipped_batches``.
        every_n_steps: Steps between two checks by the host; null for 1 on a CPU, ``trainer.log_every_n_steps`` on a
            GPU.

    Raises:
        UserError: If an option is out of range. During training: with ``stop``, if a loss or a gradient is not finite;
            the message names the step, the samples and the last good checkpoint. With both, if a weight is not finite.
    """

    def __init__(self, action: Literal["stop", "skip"] = "stop", every_n_steps: int | None = None) -> None:
        super().__init__()
        if action not in ("stop", "skip"):
            raise UserError(f"Finite: action: got {action!r}, expected 'stop' or 'skip'")
        if every_n_steps is not None and every_n_steps < 1:
            raise UserError(f"Finite: every_n_steps: got {every_n_steps}, expected 1 or more, or null")
        self.action, self.every_n_steps = action, every_n_steps
        self.skipped = self._logged = 0
        self._samples: list[tuple[int, int] | list[int]] = []  # samples of the micro-batches since the last step
        self._finite: list[Tensor] = []  # whether the loss of each was finite
        self._seen: list[Seen] = []  # steps that the host has not checked
        self._bad: Tensor | None = None  # () bool on the device, whether one of them was bad

    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int) -> None:
        self._samples.append(_samples(trainer, batch))

    def on_before_backward(self, trainer: Trainer, pl_module: LightningModule, loss: Tensor) -> None:
        self._finite.append(loss.detach().isfinite().all())

    def on_before_optimizer_step(
        self, trainer: Trainer, pl_module: LightningModule, optimizer: torch.optim.Optimizer
    ) -> None:
        samples, losses = self._samples, torch.stack(self._finite)
        self._samples, self._finite = [], []
        finite = losses.all()
        if trainer.precision != "16-mixed":
            gradients = [p.grad for group in optimizer.param_groups for p in group["params"] if p.grad is not None]
            if gradients:  # the norm is the largest entry, because a sum of squares could overflow by itself
                finite = finite & get_total_norm(gradients, math.inf).isfinite()
        if trainer.world_size > 1:  # not strategy.reduce: its barrier waits for the device
            everywhere = finite.int()
            torch.distributed.all_reduce(everywhere, torch.distributed.ReduceOp.MIN)
            finite = everywhere.bool()
        self._seen.append(Seen(trainer.global_step, samples, losses, finite))
        if trainer.precision == "16-mixed" or not _leaves_out(optimizer):
            if self._look(trainer):
                optimizer.zero_grad(set_to_none=True)  # the optimiser leaves out a parameter without a gradient
            self._log(pl_module)
            return
        bad = ~finite if self._bad is None or self.action == "skip" else ~finite | self._bad
        self._bad = bad
        optimizer.found_inf = bad.float()  # type: ignore[attr-defined]
        if len(self._seen) >= (self.every_n_steps or (untyped(trainer).log_every_n_steps if finite.is_cuda else 1)):
            self._look(trainer)
        self._log(pl_module)

    def on_validation_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._look(trainer)

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._look(trainer)
        _check_weights(trainer)

    def on_save_checkpoint(self, trainer: Trainer, pl_module: LightningModule, checkpoint: dict[str, Any]) -> None:
        self._look(trainer)
        _check_weights(trainer)

    def state_dict(self) -> dict[str, Any]:
        skipped = self.skipped + sum(not bool(seen.finite) for seen in self._seen)
        return {"skipped": skipped} if skipped else {}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.skipped = state_dict["skipped"]

    def _look(self, trainer: Trainer) -> bool:
        """Check the steps since the last check, and stop or warn; return whether one of them was bad."""
        seen, self._seen, self._bad = self._seen, [], None
        if not seen or torch.stack([s.finite for s in seen]).all():
            return False
        _check_weights(trainer)
        for step in seen:
            if not step.finite:
                self._report(trainer, step)
                self.skipped += 1
        return True

    def _log(self, pl_module: LightningModule) -> None:
        if self.skipped != self._logged:
            self._logged = self.skipped
            pl_module.log("train/skipped_batches", float(self.skipped))

    def _report(self, trainer: Trainer, seen: Seen) -> None:
        bad = [s for s, finite in zip(seen.samples, seen.losses.tolist(), strict=True) if not finite]
        what = "the loss of" if bad else "the gradient of"
        named = ", ".join(_spell(s) for s in bad or seen.samples)
        message = f"step {seen.step}: {what} {named} is not finite"
        if self.action == "skip":
            rank_zero_warn(f"{message}; left out, {self.skipped + 1} so far")
            return
        raise UserError(
            f"{message}. The weights are those before this step; {_last_good(trainer)}. Lower the learning rate or "
            "clip the gradient; --trainer.callbacks+=Finite --trainer.callbacks.action=skip leaves such batches out"
        )


def _leaves_out(optimizer: torch.optim.Optimizer) -> bool:
    """Whether the optimiser can skip a step on the device. Subclasses are not trusted to, as they may do more."""
    fused = all(group.get("fused") for group in optimizer.param_groups)
    return fused and type(optimizer) in (torch.optim.AdamW, torch.optim.Adam)


def _check_weights(trainer: Trainer) -> None:
    weights = [p.detach() for p in trainer.lightning_module.parameters() if p.numel()]
    if not trainer.strategy.reduce_boolean_decision(bool(get_total_norm(weights, math.inf).isfinite()), all=True):
        raise UserError(
            f"step {trainer.global_step}: weights are not finite, and leaving out a batch cannot mend them; "
            f"{_last_good(trainer)}. Lower the learning rate or clip the gradient, and start again from there"
        )


def _last_good(trainer: Trainer) -> str:
    paths = [c.path for c in trainer.checkpoint_callbacks if isinstance(c, LastCheckpoint) and c.path is not None]
    return f"the last good checkpoint is {paths[0]}" if paths and paths[0].is_file() else "there is no checkpoint yet"


def _samples(trainer: Trainer, batch: Any) -> tuple[int, int] | list[int]:
    """Numbers of the samples in a micro-batch: its "index", or else first and last of all ranks together."""
    if isinstance(batch, dict) and isinstance(batch.get("index"), Tensor):
        return batch["index"].flatten().tolist()
    loader: Any = trainer.train_dataloader
    if hasattr(loader, "state_dict") and hasattr(loader, "samples"):
        after = sum(loader.state_dict().values())
        return after - loader.samples, after - 1
    return trainer.fit_loop.total_batch_idx, trainer.fit_loop.total_batch_idx


def _spell(samples: tuple[int, int] | list[int]) -> str:
    if isinstance(samples, tuple):
        return f"samples {samples[0]} to {samples[1]}"
    return f"samples {', '.join(map(str, samples))}"

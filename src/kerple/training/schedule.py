"""`WarmupCosine`: the schedule of the learning rate."""

import math

from torch import Tensor
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler


class WarmupCosine(LRScheduler):
    """The rate rises linearly from lr / warmup to lr in ``warmup`` steps, and falls along a cosine to 0 at ``end``.

    Args:
        optimizer: The optimiser.
        warmup: Number of steps, at least 2, in which the rate rises.
        end: Step at which the rate is 0, larger than ``warmup``.
    """

    def __init__(self, optimizer: Optimizer, warmup: int, end: int) -> None:
        self.warmup, self.end = warmup, end
        super().__init__(optimizer)

    def get_lr(self) -> list[float | Tensor]:
        """The rate of each parameter group at this step, from that of the step before."""
        step, rates = self.last_epoch, [group["lr"] for group in self.optimizer.param_groups]
        if step == 0:
            return [peak / self.warmup for peak in self.base_lrs]
        if step < self.warmup:
            rises = [(peak - peak / self.warmup) / (self.warmup - 1) for peak in self.base_lrs]
            return [rate + rise for rate, rise in zip(rates, rises, strict=True)]
        if step == self.warmup:
            return list(self.base_lrs)
        if step > self.end:
            return rates  # 0
        fall = self._height(step) / self._height(step - 1)
        return [fall * rate for rate in rates]

    def _height(self, step: int) -> float:
        return 1 + math.cos(math.pi * (step - self.warmup) / (self.end - self.warmup))

"""Base classes of strategies that wrap another strategy."""

from abc import abstractmethod
from collections.abc import Callable
from functools import wraps
from hashlib import blake2b
from typing import Any

import torch
from torch import Tensor

from kerple.positions.base import FLAGS, HOOKS, Position


class Wrapper(Position):
    """Forwards every hook to the strategy that it wraps, and copies its flags; a subclass overrides what it changes.

    Args:
        position: The wrapped strategy.
    """

    @abstractmethod
    def __init__(self, position: Position) -> None:
        super().__init__()
        self.position = position
        for flag in FLAGS:
            setattr(self, flag, getattr(position, flag))

    def uses(self, hook: str) -> bool:
        return getattr(type(self), hook) is not getattr(Wrapper, hook) or self.position.uses(hook)


def _forwarding(hook: str) -> Callable[..., Any]:
    @wraps(getattr(Position, hook))
    def forward(self: Wrapper, *args: Any, **kwargs: Any) -> Any:
        return getattr(self.position, hook)(*args, **kwargs)

    return forward


for _hook in HOOKS:  # a loop, so that hooks which are added later are forwarded too
    setattr(Wrapper, _hook, _forwarding(_hook))


class Resampled(Wrapper):
    """A wrapper that draws random numbers anew for each optimiser step.

    The draw is a function of ``seed`` and of the number of steps, a buffer of the checkpoint: so it is the same on
    every device, and after resuming. A subclass calls `draw_` once it has registered its own buffers.

    Args:
        position: The wrapped strategy.
        seed: Chooses the draws.
    """

    step: Tensor
    """Number of optimiser steps so far, () int64."""

    @abstractmethod
    def __init__(self, position: Position, seed: int) -> None:
        super().__init__(position)
        self.seed = seed
        self.register_buffer("step", torch.zeros((), dtype=torch.int64))

    @abstractmethod
    def draw_(self) -> None:
        """Fill the subclass's buffers with the draw of this step; on the meta device, do nothing."""

    def random_integer(self, size: int) -> int:
        """Return the random number of this step, an integer of ``size`` bytes, uniform over all values."""
        # a hash, because a generator's seed has only 32 bits for seed and step together
        return int.from_bytes(blake2b(f"{self.seed}/{int(self.step)}".encode(), digest_size=size).digest(), "big")

    def clamp_(self) -> None:
        super().clamp_()
        self.step += 1
        self.draw_()

"""Base classes of strategies that wrap another strategy."""

from abc import abstractmethod
from collections.abc import Callable
from functools import wraps
from hashlib import blake2b
from typing import Any

import torch
from torch import Tensor

from kerple.positions.base import FLAGS, HOOKS, Position, Shape
from kerple.positions.token_positions import TokenPositions


class Wrapper(Position):
    """Strategy that forwards every hook to a wrapped strategy. Subclasses override some of the hooks.

    The attributes that describe the wrapped strategy (`FLAGS`) are copied.

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


def rotate_alike(one: Position, other: Position, shape: Shape) -> bool:
    """Return whether two strategies give the same queries and keys at 64 positions. ``shape``: sizes of the model."""
    heads, tokens = torch.ones(1, shape.heads, 64, shape.head_dim), TokenPositions.arange(64)
    pairs = (each.transform_qk(heads, heads, None, tokens) for each in (one, other))
    return all(torch.allclose(ours, theirs, atol=1e-4) for ours, theirs in zip(*pairs, strict=True))


def _forward_to_wrapped(hook: str) -> Callable[..., Any]:
    """Return a method that calls this hook of the wrapped strategy."""

    @wraps(getattr(Position, hook))
    def forward(self: Wrapper, *args: Any, **kwargs: Any) -> Any:
        return getattr(self.position, hook)(*args, **kwargs)

    return forward


for _hook in HOOKS:  # a loop instead of methods, so that new hooks are forwarded too
    setattr(Wrapper, _hook, _forward_to_wrapped(_hook))


class Resampled(Wrapper):
    """Wrapper that draws new random numbers for each optimiser step.

    The draw is a function of ``seed`` and of the number of steps. Checkpoints store this number. The draw is therefore
    the same on all devices and after resuming. The constructor of a subclass registers its buffers and calls `draw_`.

    Args:
        position: The wrapped strategy.
        seed: Seed of the draws.
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
        """Fill the buffers of the subclass with the draw of this step; do nothing on the meta device."""

    def random_integer(self, size: int) -> int:
        """Return the random number of this step, a uniformly distributed integer of ``size`` bytes."""
        # seed and step are hashed into one number, because a torch.Generator has a single seed
        return int.from_bytes(blake2b(f"{self.seed}/{int(self.step)}".encode(), digest_size=size).digest(), "big")

    def clamp_(self) -> None:
        """Count a step and draw again. `constrain_` calls it after each optimiser step."""
        super().clamp_()
        self.step += 1
        self.draw_()

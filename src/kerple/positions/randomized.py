"""`RandomizedPositions`: training at random positions from a range as long as the inputs of tests."""

from collections.abc import Callable
from dataclasses import replace

import torch
from torch import Tensor

from kerple.errors import UserError
from kerple.positions.base import Position, Shape
from kerple.positions.pairs import At
from kerple.positions.rotary import RoPE
from kerple.positions.wrapper import Drawing


class RandomizedPositions(Drawing):
    """Ordered random positions while training, plain ones in evaluation (Ruoss et al. 2023, arXiv 2305.16843, § 3).

    In training, token t of an input stands at the t-th of L positions drawn without repetition from 0..reach-1 and
    sorted; L is the training length. A shorter input takes the first of them. Tokens from L on take them again, each
    ``reach`` further. All inputs of a step share the draw, as in the published code. In evaluation token t stands at t.

    Parameters: `0` of its own, those of the wrapped strategy.
    Cost: that of the wrapped strategy; in training functions of distance are computed for each pair, T × T of them.

    Args:
        shape: What the model hands to every strategy.
        position: Builder of the wrapped strategy, given the shape with ``reach`` as its length.
        reach: Positions to draw from; None is 32 times the training length. At least the longest input to be tested.
        seed: Chooses the draws.

    Raises:
        UserError: If ``reach`` is shorter than the training length.
    """

    drawn: Tensor

    def __init__(
        self,
        shape: Shape,
        position: Callable[[Shape], Position] = RoPE,
        reach: int | None = None,
        seed: int = 0,
    ) -> None:
        reach = 32 * shape.length if reach is None else reach
        if reach < shape.length:
            raise UserError(
                f"RandomizedPositions: reach: got {reach}, expected at least the training length {shape.length}; "
                "choose the longest input to be tested"
            )
        super().__init__(position(replace(shape, length=reach)), seed)
        self.reach, self.length = reach, shape.length
        self.register_buffer("drawn", torch.zeros(shape.length, dtype=torch.int64))
        self.draw_()

    def relocate(self, at: At, tokens: Tensor) -> At:
        if self.training:
            drawn = self.drawn[at.positions % self.length] + at.positions // self.length * self.reach  # same shape
            at = replace(at, positions=drawn, contiguous=False)
        return self.position.relocate(at, tokens)

    def draw_(self) -> None:
        if not self.drawn.is_meta:
            generator = torch.Generator().manual_seed(self.number(4))
            self.drawn.copy_(torch.randperm(self.reach, generator=generator)[: self.length].sort().values)

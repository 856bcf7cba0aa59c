"""`RandomizedPositions`: training and tests at random positions from a range as long as the inputs of tests."""

from collections.abc import Callable
from dataclasses import replace

import torch
from torch import Tensor

from kerple.positions.base import Position, Shape
from kerple.positions.rotary import RoPE
from kerple.positions.token_positions import TokenPositions
from kerple.positions.wrapper import Resampled


class RandomizedPositions(Resampled):
    """Ordered random positions, in training and in evaluation (Ruoss et al. 2023, arXiv 2305.16843, § 3).

    Token t of an input of T tokens stands at the t-th smallest of T positions drawn without repetition from
    0..max_positions-1: so training has distances as large as those of a test. In training all inputs of a step share
    the draw, as in the published code; in evaluation all inputs of one length always have the same positions. Since all
    positions of an input depend on its length, the logits of a prefix are not the prefix of the logits, and generation
    has no cache.

    Parameters: `0` of its own, those of the wrapped strategy.
    Cost: that of the wrapped strategy; functions of distance are computed for each pair, T × T of them.

    Args:
        shape: Sizes of the model.
        position: Builder of the wrapped strategy, given the shape with this `Shape.max_positions`.
        max_positions: Number of positions to draw from, at least the longest input to be tested; None is 32 times the
            training length.
        seed: Chooses the draws.

    Raises:
        UserError: If ``max_positions`` is shorter than the training length, or, in a forward, than the input.
    """

    drawn: Tensor
    """The positions of this step in the order of the draw, (L,) int64; an input of T tokens takes the first T."""

    fixed: Tensor
    """The positions in evaluation, the draw of step 0; (max_length,) int64, not in checkpoints."""

    def __init__(
        self,
        shape: Shape,
        position: Callable[[Shape], Position] = RoPE,
        max_positions: int | None = None,
        seed: int = 0,
    ) -> None:
        max_positions = 32 * shape.length if max_positions is None else max_positions
        super().__init__(position(replace(shape, max_positions=max_positions)), seed)
        expected = f"at least the training length {shape.length}; choose the longest input to be tested"
        self.require(max_positions >= shape.length, "max_positions", max_positions, expected)
        self.max_length = max_positions
        self.shift_invariant, self.prefix_consistent = True, False  # whatever the wrapped strategy is
        self.register_buffer("drawn", torch.zeros(shape.length, dtype=torch.int64))
        self.register_buffer("fixed", torch.zeros(max_positions, dtype=torch.int64), persistent=False)
        self.draw_()
        if not self.fixed.is_meta:
            self.fixed.copy_(self._permutation())

    def remap_positions(self, positions: TokenPositions, tokens: Tensor) -> TokenPositions:
        length = positions.rows.shape[0]
        drawn = self.drawn if self.training and length <= len(self.drawn) else self.fixed
        ids = drawn[:length].sort().values  # (T,)
        return self.position.remap_positions(replace(positions, ids=ids, contiguous=False), tokens)

    def draw_(self) -> None:
        if not self.drawn.is_meta:
            self.drawn.copy_(self._permutation()[: len(self.drawn)])

    def _permutation(self) -> Tensor:
        return torch.randperm(len(self.fixed), generator=torch.Generator().manual_seed(self.random_integer(4)))

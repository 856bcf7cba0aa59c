"""`RandomizedPositions`: random positions from a range that covers the longest input of the tests."""

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

    The positions of an input of T tokens are T numbers drawn without repetition from 0..max_positions-1, and sorted.
    Distances in training are then as large as in tests. In training all inputs of a step share the draw, as in the
    published code. In evaluation all inputs of one length have the same positions. Positions depend on the length of
    the input. Therefore the logits of a prefix are not the prefix of the logits, and generation uses no cache.

    Parameters: `0`, and those of the wrapped strategy.
    Cost: that of the wrapped strategy; functions of distance are computed for each of the T × T pairs.

    Args:
        shape: Sizes of the model.
        position: Function that builds the wrapped strategy from the shape, whose ``max_positions`` is set.
        max_positions: Number of positions to draw from, at least the longest input of the tests; None is 32 times the
            training length.
        seed: Seed of the draws.

    Raises:
        UserError: If ``max_positions`` is smaller than the training length, or, in a forward pass, than the input.
    """

    drawn: Tensor
    """Positions of this step in the order of the draw, (L,) int64; an input of T tokens uses the first T."""

    fixed: Tensor
    """Positions in evaluation, the draw of step 0; (max_length,) int64, not stored in checkpoints."""

    def __init__(
        self,
        shape: Shape,
        position: Callable[[Shape], Position] = RoPE,
        max_positions: int | None = None,
        seed: int = 0,
    ) -> None:
        max_positions = 32 * shape.length if max_positions is None else max_positions
        super().__init__(position(replace(shape, max_positions=max_positions)), seed)
        expected = f"at least the training length {shape.length}; set it to the longest input of the tests"
        self.require(max_positions >= shape.length, "max_positions", max_positions, expected)
        self.max_length = max_positions
        self.shift_invariant, self.prefix_consistent = True, False  # for any wrapped strategy
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

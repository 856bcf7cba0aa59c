"""`RandomizedPositions`: random positions, drawn from the same range in training and in evaluation."""

from dataclasses import replace

import torch
from torch import Tensor

from kerple.positions.base import Shape, StrategyBuilder
from kerple.positions.rotary import RoPE
from kerple.positions.token_positions import TokenPositions
from kerple.positions.wrapper import Resampled


class RandomizedPositions(Resampled):
    """Random positions in ascending order, in training and in evaluation (Ruoss et al. 2023, arXiv 2305.16843, § 3).

    The positions of an input of T tokens are T numbers drawn without repetition from 0..max_positions-1, and sorted.
    Distances in training are therefore as large as in evaluation. In training each step draws new positions, and all
    inputs of a step share this draw, as in the authors' code. Evaluation, and inputs longer than the training length L,
    use one draw that never changes. Positions depend on the length of the input. Therefore logits also depend on the
    number of later tokens, and generation uses no cache.

    Parameters: `0`, and those of the wrapped strategy.
    Cost: that of the wrapped strategy; with explicit scores if it is a bias or a factor by distance.

    Args:
        shape: Sizes of the model.
        position: Function that builds the wrapped strategy from a shape with this ``max_positions``.
        max_positions: Number of positions to draw from, at least the length of the longest input in evaluation; None is
            32 · L.
        seed: Seed of the draws.

    Raises:
        UserError: If ``max_positions`` is less than L, or, in a forward pass, less than the length of the input.
    """

    drawn: Tensor
    """Positions of this step in the order of the draw, (L,) int64. An input of T tokens uses the first T, sorted."""

    fixed: Tensor
    """Positions in evaluation, the draw of step 0; (max_positions,) int64, not stored in checkpoints."""

    def __init__(
        self, shape: Shape, position: StrategyBuilder = RoPE, max_positions: int | None = None, seed: int = 0
    ) -> None:
        max_positions = 32 * shape.length if max_positions is None else max_positions
        expected = f"at least the training length {shape.length}; set it to the length of the longest test input"
        self.require(max_positions >= shape.length, "max_positions", max_positions, expected)
        super().__init__(position(replace(shape, max_positions=max_positions)), seed)
        self.max_length = max_positions
        # for any wrapped strategy: an offset is ignored, and drawn positions depend on the length of the input
        self.shift_invariant = True
        self.prefix_consistent = False
        self.register_buffer("drawn", torch.zeros(shape.length, dtype=torch.int64))
        self.register_buffer("fixed", torch.zeros(max_positions, dtype=torch.int64), persistent=False)
        self.draw_()
        if not self.fixed.is_meta:
            self.fixed.copy_(self._permutation())

    def remap_positions(self, positions: TokenPositions, tokens: Tensor) -> TokenPositions:
        length = positions.rows.shape[0]
        drawn = self.drawn if self.training and length <= len(self.drawn) else self.fixed
        if positions.first_key is None:
            ids = drawn[:length].sort().values  # (T,)
        else:  # sorted in each document, because the documents have consecutive ranges of numbers
            first = positions.first_key * len(self.fixed)
            ids = (first + drawn[positions.document_rows]).sort().values - first  # (B, T)
        return self.position.remap_positions(replace(positions, ids=ids, contiguous=False), tokens)

    def draw_(self) -> None:
        if not self.drawn.is_meta:
            self.drawn.copy_(self._permutation()[: len(self.drawn)])

    def _permutation(self) -> Tensor:
        return torch.randperm(len(self.fixed), generator=torch.Generator().manual_seed(self.random_integer(4)))

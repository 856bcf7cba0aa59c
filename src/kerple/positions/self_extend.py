"""`SelfExtend` and `ReRoPE`: rotary positions for trained models, evaluated beyond the training length.

Far keys get distances that occurred in training. Queries and keys are rotated twice: once for near keys at their exact
distances, and once for far keys. One softmax is taken over near and far keys. m is the position of the query, n that of
the key, and L the training length.
"""

from dataclasses import replace

import torch
from torch import Tensor

from kerple.positions.base import HOOKS, Shape, StrategyBuilder
from kerple.positions.rotary import RoPE
from kerple.positions.token_positions import QueriesAndKeys, TokenPositions
from kerple.positions.wrapper import Wrapper


class SelfExtend(Wrapper):
    """Shorter distances in tests of a trained model; `fit` refuses this strategy. The distance is ``m - n`` for the
    last w = ``neighbor_window`` keys, and ``⌊m/g⌋ - ⌊n/g⌋ + w - ⌊w/g⌋`` with g = ``group`` for earlier keys (Jin et
    al. 2024, arXiv 2401.01325, section 3).

    w is the neighbor window, a number of keys, and g the group size. If g divides w, distances in an input of up to
    w + (L - w) · g tokens stay below L. The model must have been trained with the wrapped strategy.

    Parameters: `0`, and those of the wrapped strategy.
    Cost: three times that of the wrapped strategy, separate fused attention to near and to far keys, and cached keys of
    twice the width.

    Args:
        shape: Sizes of the model.
        position: Function that builds the wrapped strategy from the shape. The model was trained with this strategy,
            which must only transform queries and keys, as `RoPE` does.
        neighbor_window: w, the number of last keys at exact distances, including the query's own; None is L/2.
        group: g, the number of far positions that are merged into one; None merges all of them (`ReRoPE`).

    Raises:
        UserError: If ``neighbor_window`` or ``group`` is not positive, or the wrapped strategy does more than transform
            queries and keys, or depends on the length of the input.
    """

    neighbor_window: int

    def __init__(
        self, shape: Shape, position: StrategyBuilder = RoPE, neighbor_window: int | None = None, group: int | None = 8
    ) -> None:
        super().__init__(position(shape))
        window = max(shape.length // 2, 1) if neighbor_window is None else neighbor_window
        self.require(window >= 1, "neighbor_window", window, "at least 1 key, the query's own")
        self.require(group is None or group >= 1, "group", group, "at least 1 position, or null for a single group")
        hooks = [hook for hook in HOOKS if self.position.uses(hook)]
        # of a strategy with a neighbor window, queries and keys already have two halves
        has_halves = self.position.varies_by_layer or self.position.neighbor_window is not None
        only_transforms = hooks == ["transform_qk"] and not has_halves
        expected = "a strategy that only transforms queries and keys, such as RoPE"
        self.require(only_transforms, "position", type(self.position).__name__, expected)
        # far queries and far keys have other positions, by which such a strategy would rotate them differently
        given = f"{type(self.position).__name__}, which depends on the length of the input"
        expected = "another strategy, such as RoPE without the scaling dynamic_ntk or longrope"
        self.require(self.position.prefix_consistent, "position", given, expected)
        self.neighbor_window, self.group, self.test_only = window, group, True
        if group is not None and group > 1 and self.shift_invariant:
            self.shift_invariant = None  # only for offsets that are multiples of the group size

    def transform_qk(self, q: Tensor, k: Tensor, state: Tensor | None, positions: TokenPositions) -> QueriesAndKeys:
        q_positions, k_positions = positions.compute_once(self._far_positions)
        near_q, near_k = self.position.transform_qk(q, k, state, positions)
        far_q, _ = self.position.transform_qk(q, k, state, q_positions)
        _, far_k = self.position.transform_qk(q, k, state, k_positions)
        return torch.cat([near_q, far_q], -1), torch.cat([near_k, far_k], -1)

    def _far_positions(self, positions: TokenPositions) -> tuple[TokenPositions, TokenPositions]:
        """Return the positions of queries and keys for scores of far keys."""
        if self.group is None:
            key_ids = torch.zeros_like(positions.ids)
            query_ids = key_ids + self.neighbor_window
        else:
            key_ids = positions.ids // self.group
            query_ids = key_ids + self.neighbor_window - self.neighbor_window // self.group
        positions = replace(positions, contiguous=False)  # the ids of neighbours may be equal
        return replace(positions, ids=query_ids), replace(positions, ids=key_ids)


class ReRoPE(SelfExtend):
    """`SelfExtend` with the distance ``min(m - n, w)``, where w = ``neighbor_window`` (Su 2023,
    https://kexue.fm/archives/9708).

    All far positions are one group. Distances stay below L for inputs of any length if w < L.

    Parameters: `0`, and those of the wrapped strategy.
    Cost: that of `SelfExtend`.

    Args:
        shape: Sizes of the model.
        position: Function that builds the wrapped strategy from the shape; see `SelfExtend`.
        neighbor_window: w, the number of last keys at exact distances, including the query's own; None is L/2.

    Raises:
        UserError: If ``neighbor_window`` is not positive, or the wrapped strategy does more than transform queries and
            keys, or depends on the length of the input.
    """

    def __init__(self, shape: Shape, position: StrategyBuilder = RoPE, neighbor_window: int | None = None) -> None:
        super().__init__(shape, position, neighbor_window, None)

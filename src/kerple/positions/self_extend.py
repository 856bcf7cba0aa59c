"""`SelfExtend` and `ReRoPE`: rotary positions for tests beyond the training length, with weights as they were trained.

Far keys get distances that training has seen. Queries and keys are rotated twice, for two views of attention: one sees
the nearest keys, the other those before them, and the softmax is over both.
"""

from collections.abc import Callable
from dataclasses import replace

import torch
from torch import Tensor

from kerple.positions.base import HOOKS, Position, Shape
from kerple.positions.rotary import RoPE
from kerple.positions.token_positions import TokenPositions
from kerple.positions.wrapper import Wrapper


class SelfExtend(Wrapper):
    """Query m meets key n as at distance m - n if the key is among the last w, else as at ``⌊m/g⌋ - ⌊n/g⌋ + w - ⌊w/g⌋``
    (Jin et al. 2024, arXiv 2401.01325, section 3).

    w is the neighbor window, counted in rows, and g the group size: an input of w + (L - w) · g tokens has no distance
    beyond those of training. It needs no training, and `fit` refuses it: test a run of the wrapped strategy with it.

    Parameters: `0` of its own, those of the wrapped strategy.
    Cost: the wrapped strategy's, three times; keys in a cache are twice as wide. Attention is computed by the fused
    kernels, in two parts that have as many scores together as plain attention has.

    Args:
        shape: Sizes of the model.
        position: Builder of the strategy that the model was trained with, given the shape. It transforms queries and
            keys and does nothing else, as `RoPE` does.
        neighbor_window: w, the number of last keys at exact distances, the query's own included; None is half the
            training length.
        group: g, the number of far positions that become one; None makes all of them one (`ReRoPE`).

    Raises:
        UserError: If a number is not positive, or the strategy has other hooks.
    """

    def __init__(
        self,
        shape: Shape,
        position: Callable[[Shape], Position] = RoPE,
        neighbor_window: int | None = None,
        group: int | None = 8,
    ) -> None:
        super().__init__(position(shape))
        window = max(shape.length // 2, 1) if neighbor_window is None else neighbor_window
        self.require(window >= 1, "neighbor_window", window, "at least 1 key, the query's own")
        self.require(group is None or group >= 1, "group", group, "at least 1 position, or none for all in one group")
        only = [hook for hook in HOOKS if self.position.uses(hook)] == [
            "transform_qk"
        ] and not self.position.varies_by_layer
        expected = "a strategy that transforms queries and keys and does nothing else, such as RoPE"
        self.require(only, "position", type(self.position).__name__, expected)
        self.neighbor_window, self.group, self.test_only = window, group, True
        if group is not None and group > 1 and self.shift_invariant:
            self.shift_invariant = None  # only for offsets that are multiples of the group size

    def transform_qk(
        self, q: Tensor, k: Tensor, state: Tensor | None, positions: TokenPositions
    ) -> tuple[Tensor, Tensor]:
        of_queries, of_keys = positions.once(self._grouped)
        near_q, near_k = self.position.transform_qk(q, k, state, positions)
        far_q, _ = self.position.transform_qk(q, k, state, of_queries)
        _, far_k = self.position.transform_qk(q, k, state, of_keys)
        return torch.cat([near_q, far_q], -1), torch.cat([near_k, far_k], -1)

    def _grouped(self, positions: TokenPositions) -> tuple[TokenPositions, TokenPositions]:
        """Positions of queries and keys in the view of far keys."""
        window = self.neighbor_window
        assert window is not None
        if self.group is None:
            return replace(positions, ids=torch.full_like(positions.ids, window)), replace(
                positions, ids=0 * positions.ids
            )
        grouped = positions.ids // self.group
        return replace(positions, ids=grouped + window - window // self.group), replace(positions, ids=grouped)


class ReRoPE(SelfExtend):
    """Query m meets key n as at distance m - n if the key is among the last w, else as at w: ``min(m - n, w)`` (Su
    2023, https://kexue.fm/archives/9708).

    It is `SelfExtend` with one group of all far positions, so that no input is too long.

    Parameters: `0` of its own, those of the wrapped strategy.
    Cost: that of `SelfExtend`.

    Args:
        shape: Sizes of the model.
        position: Builder of the strategy that the model was trained with; see `SelfExtend`.
        neighbor_window: w, the number of last keys at exact distances; None is half the training length.

    Raises:
        UserError: If the window is not positive, or the strategy has other hooks.
    """

    def __init__(
        self, shape: Shape, position: Callable[[Shape], Position] = RoPE, neighbor_window: int | None = None
    ) -> None:
        super().__init__(shape, position, neighbor_window, None)

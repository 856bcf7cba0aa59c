"""Attention that breaks a stick: the nearest key that wants it takes its share first."""

import torch
from torch import Tensor
from torch.nn import functional as F

from kerple.positions.base import Position, Shape
from kerple.positions.pairs import Pairs


class StickBreaking(Position):
    """``A_mn = σ(z_mn) · Π_{n < l < m} (1 - σ(z_ml))`` for n < m, z = q·k / √δ (Tan et al. 2025, arXiv 2410.17980,
    section 2).

    A query does not see itself. What is left of the stick goes nowhere, or to the query's own value (``rest``), as in
    the paper's appendix. log A is the score and the logarithm of the rest the sink, so that they need no other softmax:
    Σ A + rest = 1.

    Parameters: `0`. Cost: explicit scores, two logarithms and one running sum for each.

    Args:
        shape: What the model hands to every strategy.
        rest: Whether what is left goes to the query's own value.
    """

    shift_invariant = True

    def __init__(self, shape: Shape, rest: bool = False) -> None:
        super().__init__()
        self.rest = rest

    def mix(self, s: Tensor, q: Tensor, k: Tensor, pairs: Pairs) -> Tensor | tuple[Tensor, Tensor]:
        own = pairs.queries.rows[:, None] == pairs.keys.rows  # (Tq, Tk)
        before = pairs.seen & ~own
        kept = F.logsigmoid(-s) * before  # log of what each key leaves, (B, H, Tq, Tk)
        nearer = kept.flip(-1).cumsum(-1).flip(-1) - kept  # left by the keys between
        left = nearer[..., :1] + kept[..., :1]  # by all of them, (B, H, Tq, 1)
        taken = F.logsigmoid(s) + nearer
        if self.rest:
            return torch.where(own, left, taken)
        floor = torch.finfo(s.dtype).min / 4  # of what is not to count, but has to be finite
        return torch.where(own, floor, taken), left[..., 0]

"""`FIRE`: an attention bias that a small network computes from the distance relative to the query's position."""

from typing import Any

import torch
from torch import Tensor, nn

from kerple.positions.base import Position, Shape
from kerple.positions.fp32_matmul import precise, product
from kerple.positions.token_positions import QueryKeyBlock, heads_after_batch, readable, shift_rows

MAX_MIXED = 0.25  # largest fraction of distances at which the queries of a block may be in several pieces of the MLP


class FIRE(Position):
    """Bias ``MLP(ψ(d) / ψ(max(τ, m)))`` of a query at position m and a key at distance d, with ``ψ(x) = log(c·x + 1)``
    and learned c and τ (Li et al. 2024, arXiv 2310.04418, section 3.3).

    The MLP has one input, ``hidden`` ReLU units and H outputs, one per head. In Li et al., the threshold τ is named L.
    The initial value of c is 0.1. `constrain_` keeps c >= 0.001 and τ >= 1. For m > τ the bias also depends on m, so
    that a constant added to all positions changes the logits.

    Parameters: `2 * hidden + hidden * H + H + 2`, one set per layer by default.
    Cost: explicit scores (see `Position`). In a block of queries, most distances need a search among the ``hidden`` + 1
    segments of the MLP once; the others need it for each score.

    Args:
        shape: Sizes of the model.
        hidden: Width of the MLP.
        threshold: Initial value of τ in tokens; None is a quarter of the training length, as in Li et al. (512 of
            2048). Inside `RandomizedPositions`, None is a quarter of ``max_positions``.

    Raises:
        UserError: If ``hidden`` or ``threshold`` is below 1.
    """

    per_layer = True
    c: Tensor
    threshold_scale: Tensor

    def __init__(self, shape: Shape, hidden: int = 32, threshold: float | None = None) -> None:
        super().__init__()
        self.require(hidden >= 1, "hidden", hidden, "a positive width, such as 32")
        self.threshold = max(shape.positions / 4, 1.0) if threshold is None else threshold
        self.require(self.threshold >= 1, "threshold", threshold, "1 token or more, such as 512")
        self.learn("c", 1, 0.1, minimum=1e-3)
        self.learn("threshold_scale", 1, 1.0, minimum=1 / self.threshold)  # of order 1, as optimisers expect
        first, second = nn.Linear(1, hidden, dtype=torch.float32), nn.Linear(hidden, shape.heads, dtype=torch.float32)
        self.mlp = nn.Sequential(first, nn.ReLU(), second)

    def modify_scores(self, s: Tensor, q: Tensor, k: Tensor, block: QueryKeyBlock) -> Tensor:
        ids = block.queries.ids
        scale = torch.log1p(self.c * torch.maximum(self.threshold_scale * self.threshold, ids.to(self.c.dtype)))
        factor = precise(scale).reciprocal()[..., None]  # ((B,) Tq, 1)
        slope, intercept, knots = pieces = self._pieces()
        if block.keys.contiguous and readable(ids):
            queries, keys = s.shape[2:]
            # columns of `shift_rows`: the distances from the last query back to the keys, then 0 for later keys
            curve = self._logarithm(torch.arange(keys - 1, -queries - 1, -1).clamp(min=0))  # (columns,)
            piece, other = (torch.bucketize((curve * x).detach(), knots) for x in (factor.amin(), factor.amax()))
            mixed = (piece != other).nonzero()[:, 0]
            if len(mixed) <= MAX_MIXED * len(curve):
                # where all queries have one piece, the bias is slope · ψ(d), a function of distance, times ``factor``
                curves = torch.stack([slope[:, piece] * curve, intercept[:, piece]], -2)  # (H, 2, columns)
                features = torch.cat([factor, torch.ones_like(factor)], -1)  # ((B,) Tq, 2)
                bias = product(features[:, None] if features.ndim == 3 else features, curves)
                bias = bias.index_copy(-1, mixed, self._evaluate(curve[mixed] * factor, *pieces))
                return s + shift_rows(bias)[..., :keys]
        return s + self._evaluate(self._logarithm(block.distance) * factor, *pieces)

    def _logarithm(self, distance: Tensor) -> Tensor:
        """Return ψ of distances."""
        return torch.log1p(self.c * precise(distance.to(self.c.dtype)))

    def _evaluate(self, x: Tensor, slope: Tensor, intercept: Tensor, knots: Tensor) -> Tensor:
        """Return the MLP of x, ((B,) Tq, N) in [0, 1], from the result of `_pieces`; ((B,) H, Tq, N)."""
        piece = torch.bucketize(x.detach(), knots)
        return heads_after_batch(slope[:, piece] * x + intercept[:, piece])

    def _pieces(self) -> tuple[Tensor, Tensor, Tensor]:
        """Return slopes and intercepts (H, hidden + 1), and knots (hidden,).

        The MLP is a piecewise linear function of one number. On [0, 1], its pieces meet at the sorted knots.
        """
        first: Any = self.mlp[0]
        second: Any = self.mlp[2]
        w, b = first.weight[:, 0], first.bias  # (hidden,)
        with torch.no_grad():
            knots = (-b / w).nan_to_num(0.0).clamp(0, 1).sort().values
            edges = torch.cat([knots.new_zeros(1), knots, knots.new_ones(1)])
            middle = (edges[1:] + edges[:-1]) / 2  # (hidden + 1,)
            active = (middle[:, None] * w + b > 0).to(w.dtype)  # (hidden + 1, hidden)
        slope = product(second.weight, (active * w).T)  # (H, hidden + 1)
        intercept = product(second.weight, (active * b).T) + second.bias[:, None]
        return slope, intercept, knots

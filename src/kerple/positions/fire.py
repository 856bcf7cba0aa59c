"""`FIRE`: an attention bias that a small network computes from the distance relative to the query's position."""

from typing import Any

import torch
from torch import Tensor, nn

from kerple.positions.base import Position, Shape
from kerple.positions.fp32_matmul import precise, product
from kerple.positions.token_positions import QueryKeyBlock, heads_after_batch


class FIRE(Position):
    """Bias ``MLP(ψ(d) / ψ(max(τ, m)))`` of a query at position m and a key at distance d, with ``ψ(x) = log(c·x + 1)``
    and learned c and τ (Li et al. 2024, arXiv 2310.04418, section 3.3).

    The MLP has one input, ``hidden`` ReLU units and H outputs, one per head. In Li et al., the threshold τ is named L.
    The initial value of c is 0.1. `constrain_` keeps c >= 0.001 and τ >= 1. For m > τ the bias also depends on m, so
    that a constant added to all positions changes the logits.

    Parameters: `2 * hidden + hidden * H + H + 2`, one set per layer by default.
    Cost: explicit scores (see `Position`), and a search among ``hidden`` + 1 segments of the MLP for each score.

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
        distance = precise(block.distance.to(self.c.dtype))  # ((B,) Tq, Tk)
        scale = torch.maximum(self.threshold_scale * self.threshold, block.queries.ids.to(self.c.dtype))
        x = torch.log1p(self.c * distance) / torch.log1p(self.c * scale)[..., None]  # ((B,) Tq, Tk) in [0, 1]
        slope, intercept, knots = self._pieces()
        piece = torch.bucketize(x.detach(), knots)  # ((B,) Tq, Tk)
        return s + heads_after_batch(slope[:, piece] * x + intercept[:, piece])

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

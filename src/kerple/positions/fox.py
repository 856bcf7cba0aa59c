"""`FoX`: forget gates, which depend on the tokens between query and key."""

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from kerple.positions.angles import exact
from kerple.positions.base import Position, Shape
from kerple.positions.products import product
from kerple.positions.token_positions import QueryKeyBlock, TokenPositions


class FoX(Position):
    """Forget gates: ``Σ_{n < l <= m} log σ(w_h·x_l + b_h)`` (Lin et al. 2025, arXiv 2503.02130, section 3.1).

    x_l is what the block's queries are made from. w starts as N(0, 0.02).

    Parameters: `H * D + H`, one set per layer unless said otherwise.
    Cost: one running sum over the keys, and one difference of it per score.

    Args:
        shape: Sizes of the model.
        start: Initial value of b; the larger it is, the more is remembered at first.
    """

    shift_invariant = True
    per_layer = True

    def __init__(self, shape: Shape, start: float = 0.0) -> None:
        super().__init__()
        self.gates = nn.Linear(shape.dim, shape.heads, dtype=torch.float32)
        nn.init.normal_(self.gates.weight, std=0.02)
        nn.init.constant_(self.gates.bias, start)

    def token_state(self, x: Tensor, positions: TokenPositions, past: Tensor | None) -> Tensor:
        gates = F.logsigmoid(product(x, self.gates.weight.T) + self.gates.bias).mT  # (B, H, T)
        sums = gates.to(exact(x.device)).cumsum(-1)[..., None]  # (B, H, T, 1) fp64: differences are what counts
        return sums if past is None else sums + past[:, :, -1:]

    def modify_scores(self, s: Tensor, q: Tensor, k: Tensor, block: QueryKeyBlock) -> Tensor:
        assert block.state is not None, "FoX's scores need the state of the keys"
        sums, queries = block.state[..., 0], len(block.queries.rows)  # (B, H, Tk)
        # sums are counted from the first query, so that rounding to fp32 is smallest for the keys near to it
        sums = (sums - sums[..., -queries, None].detach()).to(s.dtype)
        # not a difference of all pairs, for which the backward pass would write one more (B, H, Tq, Tk)
        return s + (sums[..., -queries:, None] + -sums[..., None, :])  # (B, H, Tq, Tk)

"""Strategies in which the tokens between query and key decide how far apart they are."""

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from kerple.errors import UserError
from kerple.positions.angles import exact
from kerple.positions.base import Position, Shape
from kerple.positions.products import product


class CoPE(Position):
    """Positions counted in tokens that matter to the query: ``q·e[p_mn]`` (Golovneva et al. 2024, arXiv 2405.18719,
    section 4).

    ``p_mn = Σ_{n <= l <= m} σ(q_m·k_l / √δ)``, at most rows - 1; between whole numbers e is interpolated. As in the
    published code q·e is not divided by √δ, and e starts at 0.

    Parameters: `rows * δ`, shared by heads, one set per layer unless said otherwise.
    Cost: the scores once more, a running sum of them, and a look-up in rows products per query.

    Args:
        shape: What the model hands to every strategy.
        rows: Number of vectors; further counts share the last.
        share_across_layers: One set of vectors for all layers, or one per layer (if None, as in the paper).

    Raises:
        UserError: If there are fewer than 2 rows.
    """

    shift_invariant = True

    def __init__(self, shape: Shape, rows: int = 64, share_across_layers: bool | None = None) -> None:
        super().__init__()
        if rows < 2:
            raise UserError(f"CoPE: rows: got {rows}, expected 2 or more; the paper uses 64")
        self.share_across_layers = bool(share_across_layers)
        self.vectors = nn.Parameter(torch.zeros(rows, shape.head_dim, dtype=torch.float32))

    def scores(
        self, q: Tensor, k: Tensor, query_positions: Tensor, key_positions: Tensor, content: Tensor | None
    ) -> Tensor:
        last = self.vectors.shape[0] - 1
        seen = query_positions[:, None] >= key_positions  # (Tq, Tk)
        gates = (product(q, k.mT) * q.shape[-1] ** -0.5).sigmoid() * seen  # (B, H, Tq, Tk)
        count = gates.flip(-1).cumsum(-1).flip(-1).clamp(max=last)  # (B, H, Tq, Tk)
        products = product(q, self.vectors.T)  # (B, H, Tq, rows)
        below = count.detach().floor()
        share, row = count - below, below.long()
        return torch.lerp(products.gather(-1, row), products.gather(-1, (row + 1).clamp(max=last)), share)


class FoX(Position):
    """Forget gates: ``Σ_{n < l <= m} log σ(w_h·x_l + b_h)`` (Lin et al. 2025, arXiv 2503.02130, section 3.1).

    x_l is what the block's queries are made from. w starts as N(0, 0.02).

    Parameters: `H * D + H`, one set per layer unless said otherwise.
    Cost: one running sum over the keys, and one difference of it per score.

    Args:
        shape: What the model hands to every strategy.
        start: Of b; the larger, the more is remembered at first.
        share_across_layers: One set of gates for all layers, or one per layer (if None, as in the paper).
    """

    shift_invariant = True

    def __init__(self, shape: Shape, start: float = 0.0, share_across_layers: bool | None = None) -> None:
        super().__init__()
        self.share_across_layers = bool(share_across_layers)
        self.gates = nn.Linear(shape.dim, shape.heads, dtype=torch.float32)
        nn.init.normal_(self.gates.weight, std=0.02)
        nn.init.constant_(self.gates.bias, start)

    def content(self, x: Tensor) -> Tensor:
        return F.logsigmoid(product(x, self.gates.weight.T) + self.gates.bias).mT[..., None]  # (B, H, T, 1)

    def scores(
        self, q: Tensor, k: Tensor, query_positions: Tensor, key_positions: Tensor, content: Tensor | None
    ) -> Tensor:
        assert content is not None, "FoX's scores are made of its content"
        sums = content[..., 0].to(exact(content.device)).cumsum(-1)  # (B, H, Tk)
        rows = torch.searchsorted(key_positions, query_positions)  # (Tq,) where the queries stand among the keys
        # counted from the first query, so that rounding to fp32 spares the near keys and meets those long forgotten
        sums = (sums - sums[..., rows[:1]].detach()).to(content.dtype)
        return sums[..., rows, None] - sums[..., None, :]  # (B, H, Tq, Tk)

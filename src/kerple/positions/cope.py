"""`CoPE`: contextual positions, which count the tokens that a query attends to."""

import torch
from torch import Tensor, nn

from kerple.positions.base import Position, Shape
from kerple.positions.fp32_matmul import product
from kerple.positions.token_positions import QueryKeyBlock


class CoPE(Position):
    """Contextual positions: ``q_m·e[p_mn]`` is added to the score of query m and key n, with learned vectors e and a
    sum p_mn of gates of the keys n to m (Golovneva et al. 2024, arXiv 2405.18719, section 4).

    ``p_mn = min(rows - 1, Σ_{n <= l <= m} σ(q_m·k_l / √δ))``, where δ is the head dimension. For p_mn between two
    integers, the vectors of both are interpolated. As in the published code, q_m·e is not divided by √δ, and e is
    initialised to 0.

    Parameters: `rows * δ`, shared by heads, one set per layer by default.
    Cost: explicit scores, cumulative sums of the gates, ``rows`` inner products per query, and two look-ups among these
    products per score.

    Args:
        shape: Sizes of the model.
        rows: Number of vectors in e; sums above rows - 1 use the last vector.

    Raises:
        UserError: If there are fewer than 2 rows.
    """

    shift_invariant = True
    per_layer = True

    def __init__(self, shape: Shape, rows: int = 64) -> None:
        super().__init__()
        self.require(rows >= 2, "rows", rows, "2 or more, such as 64")
        self.vectors = nn.Parameter(torch.zeros(rows, shape.head_dim, dtype=torch.float32))

    def modify_scores(self, s: Tensor, q: Tensor, k: Tensor, block: QueryKeyBlock) -> Tensor:
        last = self.vectors.shape[0] - 1
        gates = s.sigmoid() * block.seen  # (B, H, Tq, Tk)
        p = gates.flip(-1).cumsum(-1).flip(-1).clamp(max=last)  # p_mn, (B, H, Tq, Tk)
        products = product(q, self.vectors.T)  # (B, H, Tq, rows)
        below = p.detach().floor()
        fraction, row = p - below, below.long()
        return s + torch.lerp(products.gather(-1, row), products.gather(-1, (row + 1).clamp(max=last)), fraction)

"""`TransformerXL`: products of the query with a projected sinusoid of the distance."""

import torch
from torch import Tensor, nn

from kerple.positions.angles import angles
from kerple.positions.base import Position, Shape
from kerple.positions.products import precise, product
from kerple.positions.token_positions import QueryKeyBlock


class TransformerXL(Position):
    """Relative scores with a projected sinusoid of the distance (Dai et al. 2019, arXiv 1901.02860, section 3.3).

    ``((q + u)·k + (q + v)·W_R r_d) / √δ``, ``r_d = [sin(d·ω), cos(d·ω)]``, ``ω_i = 10000^(-2i/D)``; u, v, W_R start
    as N(0, 0.02).

    Parameters: `2 * D + D * D`, one set per layer unless said otherwise.
    Cost: of the scores, once more: q meets one vector a distance, and the products are shifted in place, not gathered.
    Where positions have gaps, H times the multiplications.

    Args:
        shape: Sizes of the model; its width D must be even.

    Raises:
        UserError: If D is odd.
    """

    shift_invariant = True
    per_layer = True

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.require(shape.dim % 2 == 0, "dim", shape.dim, "an even width: sines and cosines come in pairs")
        heads, head_dim = shape.heads, shape.head_dim
        self.u = nn.Parameter(torch.empty(heads, head_dim, dtype=torch.float32).normal_(std=0.02))
        self.v = nn.Parameter(torch.empty(heads, head_dim, dtype=torch.float32).normal_(std=0.02))
        self.projection = nn.Parameter(torch.empty(heads, head_dim, shape.dim, dtype=torch.float32).normal_(std=0.02))

    def modify_scores(self, s: Tensor, q: Tensor, k: Tensor, block: QueryKeyBlock) -> Tensor:
        of_key = product(k, self.u[:, :, None]).mT  # (B, H, 1, Tk)
        by = precise(q) + self.v[:, None]  # (B, H, Tq, δ)
        if block.keys.contiguous:
            of_distance = self._shifted(by, k.shape[2])
        else:
            of_distance = self._factored(by, block.queries.ids, block.keys.ids)
        return s + (of_key + of_distance) * self.u.shape[-1] ** -0.5  # (B, H, Tq, Tk)

    def _shifted(self, by: Tensor, keys: int) -> Tensor:
        queries = by.shape[2]
        columns = queries + keys  # one for each distance, the largest first, and a spare one
        distance = keys - 1 - torch.arange(columns, device=by.device)  # (columns,)
        vectors = product(self._waves(distance).to(by.dtype), self.projection.mT)  # (H, columns, δ)
        products = product(by, vectors.mT).flatten(-2)  # (B, H, Tq · columns)
        # a row begins one entry sooner than the row above, so read rows that are one entry shorter
        shifted = products.narrow(-1, queries - 1, queries * (columns - 1)).unflatten(-1, (queries, columns - 1))
        return shifted[..., :keys]  # (B, H, Tq, Tk)

    def _factored(self, by: Tensor, of_queries: Tensor, of_keys: Tensor) -> Tensor:
        # sin and cos of a difference of positions, by the angle addition theorem: exact for any positions
        first = of_keys[..., :1]
        sin_m, cos_m = self._waves(of_queries - first).to(by.dtype).chunk(2, -1)  # ((B, 1,) Tq, D/2) each
        sin_n, cos_n = self._waves(of_keys - first).to(by.dtype).chunk(2, -1)  # ((B, 1,) Tk, D/2) each
        of_sin, of_cos = product(by, self.projection).chunk(2, -1)  # (B, H, Tq, D/2) each
        return product(of_sin * sin_m + of_cos * cos_m, cos_n.mT) + product(of_cos * sin_m - of_sin * cos_m, sin_n.mT)

    def _waves(self, distance: Tensor) -> Tensor:
        angle = angles(distance, self.projection.shape[-1], 10000.0)  # ((B,) N, D/2)
        waves = torch.cat([angle.sin(), angle.cos()], -1)
        return waves if waves.ndim == 2 else waves[:, None]  # (N, D) or (B, 1, N, D), fp64

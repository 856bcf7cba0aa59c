"""`TransformerXL`: products of queries with a projected sinusoid of the distance."""

import torch
from torch import Tensor, nn

from kerple.positions.angles import angles
from kerple.positions.base import Position, Shape
from kerple.positions.fp32_matmul import precise, product
from kerple.positions.token_positions import QueryKeyBlock, shift_rows


class TransformerXL(Position):
    """Scores with learned vectors u and v, and a learned projection W_R of the sinusoid r_d of the distance d (Dai et
    al. 2019, arXiv 1901.02860, section 3.3).

    At distance d the score is ``((q + u)·k + (q + v)·W_R r_d) / √δ``, where δ is the head dimension, ``r_d = [sin(d·ω),
    cos(d·ω)]`` and ``ω_i = 10000^(-2i/D)`` for i = 0..D/2-1. Each head has its own u, v and W_R. They are initialised
    from N(0, 0.02²).

    Parameters: `2 * D + D * D`, one set per layer by default.
    Cost: explicit scores, and a second inner product for each score: of δ terms, or of D terms with
    `RandomizedPositions`.

    Args:
        shape: Sizes of the model; its width D must be even.

    Raises:
        UserError: If D is odd.
    """

    shift_invariant = True
    per_layer = True

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.require(shape.dim % 2 == 0, "dim", shape.dim, "an even number, because sines and cosines come in pairs")
        heads, head_dim = shape.heads, shape.head_dim
        self.u = nn.Parameter(torch.empty(heads, head_dim, dtype=torch.float32).normal_(std=0.02))
        self.v = nn.Parameter(torch.empty(heads, head_dim, dtype=torch.float32).normal_(std=0.02))
        self.projection = nn.Parameter(torch.empty(heads, head_dim, shape.dim, dtype=torch.float32).normal_(std=0.02))

    def modify_scores(self, s: Tensor, q: Tensor, k: Tensor, block: QueryKeyBlock) -> Tensor:
        key_scores = product(k, self.u[:, :, None]).mT  # (B, H, 1, Tk)
        q = precise(q) + self.v[:, None]  # (B, H, Tq, δ)
        if block.keys.contiguous:
            distance_scores = self._shifted(q, k.shape[2])
        else:
            distance_scores = self._factored(q, block.queries.ids, block.keys.ids)
        return s + (key_scores + distance_scores) * self.u.shape[-1] ** -0.5  # (B, H, Tq, Tk)

    def _shifted(self, q: Tensor, keys: int) -> Tensor:
        """Return ``q·W_R r_d`` (B, H, Tq, Tk) for contiguous positions of the queries and ``keys`` keys."""
        queries = q.shape[2]
        columns = queries + keys  # one for each distance from keys - 1 to 1 - queries, and one that is not used
        distance = keys - 1 - torch.arange(columns, device=q.device)  # (columns,)
        vectors = product(self._waves(distance).to(q.dtype), self.projection.mT)  # (H, columns, δ)
        return shift_rows(product(q, vectors.mT))[..., :keys]  # (B, H, Tq, Tk)

    def _factored(self, q: Tensor, query_ids: Tensor, key_ids: Tensor) -> Tensor:
        """Return ``q·W_R r_d`` (B, H, Tq, Tk) for any positions ((B,) Tq) and ((B,) Tk).

        The angle addition theorem gives the sine and cosine of each difference of positions.
        """
        first = key_ids[..., :1]
        sin_m, cos_m = self._waves(query_ids - first).to(q.dtype).chunk(2, -1)  # ((B, 1,) Tq, D/2) each
        sin_n, cos_n = self._waves(key_ids - first).to(q.dtype).chunk(2, -1)  # ((B, 1,) Tk, D/2) each
        q_sin, q_cos = product(q, self.projection).chunk(2, -1)  # (B, H, Tq, D/2) each
        return product(q_sin * sin_m + q_cos * cos_m, cos_n.mT) + product(q_cos * sin_m - q_sin * cos_m, sin_n.mT)

    def _waves(self, distance: Tensor) -> Tensor:
        """Return r_d for distances ((B,) N), (N, D) or (B, 1, N, D) fp64."""
        angle = angles(distance, self.projection.shape[-1], 10000.0)  # ((B,) N, D/2)
        waves = torch.cat([angle.sin(), angle.cos()], -1)
        return waves if waves.ndim == 2 else waves[:, None]

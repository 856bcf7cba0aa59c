"""Strategies in which a query meets a vector of its distance to the key."""

import torch
from torch import Tensor, nn

from kerple.errors import UserError
from kerple.positions.angles import frequencies
from kerple.positions.base import Position, Shape
from kerple.positions.products import precise, product


class Shaw(Position):
    """Learned vectors of the clipped distance, beside keys and values (Shaw et al. 2018, arXiv 1803.02155, section 3).

    ``q·(k + a^K[min(d, clip)]) / √δ``, and ``Σ_n α_mn · (v_n + a^V[min(d, clip)])`` for the output. A causal model
    has no use for the vectors of negative distances. They start Xavier-uniform.

    Parameters: `2 * (clip + 1) * δ`, shared by heads, one set per layer unless said otherwise.
    Cost: q meets clip + 1 vectors, and the products are then read at each distance: never T × T vectors of δ.

    Args:
        shape: What the model hands to every strategy.
        clip: Distance from which all are the same. 0 makes the strategy blind to distance.
        share_across_layers: One set of vectors for all layers, or one per layer (if None, as in the paper).

    Raises:
        UserError: If ``clip`` is negative.
    """

    shift_invariant = True

    def __init__(self, shape: Shape, clip: int = 16, share_across_layers: bool | None = None) -> None:
        super().__init__()
        if clip < 0:
            raise UserError(f"Shaw: clip: got {clip}, expected a distance of 0 or more; the paper uses 16")
        self.clip, self.share_across_layers = clip, bool(share_across_layers)
        self.key_vectors = nn.Parameter(torch.empty(clip + 1, shape.head_dim, dtype=torch.float32))
        self.value_vectors = nn.Parameter(torch.empty(clip + 1, shape.head_dim, dtype=torch.float32))
        nn.init.xavier_uniform_(self.key_vectors)
        nn.init.xavier_uniform_(self.value_vectors)

    def scores(
        self, q: Tensor, k: Tensor, query_positions: Tensor, key_positions: Tensor, content: Tensor | None
    ) -> Tensor:
        row = self._row(query_positions, key_positions)  # (Tq, Tk)
        products = product(q, self.key_vectors.T) * q.shape[-1] ** -0.5  # (B, H, Tq, clip + 1)
        return products.gather(-1, row.expand(*q.shape[:2], *row.shape))  # (B, H, Tq, Tk)

    def values(self, attention: Tensor, query_positions: Tensor, key_positions: Tensor) -> Tensor:
        row = self._row(query_positions, key_positions).expand_as(attention)  # (B, H, Tq, Tk)
        shares = precise(attention.new_zeros(*attention.shape[:3], self.clip + 1))
        shares = shares.scatter_add(-1, row, precise(attention))  # (B, H, Tq, clip + 1), what each vector gets
        return product(shares, self.value_vectors).to(attention.dtype)  # (B, H, Tq, δ)

    def _row(self, query_positions: Tensor, key_positions: Tensor) -> Tensor:
        return (query_positions[:, None] - key_positions).clamp(0, self.clip)  # (Tq, Tk)


class TransformerXL(Position):
    """Relative scores with a projected sinusoid of the distance (Dai et al. 2019, arXiv 1901.02860, section 3.3).

    ``((q + u)·k + (q + v)·W_R r_d) / √δ``, ``r_d = [sin(d·ω), cos(d·ω)]``, ``ω_i = 10000^(-2i/D)``; u, v, W_R start
    as N(0, 0.02).

    Parameters: `2 * D + D * D`, one set per layer unless said otherwise.
    Cost: of the scores, once more: q meets one vector a distance, and the products are shifted in place, not gathered.

    Args:
        shape: What the model hands to every strategy; its width D must be even.
        share_across_layers: One set of parameters for all layers, or one per layer (if None, as in the paper).

    Raises:
        UserError: If D is odd.
    """

    shift_invariant = True

    contiguous = True
    """Whether positions follow each other without gaps; if not, H times the multiplications are needed."""

    def __init__(self, shape: Shape, share_across_layers: bool | None = None) -> None:
        super().__init__()
        if shape.dim % 2:
            raise UserError(
                f"TransformerXL: dim: got {shape.dim}, expected an even width: sines and cosines come in pairs"
            )
        self.share_across_layers = bool(share_across_layers)
        heads, head_dim = shape.heads, shape.head_dim
        self.u = nn.Parameter(torch.empty(heads, head_dim, dtype=torch.float32).normal_(std=0.02))
        self.v = nn.Parameter(torch.empty(heads, head_dim, dtype=torch.float32).normal_(std=0.02))
        self.projection = nn.Parameter(torch.empty(heads, head_dim, shape.dim, dtype=torch.float32).normal_(std=0.02))

    def scores(
        self, q: Tensor, k: Tensor, query_positions: Tensor, key_positions: Tensor, content: Tensor | None
    ) -> Tensor:
        of_key = product(k, self.u[:, :, None]).mT  # (B, H, 1, Tk)
        by = precise(q) + self.v[:, None]  # (B, H, Tq, δ)
        of_distance = (self._shifted if self.contiguous else self._factored)(by, query_positions, key_positions)
        return (of_key + of_distance) * q.shape[-1] ** -0.5  # (B, H, Tq, Tk)

    def _shifted(self, by: Tensor, query_positions: Tensor, key_positions: Tensor) -> Tensor:
        queries, keys = len(query_positions), len(key_positions)
        columns = queries + keys  # one for each distance, the largest first, and a spare one
        largest = query_positions[-1] - key_positions[0]
        distance = largest - torch.arange(columns, device=by.device)  # (columns,)
        vectors = product(self._waves(distance).to(by.dtype), self.projection.mT)  # (H, columns, δ)
        products = product(by, vectors.mT).flatten(-2)  # (B, H, Tq · columns)
        # a row begins one entry sooner than the row above, so read rows that are one entry shorter
        shifted = products.narrow(-1, queries - 1, queries * (columns - 1)).unflatten(-1, (queries, columns - 1))
        return shifted[..., :keys]  # (B, H, Tq, Tk)

    def _factored(self, by: Tensor, query_positions: Tensor, key_positions: Tensor) -> Tensor:
        # sin and cos of a difference of positions, by the angle addition theorem: exact for any positions
        first = key_positions[0]
        sin_m, cos_m = self._waves(query_positions - first).to(by.dtype).chunk(2, -1)  # (Tq, D/2) each
        sin_n, cos_n = self._waves(key_positions - first).to(by.dtype).chunk(2, -1)  # (Tk, D/2) each
        of_sin, of_cos = product(by, self.projection).chunk(2, -1)  # (B, H, Tq, D/2) each
        return product(of_sin * sin_m + of_cos * cos_m, cos_n.T) + product(of_cos * sin_m - of_sin * cos_m, sin_n.T)

    def _waves(self, distance: Tensor) -> Tensor:
        turns = frequencies(self.projection.shape[-1], 10000.0, distance.device)  # (D/2,)
        angle = distance.to(turns.dtype)[:, None] * turns
        return torch.cat([angle.sin(), angle.cos()], -1)  # (N, D) fp64

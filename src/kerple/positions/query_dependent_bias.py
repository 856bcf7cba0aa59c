"""`LearnedRelativeBias`: an attention bias by distance that is a linear combination of learned curves."""

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from kerple.positions.base import Position, Shape
from kerple.positions.fp32_matmul import product
from kerple.positions.temperature import Temperature
from kerple.positions.token_positions import QueriesAndKeys, TokenPositions


class LearnedRelativeBias(Position):
    """Bias ``Σ_r (W_h x_m)_r · P[r, d]`` of query m in head h at distances d < ``extent``, with learned W_h and P, as
    in Inkling (2026).

    Source: published code of Inkling (Thinking Machines) and of x-transformers; there is no paper. x_m is the hidden
    state of token m after the block's norm. All heads share the curves P[r]; each head has its own matrix W_h. P and
    W_h are initialised from N(0, 0.02²). With ``temperature_length``, q·k and this bias are multiplied by the factor
    ``inkling`` of `Temperature`, as in the global layers of Inkling.

    Parameters: `(D * H + (extent or L)) * (rank or 8)`, one set per layer by default.
    Cost: explicit scores of keys at distances below ``extent``, an inner product of ``rank`` numbers for each of these
    scores, and H · ``rank`` numbers per cached token. Attention to farther keys is fused.

    Args:
        shape: Sizes of the model.
        rank: Number of curves, at most the head dimension δ; None is the smaller of 8 and δ. Inkling has 16, with
            δ = 128.
        extent: Smallest distance without a bias; None is the training length L. Inkling uses the window in local
            layers, and 1024 in global layers.
        temperature_length: Number of visible keys above which the scores grow; None for no temperature. Inkling has
            128000.

    Raises:
        UserError: If ``rank``, ``extent`` or ``temperature_length`` is out of range.
    """

    shift_invariant = True
    per_layer = True

    def __init__(
        self, shape: Shape, rank: int | None = None, extent: int | None = None, temperature_length: int | None = None
    ) -> None:
        super().__init__()
        rank = min(8, shape.head_dim) if rank is None else rank
        self.require(1 <= rank <= shape.head_dim, "rank", rank, f"1 to {shape.head_dim}, the head dimension")
        self.extent = shape.length if extent is None else extent
        self.heads = shape.heads
        self.require(self.extent >= 1, "extent", extent, "a distance of 1 or more, or none for the training length")
        self.temperature = (
            None if temperature_length is None else Temperature(shape, "inkling", 0.1, temperature_length)
        )
        self.weights = nn.Parameter(torch.empty(shape.heads * rank, shape.dim, dtype=torch.float32).normal_(std=0.02))
        self.curves = nn.Parameter(torch.empty(rank, self.extent, dtype=torch.float32).normal_(std=0.02))

    def token_state(self, x: Tensor, positions: TokenPositions, past: Tensor | None) -> Tensor:
        return product(x, self.weights.T).unflatten(-1, (self.heads, -1)).transpose(1, 2)  # (B, H, T, rank)

    def transform_qk(self, q: Tensor, k: Tensor, state: Tensor | None, positions: TokenPositions) -> QueriesAndKeys:
        return (q, k) if self.temperature is None else self.temperature.transform_qk(q, k, state, positions)

    def query_bias(self, q: Tensor, state: Tensor | None, positions: TokenPositions) -> tuple[Tensor, Tensor]:
        assert state is not None, "the bias needs the state of the queries"
        mixture = state[:, :, -q.shape[2] :]  # (B, H, Tq, rank)
        factor = 1.0 if self.temperature is None else self.temperature.factor(positions, mixture.dtype)
        return mixture * factor, F.pad(self.curves, (0, 1))

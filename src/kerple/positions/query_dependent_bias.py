"""`LearnedRelativeBias`: an attention bias by distance that is a linear combination of learned curves."""

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from kerple.positions.base import Position, Shape
from kerple.positions.fp32_matmul import product
from kerple.positions.temperature import Temperature
from kerple.positions.token_positions import QueryKeyBlock, TokenPositions, shift_rows


class LearnedRelativeBias(Position):
    """Bias ``Σ_r (W_h x_m)_r · P[r, d]`` of query m in head h at distances d < ``extent``, with learned W_h and P, as
    in Inkling (2026).

    Source: published code of Inkling (Thinking Machines) and of x-transformers; there is no paper. x_m is the hidden
    state of token m after the block's norm. All heads share the curves P[r]; each head has its own matrix W_h. P and
    W_h are initialised from N(0, 0.02²). With ``temperature_length`` the biased scores are multiplied by the factor
    ``inkling`` of `Temperature`, as in the global layers of Inkling.

    Parameters: `(D * H + (extent or L)) * (rank or 8)`, one set per layer by default.
    Cost: explicit scores, an inner product of ``rank`` numbers per score, and H · ``rank`` numbers per cached token.

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

    def modify_scores(self, s: Tensor, q: Tensor, k: Tensor, block: QueryKeyBlock) -> Tensor:
        assert block.state is not None, "the bias needs the state of the queries"
        queries, keys = s.shape[2:]
        mixture = block.state[:, :, -queries:]  # (B, H, Tq, rank)
        if block.keys.contiguous:
            # keys before the last ``near`` ones are at distance ``extent`` or more from every query, and have no bias
            near = min(keys, self.extent + queries - 1)
            curves = F.pad(self.curves[:, :near].flip(-1), (near - min(near, self.extent), queries))
            bias = shift_rows(product(mixture, curves))[..., :near]
            s = torch.cat([s[..., :-near], s[..., -near:] + bias], -1) if near < keys else s + bias
        else:
            biases = product(mixture, F.pad(self.curves, (0, 1)))  # (B, H, Tq, extent + 1)
            s = s + biases.gather(-1, block.clipped_distance(self.extent).expand_as(s))
        return s if self.temperature is None else s * self.temperature.factor(block.queries, s.dtype)

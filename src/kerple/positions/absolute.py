"""`Sinusoidal` and `Learned`, which add one vector per position to token embeddings, and `NoPE`, which adds nothing.

D is the width of the model, and x_t the embedding of the token at position t.
"""

from typing import Literal

import torch
from torch import Tensor, nn

from kerple.positions.angles import angles, exact_dtype
from kerple.positions.base import Position, Shape
from kerple.positions.fp32_matmul import precise
from kerple.positions.token_positions import TokenPositions

Beyond = Literal["error", "clamp", "interpolate"]


class NoPE(Position):
    """No positional information except the causal mask (Haviv et al. 2022, arXiv 2203.16634; Kazemnejad et al. 2023,
    arXiv 2305.19466).

    Parameters: `0`. Cost: none.

    Args:
        shape: Sizes of the model.
    """

    shift_invariant = True

    def __init__(self, shape: Shape) -> None:
        super().__init__()


class Sinusoidal(Position):
    """Sines and cosines of the position, added to the embeddings (Vaswani et al. 2017, arXiv 1706.03762, section 3.5).

    ``x_t + P[t]``, ``P[t, 2i] = sin(t / base^(2i/D))``, ``P[t, 2i+1] = cos(t / base^(2i/D))`` for i = 0..D/2-1. In the
    authors' code, tensor2tensor, the exponents are i/(D/2 - 1) instead of i/(D/2).

    Parameters: `0`. Cost: one (T, D) table per forward pass.

    Args:
        shape: Sizes of the model; its width D must be even.
        base: Base of the frequencies; the longest wavelength is about 2π · base tokens.
        scaled: Whether the embeddings are multiplied by √D first, as in Vaswani et al. 2017, section 3.4. GPT-NeoX and
            the experiments of the KERPLE paper (arXiv 2205.09921) do not scale them. Waves of amplitude 1 are much
            larger than unscaled embeddings from N(0, 0.02²).

    Raises:
        UserError: If D is odd, or the base is not above 1.
    """

    def __init__(self, shape: Shape, base: float = 10000.0, scaled: bool = False) -> None:
        super().__init__()
        self.require(shape.dim % 2 == 0, "dim", shape.dim, "an even number, because sines and cosines come in pairs")
        self.require(base > 1, "base", base, "a number above 1, such as 10000")
        self.dim = shape.dim
        self.base = base
        self.embedding_scale = shape.dim**0.5 if scaled else 1.0

    def embed(self, x: Tensor, positions: TokenPositions) -> Tensor:
        angle = angles(positions.ids, self.dim, self.base)  # ((B,) T, D/2) fp64
        waves = torch.stack([angle.sin(), angle.cos()], -1).flatten(-2)  # ((B,) T, D)
        return (precise(x) * self.embedding_scale + waves.to(precise(x).dtype)).to(x.dtype)


class Learned(Position):
    """One learned vector per position, added to the embeddings: ``x_t + P[t]`` (Radford et al. 2019, GPT-2).

    P has L rows, one for each possible position in training (`Shape.positions`). P is initialised from N(0, 0.02²).

    Parameters: `L * D`. Cost: one (T, D) look-up per forward pass.

    Args:
        shape: Sizes of the model.
        beyond: Treatment of positions >= L. ``error``: `Transformer` raises a UserError. ``clamp`` uses the
            last row. ``interpolate`` scales the positions of a longer input to 0..L-1 and interpolates between rows.
            Logits then also depend on the number of later tokens.

    Raises:
        UserError: If there is no such treatment.
    """

    def __init__(self, shape: Shape, beyond: Beyond = "error") -> None:
        super().__init__()
        self.require_name("beyond", beyond, Beyond)
        self.beyond = beyond
        self.rows = shape.positions
        self.max_length = self.rows if beyond == "error" else None
        self.prefix_consistent = beyond != "interpolate"
        table = torch.empty(self.rows, shape.dim, dtype=torch.float32).normal_(std=0.02)
        # the model calls `embed` only for the strategy of the first layer
        self.table = nn.Parameter(table) if shape.layer == 0 else None

    def embed(self, x: Tensor, positions: TokenPositions) -> Tensor:
        assert self.table is not None
        ids, last = positions.ids, self.rows - 1
        if self.beyond == "interpolate":
            largest = positions.largest.clamp(min=last).to(exact_dtype(ids.device))  # ((B,) 1) or (B, T)
            row = ids * (last / largest)  # ((B,) T)
            below = row.floor().long()
            fraction = (row - below).to(self.table.dtype)[..., None]  # ((B,) T, 1)
            vectors = torch.lerp(self.table[below], self.table[(below + 1).clamp(max=last)], fraction)  # ((B,) T, D)
        else:
            vectors = self.table[ids.clamp(max=last) if self.beyond == "clamp" else ids]
        return (precise(x) + vectors).to(x.dtype)

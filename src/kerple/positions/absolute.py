"""`NoPE`, `Sinusoidal` and `Learned`: strategies that add one vector per position to token embeddings, or none."""

from typing import Literal

import torch
from torch import Tensor, nn

from kerple.positions.angles import angles, exact_dtype
from kerple.positions.base import Position, Shape
from kerple.positions.products import precise
from kerple.positions.token_positions import TokenPositions


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

    ``x_t + P[t]``, ``P[t, 2i] = sin(t / base^(2i/D))``, ``P[t, 2i+1] = cos(t / base^(2i/D))``. The exponents are
    multiples of 2/D as in the paper. tensor2tensor divides by D/2 - 1 instead of D/2.

    Parameters: `0`. Cost: one (T, D) table per forward pass.

    Args:
        shape: Sizes of the model; its width D must be even.
        base: Base of the frequencies; the longest wavelength is about 2π times as large.
        scaled: Whether the embeddings are multiplied by √D first, as in section 3.4 of the paper. GPT-NeoX and the
            tables of the KERPLE paper do not scale them. Waves of amplitude 1 are then much larger than embeddings
            drawn from N(0, 0.02²).

    Raises:
        UserError: If D is odd, or the base is not above 1.
    """

    def __init__(self, shape: Shape, base: float = 10000.0, scaled: bool = False) -> None:
        super().__init__()
        self.require(shape.dim % 2 == 0, "dim", shape.dim, "an even width: sines and cosines come in pairs")
        self.require(base > 1, "base", base, "a number above 1; the paper uses 10000")
        self.dim, self.base, self.gain = shape.dim, base, shape.dim**0.5 if scaled else 1.0

    def embed(self, x: Tensor, positions: TokenPositions) -> Tensor:
        angle = angles(positions.ids, self.dim, self.base)  # ((B,) T, D/2) fp64
        waves = torch.stack([angle.sin(), angle.cos()], -1).flatten(-2)  # ((B,) T, D)
        return (precise(x) * self.gain + waves.to(precise(x).dtype)).to(x.dtype)


class Learned(Position):
    """One learned vector per position, added to the embeddings: ``x_t + P[t]`` (Radford et al. 2019, GPT-2).

    P is initialised from N(0, 0.02²). It has one row for each of the L positions of training.

    Parameters: `L * D`. Cost: one (T, D) look-up per forward pass.

    Args:
        shape: Sizes of the model.
        beyond: Treatment of positions of L and more. ``error``: `Transformer` raises a UserError. ``clamp`` uses the
            last row. ``interpolate`` scales the positions of a longer input to 0..L-1 and interpolates between rows.
            Then the logits of a prefix are not the prefix of the logits.
    """

    def __init__(self, shape: Shape, beyond: Literal["error", "clamp", "interpolate"] = "error") -> None:
        super().__init__()
        self.beyond = beyond
        self.rows = shape.positions
        self.max_length = self.rows if beyond == "error" else None
        self.prefix_consistent = beyond != "interpolate"
        rows = torch.empty(self.rows, shape.dim, dtype=torch.float32).normal_(std=0.02)
        # `embed` is called only for the strategy of the first layer
        self.table = nn.Parameter(rows) if shape.layer == 0 else None

    def embed(self, x: Tensor, positions: TokenPositions) -> Tensor:
        assert self.table is not None
        ids, last = positions.ids, self.rows - 1
        if self.beyond == "interpolate":
            end = ids.amax(-1, keepdim=True).clamp(min=last).to(exact_dtype(ids.device))  # ((B,) 1)
            squeezed = ids * (last / end)  # ((B,) T)
            below = squeezed.floor().long()
            fraction = (squeezed - below).to(self.table.dtype)[..., None]  # ((B,) T, 1)
            rows = torch.lerp(self.table[below], self.table[(below + 1).clamp(max=last)], fraction)  # ((B,) T, D)
        elif self.beyond == "clamp":
            rows = self.table[ids.clamp(max=last)]
        else:
            rows = self.table[ids]
        return (precise(x) + rows).to(x.dtype)

"""`PoPE`: magnitudes that depend on the content, and angles that depend on the position."""

import math

import torch
from torch import Tensor
from torch.nn import functional as F

from kerple.positions.angles import angles
from kerple.positions.base import Position, Shape
from kerple.positions.products import precise
from kerple.positions.token_positions import TokenPositions


class PoPE(Position):
    """``Σ_c softplus(q_c) · softplus(k_c) · cos(d·θ_c + φ_hc) / √δ``, ``θ_c = base^(-c/δ)``, c = 0..δ-1 (Gopalakrishnan
    et al. 2025, arXiv 2509.10534, section 3).

    RoPE turns a pair of numbers, so that what a key says and where it stands come out as one angle; here every number
    is a magnitude of its own with an angle that the position alone decides. -2π <= φ <= 0 is kept by `constrain_`.

    Parameters: `H * δ`, shared by all layers. Cost: queries and keys of twice the width, on the fused way.

    Args:
        shape: What the model hands to every strategy.
        base: The longest wavelength is almost 2π times this.
        phase: Start of φ, from -2π to 0; None draws from that range.

    Raises:
        UserError: If a number is out of range.
    """

    shift_invariant = True
    phase: Tensor

    def __init__(self, shape: Shape, base: float = 10000.0, phase: float | None = 0.0) -> None:
        super().__init__()
        self.require(1 < base < math.inf, "base", base, "a number above 1; the paper uses 10000")
        self.base, self.heads = base, shape.heads
        turn = 2 * math.pi
        self.learn("phase", shape.dim, phase, between=(-turn, 0.0), minimum=-turn, maximum=0.0)

    def transform_qk(self, q: Tensor, k: Tensor, state: Tensor | None, at: TokenPositions) -> tuple[Tensor, Tensor]:
        turned = angles(at.positions, 2 * q.shape[-1], self.base)  # (T, δ) or (B, T, δ)
        turned = turned if turned.ndim == 2 else turned[:, None]
        phase = self.phase.unflatten(-1, (self.heads, 1, -1))  # (H, 1, δ)
        return _spread(q, turned + phase), _spread(k, turned)


def _spread(x: Tensor, angle: Tensor) -> Tensor:
    """Magnitudes softplus(x) (B, ·, T, δ) at these angles, as Cartesian coordinates (B, ·, T, 2δ) in the dtype of x."""
    wide = precise(x)
    return (F.softplus(wide).repeat(1, 1, 1, 2) * torch.cat([angle.cos(), angle.sin()], -1).to(wide.dtype)).to(x.dtype)

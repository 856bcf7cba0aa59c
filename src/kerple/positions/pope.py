"""`PoPE`: magnitudes that depend on the content, and angles that depend on the position."""

import math

import torch
from torch import Tensor
from torch.nn import functional as F

from kerple.positions.angles import angles
from kerple.positions.base import Position, Shape
from kerple.positions.fp32_matmul import precise
from kerple.positions.token_positions import QueriesAndKeys, TokenPositions


class PoPE(Position):
    """Score ``Σ_c softplus(q_c) · softplus(k_c) · cos(d·θ_c - φ_hc) / √δ`` at distance d, with ``θ_c = base^(-c/δ)``
    and learned φ (Gopalakrishnan et al. 2025, arXiv 2509.10534, section 3).

    The sum is over the dimensions c = 0..δ-1 of head h. In RoPE the angle between a query and a key depends on content
    and position. In PoPE the angle depends only on the position, and the content determines magnitudes. φ belongs to
    the keys, which have the angles ``n·θ + φ`` in the published code. Here, φ is subtracted from the angles ``m·θ`` of
    the queries, which gives the same scores and also works if heads share keys. `constrain_` keeps -2π <= φ <= 0.

    Parameters: `H * δ`, shared by all layers. Cost: fused attention with queries and keys of twice the width.

    Args:
        shape: Sizes of the model.
        base: Base of the frequencies; the longest wavelength is about 2π · base tokens.
        key_phase: Initial value of φ, from -2π to 0; None draws from U(-2π, 0).

    Raises:
        UserError: If ``base`` or ``key_phase`` is out of range.
    """

    shift_invariant = True
    key_phase: Tensor

    def __init__(self, shape: Shape, base: float = 10000.0, key_phase: float | None = 0.0) -> None:
        super().__init__()
        self.require(1 < base < math.inf, "base", base, "a finite number above 1, such as 10000")
        self.base = base
        self.heads = shape.heads
        size = shape.heads * shape.head_dim
        minimum = -2 * math.pi
        # an option and a parameter `phase` of the opposite sign are in earlier checkpoints, which the new name refuses
        self.learn("key_phase", size, key_phase, between=(minimum, 0.0), minimum=minimum, maximum=0.0)

    def transform_qk(self, q: Tensor, k: Tensor, state: Tensor | None, positions: TokenPositions) -> QueriesAndKeys:
        q_waves, k_waves = positions.compute_once(self.waves)
        return _to_coordinates(q, q_waves), _to_coordinates(k, k_waves)

    def waves(self, positions: TokenPositions) -> tuple[Tensor, ...]:
        """Return cosines and sines of the angles of queries, (H, T, 2δ) fp64, and of keys, (1, T, 2δ) fp64.

        They have a batch dimension in front if positions differ between sequences.
        """
        phase = self.key_phase.unflatten(-1, (self.heads, 1, -1))  # (H, 1, δ)
        angle = angles(positions.ids, 2 * phase.shape[-1], self.base).unsqueeze(-3)  # ((B,) 1, T, δ)
        return tuple(torch.cat([a.cos(), a.sin()], -1) for a in (angle - phase, angle))


def _to_coordinates(x: Tensor, waves: Tensor) -> Tensor:
    """Return ``softplus(x) · cos`` of the angles for x (B, heads, T, δ), then ``softplus(x) · sin``; (B, heads, T, 2δ).

    ``waves`` (…, T, 2δ) are the cosines of the angles, then the sines.
    """
    # contiguous, because the backward pass of softplus has other strides than torch assumes in compilation
    magnitudes = F.softplus(precise(x).contiguous()).repeat(1, 1, 1, 2)
    return (magnitudes * waves.to(magnitudes.dtype)).to(x.dtype)

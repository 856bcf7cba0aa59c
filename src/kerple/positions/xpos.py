"""`XPos`: rotary embedding that decays with the distance."""

import torch
from torch import Tensor

from kerple.positions.angles import angles
from kerple.positions.base import Position, Shape
from kerple.positions.rotary import Layout, apply_rotary, rotary_dim
from kerple.positions.token_positions import QueriesAndKeys, TokenPositions


class XPos(Position):
    """RoPE with scores that decay with distance: pair i of query m is multiplied by ``ζ_i^(m/decay)``, and pair i of
    key n by ``ζ_i^(-n/decay)``, with ``ζ_i = (2i/δ + 0.4) / 1.4`` (Sun et al. 2022, arXiv 2212.10554).

    The pairs are i = 0..δ/2-1, and δ is the head dimension. Positions m and n are relative to the first token of the
    text, also with a cache, or to 0 if positions have gaps. Factors are clamped to e^±80. In fp16 they are clamped to
    e^±7, because a query or key times its factor must stay below e^11, the largest fp16 number. Therefore the decay is
    exact for inputs of up to 63 · decay tokens (32,000 for the default of 512), and in fp16 of up to 5 · decay tokens.

    Parameters: `0`. Cost: two multiplications and one addition per entry of q and of k.

    Args:
        shape: Sizes of the model; its head dimension must be even.
        base: Base of the frequencies; the longest wavelength is about 2π · base tokens.
        decay: Distance in tokens at which the scores of pair 0 have decayed to 0.4/1.4 of their value.
        layout: ``half`` or ``interleaved``, see `RoPE`.

    Raises:
        UserError: If an option is out of range, or the head dimension is odd.
    """

    shift_invariant = True

    def __init__(self, shape: Shape, base: float = 10000.0, decay: int = 512, layout: Layout = "interleaved") -> None:
        super().__init__()
        self.rotary_dim = rotary_dim(self, shape, base, 1.0)
        self.require_name("layout", layout, Layout)
        self.require(decay >= 1, "decay", decay, "1 or more tokens, such as 512")
        self.base, self.decay, self.layout = base, decay, layout

    def transform_qk(self, q: Tensor, k: Tensor, state: Tensor | None, positions: TokenPositions) -> QueriesAndKeys:
        cos, sin, log_factor = positions.compute_once(self.waves)
        limit = 7 if k.dtype == torch.float16 else 80
        log_factor = log_factor.clamp(-limit, limit)
        q_factor, k_factor = log_factor.exp(), (-log_factor).exp()
        q = apply_rotary(q, cos * q_factor, sin * q_factor, self.layout)
        return q, apply_rotary(k, cos * k_factor, sin * k_factor, self.layout)

    def waves(self, positions: TokenPositions) -> tuple[Tensor, Tensor, Tensor]:
        """Return cosines and sines of the angles, and logarithms of the queries' factors.

        All are (T, δ/2) fp64, or (B, T, δ/2) if positions differ between sequences.
        """
        angle = angles(positions.ids, self.rotary_dim, self.base)
        pair = torch.arange(0, self.rotary_dim, 2, dtype=angle.dtype, device=angle.device) / self.rotary_dim  # (δ/2,)
        # distance from the first token of the text, which may be in a cache
        relative = (positions.document_rows if positions.contiguous else positions.ids).to(pair.dtype)  # ((B,) T)
        return angle.cos(), angle.sin(), relative[..., None] / self.decay * ((pair + 0.4) / 1.4).log()

"""`XPos`: rotary embedding that decays with the distance."""

import torch
from torch import Tensor

from kerple.positions.angles import angles
from kerple.positions.base import Position, Shape
from kerple.positions.rotary import Layout, apply_rotary, rotary_dim
from kerple.positions.token_positions import TokenPositions


class XPos(Position):
    """RoPE with a decay of its own for each pair: ``q · ζ_i^(m/B)``, ``k · ζ_i^(-n/B)`` (Sun et al. 2022, arXiv
    2212.10554).

    ``ζ_i = (2i/δ + 0.4) / 1.4`` for pair i. Positions are counted from the input's first, so that an offset overflows
    nothing, or from 0 where they have gaps: the decay is exact in inputs of up to 63·B tokens, 32,000 for the paper's
    B. Factors stay within e^±80, and the decay stops growing beyond; in fp16, whose largest number is e^11, they stay
    within e^±7, up to 5·B tokens.

    Parameters: `0`. Cost: four multiplications per entry of q and k.

    Args:
        shape: Sizes of the model; its head dimension must be even.
        base: The longest wavelength is 2π times this.
        decay: B, the distance over which the fastest pair shrinks to 0.4/1.4.
        layout: ``half`` or ``interleaved``, see `RoPE`.

    Raises:
        UserError: If an option is out of range, or the head dimension odd.
    """

    shift_invariant = True

    def __init__(self, shape: Shape, base: float = 10000.0, decay: int = 512, layout: Layout = "interleaved") -> None:
        super().__init__()
        self.rotary_dim = rotary_dim(self, shape, base, 1.0)
        self.require(decay >= 1, "decay", decay, "1 or more tokens; the paper uses 512")
        self.base, self.decay, self.layout = base, decay, layout

    def transform_qk(
        self, q: Tensor, k: Tensor, state: Tensor | None, positions: TokenPositions
    ) -> tuple[Tensor, Tensor]:
        cos, sin, log_size = positions.once(self.waves)
        end = 7 if k.dtype == torch.float16 else 80
        size = log_size.clamp(-end, end)
        grown, shrunk = (-size).exp(), size.exp()
        q = apply_rotary(q, cos * shrunk, sin * shrunk, self.layout)
        return q, apply_rotary(k, cos * grown, sin * grown, self.layout)

    def waves(self, positions: TokenPositions) -> tuple[Tensor, Tensor, Tensor]:
        """Cosine and sine of the angles, and the logarithm of the queries' sizes, ((B,) T, δ/2) fp64 each."""
        angle = angles(positions.ids, self.rotary_dim, self.base)
        pair = torch.arange(0, self.rotary_dim, 2, dtype=angle.dtype, device=angle.device) / self.rotary_dim  # (δ/2,)
        # one origin for the whole input, from which the keys in a cache were counted, too
        origin = positions.ids[..., :1] - positions.rows[:1] if positions.contiguous else 0
        counted = positions.ids - origin  # ((B,) T)
        return angle.cos(), angle.sin(), counted[..., None] / self.decay * ((pair + 0.4) / 1.4).log()

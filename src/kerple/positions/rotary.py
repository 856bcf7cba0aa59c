"""`RoPE`, which rotates queries and keys by angles proportional to their positions."""

from typing import Literal

import torch
from torch import Tensor

from kerple.positions.base import Position, Shape
from kerple.positions.products import precise
from kerple.positions.rotary_scaling import RotaryFrequencies, Scaling
from kerple.positions.token_positions import TokenPositions

Layout = Literal["half", "interleaved"]


def apply_rotary(x: Tensor, cos: Tensor, sin: Tensor, layout: Layout) -> Tensor:
    """Rotate the first 2·c dimensions of x (B, H, T, δ) by angles, whose cosines and sines are ((B,) T, c) constants.

    The result has the shape and dtype of x.

    ``half`` pairs dimension i with i + c (GPT-NeoX, Llama), ``interleaved`` 2i with 2i + 1 (the paper, GPT-J).
    """
    cos, sin = (a.to(precise(x).dtype) if a.ndim == 2 else a.to(precise(x).dtype)[:, None] for a in (cos, sin))
    return _Rotation.apply(x, cos, sin, layout)


class _Rotation(torch.autograd.Function):
    """`apply_rotary` in half the time of autograd: the gradient is rotated back."""

    @staticmethod
    def forward(ctx, x: Tensor, cos: Tensor, sin: Tensor, layout: Layout) -> Tensor:
        ctx.save_for_backward(cos, sin)
        ctx.layout = layout
        return _rotate(x, cos, sin, layout)

    @staticmethod
    def backward(ctx, grad: Tensor):
        cos, sin = ctx.saved_tensors
        return _rotate(grad, cos, -sin, ctx.layout), None, None, None


def _rotate(x: Tensor, cos: Tensor, sin: Tensor, layout: Layout) -> Tensor:
    c, old, out = cos.shape[-1], precise(x), precise(x).clone()
    first, second = (slice(c), slice(c, 2 * c)) if layout == "half" else (slice(0, 2 * c, 2), slice(1, 2 * c, 2))
    out[..., first].mul_(cos).addcmul_(old[..., second], sin, value=-1)
    out[..., second].mul_(cos).addcmul_(old[..., first], sin)
    return out.to(x.dtype)  # (B, H, T, δ)


class RoPE(Position):
    """Rotary embedding: pairs of q and k rotated by ``t · base^(-2i/r)`` (Su et al. 2021, arXiv 2104.09864, § 3.2).

    The first r = rotary_fraction · δ dimensions of each head are rotated; the others and the values are not.
    Scaling needs no training: set it when a checkpoint is tested past its training length L, with s = ``factor``:

    - ``pi``: angles divided by s (Chen et al. 2023, arXiv 2306.15595).
    - ``ntk``: base · s^(r/(r-2)), which keeps the fast angles and divides the slowest by s.
    - ``dynamic_ntk``: the same with s·T/L - (s - 1) in place of s, for an input that ends at T > L. All angles change
      with T: the logits of a prefix are not the prefix of the logits, they move with an offset, and keys cached at a
      shorter T stay at its angles.
    - ``yarn``: pairs that rotate at most ``beta_slow`` times in L have their angles divided by s. Pairs that rotate
      more than ``beta_fast`` times keep them. Between the two, a ramp over the pairs mixes both (Peng et al. 2023,
      arXiv 2309.00071).
    - ``llama3``: the same with a ramp over the number of rotations (Grattafiori et al. 2024, arXiv 2407.21783, and the
      published code of Llama 3.1).
    - ``longrope``: the angle of pair i is divided by entry i of ``short_factors`` up to L tokens, by that of
      ``long_factors`` for longer inputs (Ding et al. 2024, arXiv 2402.13753). As with ``dynamic_ntk``, all angles
      change at L.
    - ``proportional``: r = δ, but pairs from rotary_fraction · δ/2 on have angle 0; the other angles are divided by s,
      if it is given (p-RoPE, Barbero et al. 2024, arXiv 2410.06205). A model is trained with it.

    Parameters: `0`. Cost: four multiplications per rotated entry of q and k.

    Args:
        shape: Sizes of the model; its length is L.
        base: The longest wavelength is 2π times this.
        rotary_fraction: Fraction of each head that is rotated, in (0, 1].
        layout: ``half`` pairs i with i + r/2 (GPT-NeoX, Llama), ``interleaved`` 2i with 2i + 1 (the paper, GPT-J). For
            a model trained from scratch they are the same.
        scaling: None, or one of the above.
        factor: s >= 1, how many times L is to be reached. All scalings but ``proportional`` need it.
        beta_fast: Rotations in L; None is 32 for ``yarn`` and 4 for ``llama3``, as published.
        beta_slow: Rotations in L.
        attention_factor: Factor of the rotated q and k; None is 0.1·ln s + 1 for ``yarn``, √(1 + ln s / ln L) for
            ``longrope``, else 1.
        short_factors: The r/2 divisors of ``longrope`` for inputs of up to L tokens.
        long_factors: Those for longer inputs.
        mistake: A mistake of public code that is made on purpose, to measure what it costs; None for none. ``bf16``
            rounds positions, frequencies and their products, as in a model that is cast to bf16 as a whole: above 256,
            several positions become one.

    Raises:
        UserError: If an option is out of range, r is not an even number of dimensions, or a list of divisors does not
            have r/2 positive numbers.
    """

    shift_invariant = True

    def __init__(
        self,
        shape: Shape,
        base: float = 10000.0,
        rotary_fraction: float = 1.0,
        layout: Layout = "half",
        scaling: Scaling | None = None,
        factor: float | None = None,
        beta_fast: float | None = None,
        beta_slow: float = 1.0,
        attention_factor: float | None = None,
        short_factors: list[float] | None = None,
        long_factors: list[float] | None = None,
        mistake: Literal["bf16"] | None = None,
    ) -> None:
        super().__init__()
        rotated = rotary_dim(self, shape, base, rotary_fraction)
        dim = shape.head_dim if scaling == "proportional" else rotated
        factor = 1.0 if factor is None and scaling in (None, "proportional") else factor
        expected = f"a number of 1 or more with scaling {scaling}: how many times the training length to reach"
        self.require(factor is not None and factor >= 1, "factor", factor, expected)
        expected = "another such as pi or yarn, as it needs 4 or more rotated dimensions in a head"
        self.require(rotated > 2 or scaling not in ("ntk", "dynamic_ntk"), "scaling", scaling, expected)
        beta_fast = (4.0 if scaling == "llama3" else 32.0) if beta_fast is None else beta_fast
        expected = "0 < beta_slow < beta_fast, such as 1 and 32"
        self.require(0 < beta_slow < beta_fast, "beta_slow, beta_fast", f"{beta_slow}, {beta_fast}", expected)
        expected = f"{dim // 2} positive numbers, one for each rotated pair, with scaling longrope, else none"
        for name, divisors in (("short_factors", short_factors), ("long_factors", long_factors)):
            fits = (divisors is not None) == (scaling == "longrope")
            fits = fits and (divisors is None or (len(divisors) == dim // 2 and min(divisors) > 0))
            self.require(fits, name, divisors, expected)
        self.layout, self.mistake = layout, mistake
        self.frequencies = RotaryFrequencies(
            dim,
            base,
            shape.positions,
            scaling,
            factor or 1.0,
            beta_fast,
            beta_slow,
            rotated,
            short_factors,
            long_factors,
        )
        self.attention_factor = self.frequencies.attention_factor if attention_factor is None else attention_factor
        self.prefix_consistent = scaling not in ("dynamic_ntk", "longrope")
        self.shift_invariant = self.prefix_consistent and mistake is None

    def transform_qk(
        self, q: Tensor, k: Tensor, state: Tensor | None, positions: TokenPositions
    ) -> tuple[Tensor, Tensor]:
        cos, sin = positions.once(self.waves)
        return apply_rotary(q, cos, sin, self.layout), apply_rotary(k, cos, sin, self.layout)

    def waves(self, positions: TokenPositions) -> tuple[Tensor, Tensor]:
        """Cosine and sine of the angles by which q and k are rotated, ((B,) T, r/2) fp64 each."""
        ids, radians = positions.ids[..., None], self.frequencies(positions.ids)
        if self.mistake:
            ids, radians = rounded(ids.to(radians.dtype)), rounded(radians)
        angle = ids * radians
        angle = rounded(angle) if self.mistake else angle
        return self.attention_factor * angle.cos(), self.attention_factor * angle.sin()


def rounded(x: Tensor) -> Tensor:
    """Round to the nearest bf16, but keep the dtype."""
    return x.to(torch.bfloat16).to(x.dtype)


def rotary_dim(position: Position, shape: Shape, base: float, rotary_fraction: float) -> int:
    """Check the options of a rotary strategy, and return the number of dimensions of each head that it rotates."""
    position.require(base > 1, "base", base, "a number above 1; the paper uses 10000")
    expected = "a fraction of the head in (0, 1]; the paper rotates all: 1"
    position.require(0 < rotary_fraction <= 1, "rotary_fraction", rotary_fraction, expected)
    dim = round(rotary_fraction * shape.head_dim)
    position.require(
        dim >= 2 and dim % 2 == 0,
        "rotary_fraction",
        f"{rotary_fraction:g}, which is {dim} of a head's {shape.head_dim} dimensions",
        "an even number of 2 or more; choose another fraction, or heads and dim with an even head dimension",
    )
    return dim

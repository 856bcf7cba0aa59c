"""`RoPE`, which rotates queries and keys by angles proportional to their positions."""

from typing import Literal

import torch
from torch import Tensor

from kerple.positions.base import Position, Shape
from kerple.positions.fp32_matmul import precise
from kerple.positions.rotary_scaling import RotaryFrequencies, Scaling
from kerple.positions.token_positions import QueriesAndKeys, TokenPositions

Layout = Literal["half", "interleaved"]
Mistake = Literal["bf16"]


def apply_rotary(x: Tensor, cos: Tensor, sin: Tensor, layout: Layout) -> Tensor:
    """Rotate c pairs of dimensions of x by the given angles; other dimensions are unchanged.

    Args:
        x: Queries or keys (B, H, T, δ): batch, heads, tokens, head dimension.
        cos: Cosines of the angles, (T, c) or (B, T, c). They have no gradient.
        sin: Sines of the angles, likewise.
        layout: ``half`` pairs dimension i with i + c, ``interleaved`` pairs 2i with 2i + 1, for i = 0..c-1.

    Returns:
        (B, H, T, δ) in the dtype of x.
    """
    cos, sin = (a.to(precise(x).dtype) if a.ndim == 2 else a.to(precise(x).dtype)[:, None] for a in (cos, sin))
    if torch.compiler.is_compiling():
        cos, sin = materialized(cos, sin)
    return _Rotation.apply(x, cos, sin, layout)


@torch.library.custom_op("kerple::materialized", mutates_args=())
def materialized(cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
    """Return copies. A compiled graph then stores the arguments, instead of computing them for each head and sequence.

    Without this, a training step with RoPE took 1.4 times as long as without positions (162M parameters, H200).
    """
    return cos.clone(), sin.clone()


@materialized.register_fake
def _(cos, sin):
    return torch.empty_like(cos), torch.empty_like(sin)


class _Rotation(torch.autograd.Function):
    """Rotation whose backward pass rotates the gradient back, in half the time of autograd."""

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
    c = cos.shape[-1]
    unrotated = precise(x)
    # On a CPU, attention is slower if the heads of a token are adjacent in memory: the rows of one head then compete
    # for few cache lines. On a GPU, this layout avoids a copy of the output.
    memory_format = torch.contiguous_format if x.device.type == "cpu" else torch.preserve_format
    out = unrotated.clone(memory_format=memory_format)
    first, second = (slice(c), slice(c, 2 * c)) if layout == "half" else (slice(0, 2 * c, 2), slice(1, 2 * c, 2))
    out[..., first].mul_(cos).addcmul_(unrotated[..., second], sin, value=-1)
    out[..., second].mul_(cos).addcmul_(unrotated[..., first], sin)
    return out.to(x.dtype)  # (B, H, T, δ)


class RoPE(Position):
    """Rotary embedding: at position t, pair i of the first r = ``rotary_fraction`` · δ dimensions of queries and keys
    is rotated by the angle ``t · base^(-2i/r)`` (Su et al. 2021, arXiv 2104.09864, § 3.2).

    δ is the head dimension. Other dimensions, and the values, are unchanged. Let L be the training length, and s the
    ``factor``. A scaling changes the angles, in most cases to extend the context length without training:

    - ``pi``: angles are divided by s (Chen et al. 2023, arXiv 2306.15595).
    - ``ntk``: the base is multiplied by s^(r/(r-2)). The largest frequency stays, and the smallest is divided by s.
    - ``dynamic_ntk``: ``ntk`` with s·T/L - (s - 1) instead of s, for an input whose last position is T - 1 >= L. All
      angles change with T. Therefore logits also depend on the number of later tokens, and an offset changes the
      logits. Generation uses no cache, because cached keys would keep the angles of a smaller T.
    - ``yarn``: angles of pairs with at most ``beta_slow`` rotations in L tokens are divided by s. Angles of pairs with
      at least ``beta_fast`` rotations stay. Between them, a linear ramp over the pairs interpolates (Peng et al. 2023,
      arXiv 2309.00071).
    - ``llama3``: ``yarn`` with a ramp over the number of rotations (Grattafiori et al. 2024, arXiv 2407.21783, and the
      published code of Llama 3.1).
    - ``longrope``: the angle of pair i is divided by entry i of ``short_factors``, or of ``long_factors`` for inputs
      with positions of L and more (Ding et al. 2024, arXiv 2402.13753). All angles change when an input grows beyond L
      tokens. Therefore generation uses no cache.
    - ``proportional``: all dimensions form pairs, so that r = δ in the formula. Only the first rotary_fraction · δ/2
      pairs are rotated. Their angles are divided by s if it is given. Models are trained with this scaling (p-RoPE,
      Barbero et al. 2024, arXiv 2410.06205).

    Parameters: `0`. Cost: two multiplications and one addition per rotated entry of q and of k.

    Args:
        shape: Sizes of the model. If `RandomizedPositions` wraps RoPE, L is ``max_positions``, not the training length.
        base: Base of the frequencies; the longest wavelength is about 2π · base tokens.
        rotary_fraction: Fraction of the dimensions of each head that is rotated, in (0, 1].
        layout: ``half`` pairs dimension i with i + r/2 (GPT-NeoX, Llama), ``interleaved`` pairs 2i with 2i + 1 (Su et
            al., GPT-J). For models trained from scratch the two are equivalent.
        scaling: One of the scalings above; None for none.
        factor: Scaling factor s >= 1, the ratio of the extended context length to L. Required for all scalings except
            ``proportional``, and only for them.
        beta_fast: With ``yarn`` and ``llama3``, pairs with at least this many rotations in L tokens keep their angles;
            None is 32 for ``yarn`` and 4 for ``llama3``, as published.
        beta_slow: With ``yarn`` and ``llama3``, the angles of pairs with at most this many rotations in L tokens are
            divided by s.
        attention_factor: Factor of the rotated dimensions of q and k; None is 0.1·ln s + 1 for ``yarn``,
            √(1 + ln s / ln L) for ``longrope``, and 1 for other scalings.
        short_factors: The r/2 divisors of ``longrope`` for inputs of up to L tokens.
        long_factors: The r/2 divisors of ``longrope`` for longer inputs.
        original_length: L of the formulas of ``scaling``; None is the training length. A pretrained model with a
            scaling states it, and keeps its angles when it is trained further at another length.
        mistake: Known mistake of public code, reproduced to measure its effect; None for none. ``bf16`` rounds
            positions, frequencies and their products to bf16, as in a model that is converted to bf16. Not all
            positions above 256 are then distinct.

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
        original_length: int | None = None,
        mistake: Mistake | None = None,
    ) -> None:
        super().__init__()
        self.require_name("layout", layout, Layout)
        for option, value, names in (("scaling", scaling, Scaling), ("mistake", mistake, Mistake)):
            if value is not None:
                self.require_name(option, value, names)
        rotated = rotary_dim(self, shape, base, rotary_fraction)
        dim = shape.head_dim if scaling == "proportional" else rotated
        self.require(dim % 2 == 0, "scaling", scaling, f"another one, because a head has {dim} dimensions")
        expected = "null, or a scaling, such as pi or yarn"
        self.require(scaling is not None or factor in (None, 1.0), "factor", factor, expected)
        factor = 1.0 if factor is None and scaling in (None, "proportional") else factor
        expected = f"a number of 1 or more with scaling {scaling}: the extended context length over the training length"
        self.require(factor is not None and factor >= 1, "factor", factor, expected)
        expected = f"pi or yarn, because {scaling} needs 4 or more rotated dimensions per head"
        self.require(rotated > 2 or scaling not in ("ntk", "dynamic_ntk"), "scaling", scaling, expected)
        beta_fast = (4.0 if scaling == "llama3" else 32.0) if beta_fast is None else beta_fast
        expected = "0 < beta_slow <= beta_fast, such as 1 and 32"
        self.require(0 < beta_slow <= beta_fast, "beta_slow, beta_fast", f"{beta_slow}, {beta_fast}", expected)
        expected = f"{dim // 2} positive numbers, one per rotated pair, with scaling longrope; none with other scalings"
        count = dim // 2 if scaling == "longrope" else 0
        for name, divisors in (("short_factors", short_factors), ("long_factors", long_factors)):
            valid = len(divisors or []) == count and all(divisor > 0 for divisor in divisors or [])
            self.require(valid, name, divisors, expected)
        length = shape.positions if original_length is None else original_length
        self.require(length >= 1, "original_length", length, "1 or more tokens, or null for the training length")
        self.layout, self.mistake = layout, mistake
        self.frequencies = RotaryFrequencies(
            dim, base, length, scaling, factor or 1.0, beta_fast, beta_slow, rotated, short_factors, long_factors
        )
        self.attention_factor = self.frequencies.attention_factor if attention_factor is None else attention_factor
        self.prefix_consistent = scaling not in ("dynamic_ntk", "longrope")
        self.shift_invariant = self.prefix_consistent and mistake is None

    def transform_qk(self, q: Tensor, k: Tensor, state: Tensor | None, positions: TokenPositions) -> QueriesAndKeys:
        cos, sin = positions.compute_once(self.waves)
        return apply_rotary(q, cos, sin, self.layout), apply_rotary(k, cos, sin, self.layout)

    def waves(self, positions: TokenPositions) -> tuple[Tensor, Tensor]:
        """Return cosines and sines of the angles, multiplied by the attention factor.

        Both are (T, r/2) fp64, or (B, T, r/2) if positions differ between sequences.
        """
        ids = positions.ids[..., None]
        radians = self.frequencies(positions.largest)  # radians per position
        angle = ids * radians
        if self.mistake:
            angle = round_to_bf16(round_to_bf16(ids.to(radians.dtype)) * round_to_bf16(radians))
        return self.attention_factor * angle.cos(), self.attention_factor * angle.sin()


def round_to_bf16(x: Tensor) -> Tensor:
    """Round to the nearest bf16 number, and keep the dtype."""
    return x.to(torch.bfloat16).to(x.dtype)


def rotary_dim(position: Position, shape: Shape, base: float, rotary_fraction: float) -> int:
    """Return the number of rotated dimensions per head, and check the options of ``position`` that determine angles.

    Raises:
        UserError: If ``base`` or ``rotary_fraction`` is out of range, or the number is odd or 0.
    """
    position.require(base > 1, "base", base, "a number above 1, such as 10000")
    expected = "a fraction of the head in (0, 1], such as 1"
    position.require(0 < rotary_fraction <= 1, "rotary_fraction", rotary_fraction, expected)
    dim = round(rotary_fraction * shape.head_dim)
    value = f"{rotary_fraction:g}, which is {dim} of a head's {shape.head_dim} dimensions"
    expected = "an even number of 2 or more; choose another fraction, or heads and dim with an even head dimension"
    position.require(dim >= 2 and dim % 2 == 0, "rotary_fraction", value, expected)
    return dim

"""`RoPE`, which turns queries and keys by angles proportional to their positions."""

from typing import Literal

import torch
from torch import Tensor

from kerple.positions.base import Position, Shape
from kerple.positions.products import precise
from kerple.positions.rotary_scaling import Scaling, Turns
from kerple.positions.token_positions import TokenPositions

Layout = Literal["half", "interleaved"]


def turn(x: Tensor, cos: Tensor, sin: Tensor, layout: Layout) -> Tensor:
    """Turn the first 2·c dimensions of x (B, H, T, δ) by angles, whose cosines and sines are ((B,) T, c).

    The result has the shape and dtype of x.

    ``half`` pairs dimension i with i + c (GPT-NeoX, Llama), ``interleaved`` 2i with 2i + 1 (the paper, GPT-J).
    """
    turned, rest = precise(x).split([2 * cos.shape[-1], x.shape[-1] - 2 * cos.shape[-1]], -1)
    cos, sin = (a.to(turned.dtype) if a.ndim == 2 else a.to(turned.dtype)[:, None] for a in (cos, sin))
    if layout == "half":
        a, b = turned.chunk(2, -1)
        out = torch.cat([a * cos - b * sin, b * cos + a * sin, rest], -1)
    else:
        a, b = turned[..., ::2], turned[..., 1::2]
        out = torch.cat([torch.stack([a * cos - b * sin, b * cos + a * sin], -1).flatten(-2), rest], -1)
    return out.to(x.dtype)  # (B, H, T, δ)


class RoPE(Position):
    """Rotary embedding: pairs of q and k turned by ``t · base^(-2i/r)`` (Su et al. 2021, arXiv 2104.09864, § 3.2).

    r = share · δ dimensions of each head are turned, the others and the values are not. Scaling needs no training: set
    it when a checkpoint is tested past its training length L, with s = ``factor``:

    - ``pi``: angles divided by s (Chen et al. 2023, arXiv 2306.15595).
    - ``ntk``: base · s^(r/(r-2)), which keeps the fast angles and divides the slowest by s.
    - ``dynamic_ntk``: the same with s·T/L - (s - 1) in place of s, for an input that ends at T > L. All angles change
      with T: the logits of a prefix are not the prefix of the logits, they move with an offset, and keys cached at a
      shorter T stay at its angles.
    - ``yarn``: angles that turn less than once in L are divided by s, those that turn more than 32 times are kept,
      those between are mixed; q and k are multiplied by 0.1·ln s + 1 (Peng et al. 2023, arXiv 2309.00071).

    Parameters: `0`. Cost: four multiplications per entry of q and k.

    Args:
        shape: Sizes of the model; its length is L.
        base: The longest wavelength is 2π times this.
        share: Part of each head that is turned, in (0, 1].
        layout: ``half`` pairs i with i + r/2 (GPT-NeoX, Llama), ``interleaved`` 2i with 2i + 1 (the paper, GPT-J). For
            a model trained from scratch they are the same.
        scaling: None, or one of the above.
        factor: s >= 1, how many times L is to be reached; needed if there is a scaling.
        fast: Turns in L from which ``yarn`` keeps an angle.
        slow: Turns in L up to which ``yarn`` divides an angle by s.
        mistake: A mistake of public code that is made on purpose, to measure what it costs; None for none. ``bf16``
            rounds positions, frequencies and their products, as in a model that is cast to bf16 as a whole: above 256,
            several positions become one.

    Raises:
        UserError: If an option is out of range, or r is not an even number of dimensions.
    """

    shift_invariant = True

    def __init__(
        self,
        shape: Shape,
        base: float = 10000.0,
        share: float = 1.0,
        layout: Layout = "half",
        scaling: Scaling | None = None,
        factor: float | None = None,
        fast: float = 32.0,
        slow: float = 1.0,
        mistake: Literal["bf16"] | None = None,
    ) -> None:
        super().__init__()
        self.turned = turned_dimensions(self, shape, base, share)
        expected = f"a number of 1 or more beside scaling {scaling}: how many times the training length to reach"
        self.require(scaling is None or (factor is not None and factor >= 1), "factor", factor, expected)
        expected = "another such as pi or yarn, as it needs 4 or more turned dimensions a head"
        self.require(self.turned > 2 or scaling not in ("ntk", "dynamic_ntk"), "scaling", scaling, expected)
        self.require(0 < slow < fast, "slow, fast", f"{slow}, {fast}", "0 < slow < fast; the paper uses 1 and 32")
        self.layout, self.mistake = layout, mistake
        self.turns = Turns(self.turned, base, shape.positions, scaling, factor, fast, slow)
        self.prefix_consistent = scaling != "dynamic_ntk"
        self.shift_invariant = self.prefix_consistent and mistake is None

    def transform_qk(self, q: Tensor, k: Tensor, state: Tensor | None, at: TokenPositions) -> tuple[Tensor, Tensor]:
        cos, sin = at.once(self.waves)
        return turn(q, cos, sin, self.layout), turn(k, cos, sin, self.layout)

    def waves(self, at: TokenPositions) -> tuple[Tensor, Tensor]:
        """Cosine and sine of the angles by which q and k are turned, ((B,) T, r/2) fp64 each."""
        positions, turns = at.positions[..., None], self.turns(at.positions)
        if self.mistake:
            positions, turns = rounded(positions.to(turns.dtype)), rounded(turns)
        angle = positions * turns
        angle = rounded(angle) if self.mistake else angle
        return self.turns.size * angle.cos(), self.turns.size * angle.sin()


def rounded(x: Tensor) -> Tensor:
    """Round to the nearest bf16, but keep the dtype."""
    return x.to(torch.bfloat16).to(x.dtype)


def turned_dimensions(position: Position, shape: Shape, base: float, share: float) -> int:
    """Check the options of a rotary strategy, and return the number of dimensions of each head that it turns."""
    position.require(base > 1, "base", base, "a number above 1; the paper uses 10000")
    position.require(0 < share <= 1, "share", share, "a part of the head in (0, 1]; the paper turns all: 1")
    turned = round(share * shape.head_dim)
    position.require(
        turned >= 2 and turned % 2 == 0,
        "share",
        f"{share:g}, which is {turned} of a head's {shape.head_dim} dimensions",
        "an even number of 2 or more to turn; choose another share, or heads and dim with an even head dimension",
    )
    return turned

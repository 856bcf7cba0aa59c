"""Strategies that turn queries and keys by angles proportional to their positions."""

import math
from typing import Literal

import torch
from torch import Tensor

from kerple.errors import UserError
from kerple.positions.angles import exact, frequencies
from kerple.positions.base import Position, Shape, precise

Layout = Literal["half", "interleaved"]
Scaling = Literal["pi", "ntk", "dynamic_ntk", "yarn"]


def turn(x: Tensor, cos: Tensor, sin: Tensor, layout: Layout) -> Tensor:
    """Turn the first 2·c dimensions of x (B, H, T, δ) by angles given as cos, sin (T, c); shape and dtype of x.

    ``half`` pairs dimension i with i + c (GPT-NeoX, Llama), ``interleaved`` 2i with 2i + 1 (the paper, GPT-J).
    """
    turned, rest = precise(x).split([2 * cos.shape[-1], x.shape[-1] - 2 * cos.shape[-1]], -1)
    cos, sin = cos.to(turned.dtype), sin.to(turned.dtype)
    if layout == "half":
        a, b = turned.chunk(2, -1)
        out = torch.cat([a * cos - b * sin, b * cos + a * sin, rest], -1)
    else:
        a, b = turned[..., ::2], turned[..., 1::2]
        out = torch.cat([torch.stack([a * cos - b * sin, b * cos + a * sin], -1).flatten(-2), rest], -1)
    return out.to(x.dtype)  # (B, H, T, δ)


class RoPE(Position):
    """Rotary embedding: pairs of q and k turned by ``t · base^(-2i/r)`` (Su et al. 2021, arXiv 2104.09864, § 3.2).

    Values are not turned. r = share · δ dimensions of each head are, the rest pass. Scaling needs no training: set it
    when a checkpoint is tested past its training length L, with s = ``factor``:

    - ``pi``: angles divided by s (Chen et al. 2023, arXiv 2306.15595).
    - ``ntk``: base · s^(r/(r-2)), which keeps the fast angles and divides the slowest by s.
    - ``dynamic_ntk``: the same with s·T/L - (s - 1) in place of s, for an input that ends at T > L. All angles change
      with T: the logits of a prefix are not the prefix of the logits, they move with an offset, and keys cached at a
      shorter T stay at its angles.
    - ``yarn``: angles that turn less than once in L are divided by s, those that turn more than 32 times are kept,
      those between are mixed; q and k are multiplied by 0.1·ln s + 1 (Peng et al. 2023, arXiv 2309.00071).

    Parameters: `0`. Cost: four multiplications per entry of q and k.

    Args:
        shape: What the model hands to every strategy; its length is L.
        base: The longest wavelength is 2π times this.
        share: Part of each head that is turned, in (0, 1].
        layout: ``half`` pairs i with i + r/2 (GPT-NeoX, Llama), ``interleaved`` 2i with 2i + 1 (the paper, GPT-J). For
            a model trained from scratch they are the same.
        scaling: None, or one of the above.
        factor: s >= 1, how many times L is to be reached; needed if there is a scaling.
        fast: Turns in L from which ``yarn`` keeps an angle.
        slow: Turns in L up to which ``yarn`` divides an angle by s.

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
    ) -> None:
        super().__init__()
        self.turned = turned_dimensions("RoPE", shape, base, share, layout)
        self.base, self.layout, self.scaling, self.length = base, layout, scaling, shape.length
        if scaling not in (None, "pi", "ntk", "dynamic_ntk", "yarn"):
            raise UserError(f"RoPE: scaling: got {scaling!r}, expected pi, ntk, dynamic_ntk, yarn or none")
        if scaling is not None and (factor is None or not factor >= 1):
            raise UserError(
                f"RoPE: factor: got {factor}, expected a number of 1 or more beside scaling {scaling}: how many times "
                "the training length is to be reached"
            )
        if scaling in ("ntk", "dynamic_ntk") and self.turned == 2:
            raise UserError(
                f"RoPE: scaling: {scaling} needs 4 or more turned dimensions a head, got 2; choose pi or yarn"
            )
        if not 0 < slow < fast:
            raise UserError(f"RoPE: slow, fast: got {slow}, {fast}, expected 0 < slow < fast; the paper uses 1 and 32")
        self.factor, self.fast, self.slow = factor or 1.0, fast, slow
        if scaling == "dynamic_ntk":
            self.shift_invariant = self.prefix_consistent = False

    def rotate(self, q: Tensor, k: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
        turns = self.turns(positions)  # (r/2,) fp64
        angle = positions.to(turns.dtype)[:, None] * turns  # (T, r/2)
        size = 0.1 * math.log(self.factor) + 1 if self.scaling == "yarn" else 1.0
        cos, sin = size * angle.cos(), size * angle.sin()
        return turn(q, cos, sin, self.layout), turn(k, cos, sin, self.layout)

    def turns(self, positions: Tensor) -> Tensor:
        """Radians per position of each pair, (r/2,) fp64, for an input that ends at the last of the positions (T,)."""
        r, device = self.turned, positions.device
        if self.scaling == "ntk":
            return frequencies(r, self.base * self.factor ** (r / (r - 2)), device)
        if self.scaling == "dynamic_ntk":
            reach = (positions.max() + 1).clamp(min=self.length).to(exact(device)) / self.length
            return frequencies(r, self.base * (self.factor * reach - (self.factor - 1)) ** (r / (r - 2)), device)
        kept = frequencies(r, self.base, device)
        if self.scaling == "pi":
            return kept / self.factor
        if self.scaling == "yarn":
            return torch.lerp(kept, kept / self.factor, self.ramp().to(kept))
        return kept

    def ramp(self) -> Tensor:
        """How far each pair is on YaRN's way from kept (0) to divided (1), (r/2,) fp64."""
        low = max(math.floor(self._pair(self.fast)), 0)
        high = min(math.ceil(self._pair(self.slow)), self.turned - 1)
        high = max(high, low + 0.001)
        return ((torch.arange(self.turned // 2, dtype=torch.float64) - low) / (high - low)).clamp(0, 1)

    def _pair(self, turns: float) -> float:
        # the pair, not a whole number, that turns so often within the training length
        return self.turned * math.log(self.length / (turns * 2 * math.pi)) / (2 * math.log(self.base))


class XPos(Position):
    """RoPE with a decay of its own for each pair: ``q · ζ_i^(m/B)``, ``k · ζ_i^(-n/B)`` (Sun et al. 2022, arXiv
    2212.10554).

    ``ζ_i = (2i/δ + 0.4) / 1.4`` for pair i. Positions are counted from 0, or, in an input that ends at 63·B or later,
    from its first, so that an offset overflows nothing: the decay is exact in inputs of up to 63·B tokens, 32,000 for
    the paper's B. Factors stay within e^±80, and the decay stops to grow beyond. Keys can be cached up to position
    63·B.

    Parameters: `0`. Cost: four multiplications per entry of q and k.

    Args:
        shape: What the model hands to every strategy; its head dimension must be even.
        base: The longest wavelength is 2π times this.
        decay: B, the distance over which the fastest pair shrinks to 0.4/1.4.
        layout: As for RoPE.

    Raises:
        UserError: If an option is out of range, or the head dimension odd.
    """

    shift_invariant = True

    def __init__(self, shape: Shape, base: float = 10000.0, decay: int = 512, layout: Layout = "interleaved") -> None:
        super().__init__()
        self.turned = turned_dimensions("XPos", shape, base, 1.0, layout)
        if decay < 1:
            raise UserError(f"XPos: decay: got {decay}, expected 1 or more tokens; the paper uses 512")
        self.base, self.decay, self.layout = base, decay, layout

    def rotate(self, q: Tensor, k: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
        turns = frequencies(self.turned, self.base, positions.device)  # (δ/2,) fp64
        angle = positions.to(turns.dtype)[:, None] * turns  # (T, δ/2)
        pair = torch.arange(0, self.turned, 2, dtype=turns.dtype, device=turns.device) / self.turned  # (δ/2,)
        origin = torch.where(positions[-1] < 63 * self.decay, 0, positions[0])
        place = positions - origin  # (T,)
        size = (place[:, None] / self.decay * ((pair + 0.4) / 1.4).log()).clamp(-80, 80)  # (T, δ/2)
        cos, sin = angle.cos(), angle.sin()
        grown, shrunk = (-size).exp(), size.exp()
        return turn(q, cos * shrunk, sin * shrunk, self.layout), turn(k, cos * grown, sin * grown, self.layout)


def turned_dimensions(name: str, shape: Shape, base: float, share: float, layout: Layout) -> int:
    """How many dimensions of each head turn; complains in the name of the strategy."""
    if base <= 1:
        raise UserError(f"{name}: base: got {base}, expected a number above 1; the paper uses 10000")
    if layout not in ("half", "interleaved"):
        raise UserError(f"{name}: layout: got {layout!r}, expected half or interleaved")
    if not 0 < share <= 1:
        raise UserError(f"{name}: share: got {share}, expected a part of the head in (0, 1]; the paper turns all: 1")
    turned = round(share * shape.head_dim)
    if turned < 2 or turned % 2:
        raise UserError(
            f"{name}: {share:g} of a head of {shape.head_dim} is {turned} dimensions, expected an even number "
            "of 2 or more to turn; choose another share, or heads and dim with an even head dimension"
        )
    return turned

"""Strategies that turn queries and keys by angles proportional to their positions."""

from typing import Literal

import torch
from torch import Tensor

from kerple.positions.angles import frequencies
from kerple.positions.base import Position, Shape

Layout = Literal["half", "interleaved"]


def rotate(x: Tensor, cos: Tensor, sin: Tensor, layout: Layout) -> Tensor:
    """Turn the first 2·c dimensions of x (B, H, T, δ) by angles given as cos, sin (T, c) fp32; dtype of x.

    ``half`` pairs dimension i with i + c (GPT-NeoX, Llama), ``interleaved`` 2i with 2i + 1 (the paper, GPT-J).
    """
    turned, rest = x.float().split([2 * cos.shape[-1], x.shape[-1] - 2 * cos.shape[-1]], -1)
    if layout == "half":
        a, b = turned.chunk(2, -1)
        out = torch.cat([a * cos - b * sin, b * cos + a * sin, rest], -1)
    else:
        a, b = turned[..., ::2], turned[..., 1::2]
        out = torch.cat([torch.stack([a * cos - b * sin, b * cos + a * sin], -1).flatten(-2), rest], -1)
    return out.to(x.dtype)  # (B, H, T, δ)


class RoPE(Position):
    """Rotary embedding: pairs of q and k turned by ``t · base^(-2i/r)`` (Su et al. 2021, arXiv 2104.09864, section
    3.2).

    Values are not turned. r = share · δ dimensions of each head are, the rest pass.

    Parameters: `0`. Cost: four multiplications per entry of q and k.

    Args:
        shape: What the model hands to every strategy.
        base: The longest wavelength is 2π times this.
        share: Part of each head that is turned, in (0, 1].
        layout: ``half`` pairs i with i + r/2 (GPT-NeoX, Llama), ``interleaved`` 2i with 2i + 1 (the paper, GPT-J).
            For a model trained from scratch they are the same.

    Raises:
        ValueError: If an option is out of range, or r is not an even number of dimensions.
    """

    shift_invariant = True

    def __init__(self, shape: Shape, base: float = 10000.0, share: float = 1.0, layout: Layout = "half") -> None:
        super().__init__()
        self.turned = turned_dimensions(type(self).__name__, shape, base, share, layout)
        self.base, self.layout = base, layout

    def rotate(self, q: Tensor, k: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
        turns = frequencies(self.turned, self.base, positions.device)  # (r/2,) fp64
        angle = positions.to(turns.dtype)[:, None] * turns  # (T, r/2)
        cos, sin = angle.cos().float(), angle.sin().float()
        return rotate(q, cos, sin, self.layout), rotate(k, cos, sin, self.layout)


def turned_dimensions(name: str, shape: Shape, base: float, share: float, layout: Layout) -> int:
    """How many dimensions of each head turn; complains in the name of the strategy."""
    if base <= 1:
        raise ValueError(f"{name}: base: got {base}, expected a number above 1; the paper uses 10000")
    if layout not in ("half", "interleaved"):
        raise ValueError(f"{name}: layout: got {layout!r}, expected half or interleaved")
    if not 0 < share <= 1:
        raise ValueError(
            f"{name}: share: got {share}, expected a part of the head in (0, 1]; the paper turns all of it: 1"
        )
    turned = round(share * shape.head_dim)
    if turned < 2 or turned % 2:
        raise ValueError(
            f"{name}: share: {share} of a head dimension of {shape.head_dim} turns {turned} dimensions, expected an "
            "even number of 2 or more; choose another share, or heads and dim with an even head dimension"
        )
    return turned

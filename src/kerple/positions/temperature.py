"""`SSMax` and `Temperature`: factors of the scores that grow with the number of keys a query sees."""

import math

import torch
from torch import Tensor, nn

from kerple.positions.base import Position, Shape
from kerple.positions.products import precise
from kerple.positions.token_positions import TokenPositions


class SSMax(Position):
    """Scalable softmax, ``s_h · log(n) · q·k / √δ`` for a query that sees n keys (Nakanishi 2025, arXiv 2501.19399,
    section 3).

    n is at most the window. For a query that sees one key the factor is log 1 = 0, which changes nothing. It says
    nothing of positions; combine it with a strategy that does by `Combined`.

    Parameters: `H`, one set per layer unless the model says otherwise. Cost: one multiplication per entry of q.

    Args:
        shape: Sizes of the model.
        start: Initial value of s; None is 1 / log L, with which scores at the training length are those of plain
            softmax.

    Raises:
        UserError: If the start is not positive.
    """

    shift_invariant = True
    per_layer = True

    def __init__(self, shape: Shape, start: float | None = None) -> None:
        super().__init__()
        self.require(start is None or start > 0, "start", start, "a positive number, such as 0.43")
        start = 1 / math.log(max(shape.length, 2)) if start is None else start
        self.scale = nn.Parameter(torch.full((shape.heads,), start, dtype=torch.float32))

    def transform_qk(self, q: Tensor, k: Tensor, state: Tensor | None, at: TokenPositions) -> tuple[Tensor, Tensor]:
        factor = self.scale[:, None, None] * at.visible.to(self.scale.dtype).log()[:, None]  # (H, T, 1)
        return (precise(q) * factor).to(q.dtype), k


class Temperature(Position):
    """Llama 4's temperature of attention: ``q · (1 + share · log(1 + ⌊(m + 1) / every⌋))`` for the query in row m.

    The published model has it in the layers without rotary embedding: a `LayerPattern` of local RoPE and this. Source:
    Meta, Llama 4 (2025), its published code; scalable softmax (arXiv 2501.19399) has learned factors for it.

    Parameters: `0`. Cost: one multiplication per entry of q.

    Args:
        shape: Sizes of the model.
        share: Factor of the logarithm.
        every: Number of rows after which the factor grows; None is the training length, as 8192 for Llama 4's
            pretraining.

    Raises:
        UserError: If a number is not positive.
    """

    shift_invariant = True

    def __init__(self, shape: Shape, share: float = 0.1, every: int | None = None) -> None:
        super().__init__()
        self.share, self.every = share, shape.length if every is None else every
        self.require(share > 0, "share", share, "a positive number; Llama 4 has 0.1")
        self.require(self.every >= 1, "every", every, "a positive number; Llama 4 has 8192")

    def transform_qk(self, q: Tensor, k: Tensor, state: Tensor | None, at: TokenPositions) -> tuple[Tensor, Tensor]:
        steps = torch.div(at.rows + 1, self.every, rounding_mode="floor")  # (T,)
        factor = 1 + self.share * torch.log1p(steps.to(precise(q).dtype))[:, None]  # (T, 1)
        return (precise(q) * factor).to(q.dtype), k

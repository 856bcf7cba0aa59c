"""`SSMax` and `Temperature`: factors of the scores that grow with the number n of keys that a query sees.

With a window, n is at most ``window + first_keys`` of the `Visibility`.
"""

import math
from typing import Literal

import torch
from torch import Tensor, nn

from kerple.positions.base import Position, Shape
from kerple.positions.fp32_matmul import precise
from kerple.positions.token_positions import QueriesAndKeys, TokenPositions

Rule = Literal["llama4", "ministral3", "beam", "inkling", "swan"]


class SSMax(Position):
    """Scalable softmax: in head h, the scores of a query that sees n keys are multiplied by ``s_h · log(n)`` (Nakanishi
    2025, arXiv 2501.19399, section 3).

    s is learned. With ``bias`` the factor is ``s_h · log(n) + b_h``, as in the published code of Mistral Large 4
    (Mistral AI 2026), where s is initialised to 0 and b to 1. The factor does not depend on positions; use `Combined`
    to add a strategy with positions.

    Parameters: `H if bias is None else 2 * H`, one set per layer by default.
    Cost: one multiplication per entry of q.

    Args:
        shape: Sizes of the model.
        start: Initial value of s; None is 1 / log L, where L is the training length. Without b, the factor of a query
            that sees L keys is then 1.
        bias: Initial value of b; None for no b.

    Raises:
        UserError: If ``start`` is negative, or 0 without ``bias``.
    """

    shift_invariant = True
    per_layer = True

    def __init__(self, shape: Shape, start: float | None = None, bias: float | None = None) -> None:
        super().__init__()
        expected = "a positive number, such as 0.43, or 0 if `bias` is a number"
        self.require(start is None or start > 0 or (start == 0 and bias is not None), "start", start, expected)
        start = 1 / math.log(max(shape.length, 2)) if start is None else start
        self.scale = nn.Parameter(torch.full((shape.heads,), start, dtype=torch.float32))
        self.offset = None if bias is None else nn.Parameter(torch.full_like(self.scale.detach(), bias))

    def transform_qk(self, q: Tensor, k: Tensor, state: Tensor | None, positions: TokenPositions) -> QueriesAndKeys:
        factor = self.scale[:, None] * positions.visible.to(self.scale.dtype).log()  # ((B,) H, T)
        factor = factor if self.offset is None else factor + self.offset[:, None]
        return (precise(q) * factor[..., None]).to(q.dtype), k


class Temperature(Position):
    """Factor of the scores that grows, by a published ``rule``, with the number n of keys that a query sees. The
    default is the rule of Llama 4, ``1 + scale · log(1 + ⌊n / length⌋)``. The rule ``swan`` is from arXiv 2504.08719.

    With n₀ = ``length`` and a = ``scale``, the factor of each ``rule`` is

    - ``llama4``: ``1 + a · log(1 + ⌊n / n₀⌋)`` (Meta 2025, published code of Llama 4; n₀ = 8192);
    - ``ministral3``: ``1 + a · log(1 + ⌊(n - 1) / n₀⌋)`` (Mistral AI 2025, published code; n₀ is the training length);
    - ``beam``: ``(1 + n / n₀)^a`` (published code of Beam, 2026; n₀ = 2048);
    - ``inkling``: ``1 + a · log(max(n / n₀, 1))`` (Thinking Machines 2026, published code; n₀ = 128000);
    - ``swan``: ``log(n₀ + n - 1) / log(n₀)`` in evaluation, 1 in training (Puvvada et al. 2025, arXiv 2504.08719,
      section 2.2 and appendix D, where n₀ is fitted to a trained model). a is not used.

    The published models use a = 0.1, and have this factor only in global layers, which have no window. Except in
    Ministral 3, global layers have no rotary embedding; use a `LayerPattern` of `RoPE` and Temperature. `SSMax` is a
    learned factor.

    Parameters: `0`. Cost: one multiplication per entry of q.

    Args:
        shape: Sizes of the model.
        rule: Name of the rule.
        scale: Factor or exponent a of the rule.
        length: Number of keys n₀ of the rule; None is the training length.

    Raises:
        UserError: If there is no such rule, ``scale`` is not positive, or ``length`` is below 2.
    """

    shift_invariant = True

    def __init__(self, shape: Shape, rule: Rule = "llama4", scale: float = 0.1, length: int | None = None) -> None:
        super().__init__()
        self.require_name("rule", rule, Rule)
        self.rule = rule
        self.scale = scale
        self.length = shape.length if length is None else length
        self.require(scale > 0, "scale", scale, "a positive number; published models have 0.1")
        self.require(rule != "swan" or scale == 0.1, "scale", scale, "no value, because swan has no scale")
        self.require(self.length >= 2, "length", self.length, "2 keys or more; Llama 4 has 8192")

    def transform_qk(self, q: Tensor, k: Tensor, state: Tensor | None, positions: TokenPositions) -> QueriesAndKeys:
        if self.rule == "swan" and self.training:
            return q, k
        return (precise(q) * self.factor(positions, precise(q).dtype)).to(q.dtype), k

    def factor(self, positions: TokenPositions, dtype: torch.dtype) -> Tensor:
        """Return the factor of each query, (T, 1), or (B, 1, T, 1) with documents, in this dtype."""
        n = positions.visible[..., None]
        if self.rule in ("llama4", "ministral3"):
            steps = (n if self.rule == "llama4" else n - 1) // self.length
            return 1 + self.scale * steps.to(dtype).log1p()
        if self.rule == "swan":
            return (n - 1 + self.length).to(dtype).log() / math.log(self.length)
        ratio = n.to(dtype) / self.length
        return (1 + ratio) ** self.scale if self.rule == "beam" else 1 + self.scale * ratio.clamp(min=1).log()

"""`Sink`: an additional logit in the softmax, so that the probabilities of all keys can be small."""

import torch
from torch import Tensor, nn

from kerple.positions.base import Position, Shape
from kerple.positions.token_positions import TokenPositions


class Sink(Position):
    """Probability ``exp(s_n) / (exp(σ_h) + Σ_l exp(s_l))`` of key n with score s_n in head h. The logit σ_h is learned,
    as in GPT-OSS (OpenAI 2025, arXiv 2508.10925), or constant. A constant of 0 gives softmax off by one (Miller
    2023).

    The remaining probability belongs to the sink, which has no value vector. Models without a sink often give this
    probability to the first token (Xiao et al. 2024, arXiv 2309.17453). The sink does not depend on positions; use
    `Combined` to add a strategy with positions.

    Parameters: `H if learnable else 0`, one set per layer by default.
    Cost: that of a fused kernel for attention biases, which also returns the log-sum-exp of the scores.

    Args:
        shape: Sizes of the model.
        learnable: Whether σ is learned instead of constant.
        start: Initial or constant value of σ.

    Raises:
        UserError: If ``start`` is not finite.
    """

    shift_invariant = True
    per_layer = True

    def __init__(self, shape: Shape, learnable: bool = True, start: float = 0.0) -> None:
        super().__init__()
        self.require(abs(start) < float("inf"), "start", start, "a finite logit, such as 0")
        logits = torch.full((shape.heads,), start, dtype=torch.float32)
        self.logits: Tensor = nn.Parameter(logits) if learnable else nn.Buffer(logits, persistent=False)

    def sink_logit(self, q: Tensor, positions: TokenPositions) -> Tensor:
        return self.logits  # (H,)

"""`Sink`: an additional logit without a value, so that a query can attend to no key."""

import torch
from torch import Tensor, nn

from kerple.positions.base import Position, Shape
from kerple.positions.token_positions import TokenPositions


class Sink(Position):
    """``p = exp(s) / (exp(σ_h) + Σ exp(s))``: σ learned per head, as in GPT-OSS (OpenAI 2025, arXiv 2508.10925), or 0
    for all, softmax off by one (Miller 2023).

    Models without a sink use the first token as one (Xiao et al. 2024, arXiv 2309.17453). The sink contains no
    positions; use `Combined` to add a strategy with positions.

    Parameters: `H * learnable`, one set per layer by default.
    Cost: the log-sum-exp of the scores, an output of fused attention with a table.

    Args:
        shape: Sizes of the model.
        learnable: Whether σ is learned.
        start: Initial value of σ.

    Raises:
        UserError: If the start is not finite.
    """

    shift_invariant = True
    per_layer = True

    def __init__(self, shape: Shape, learnable: bool = True, start: float = 0.0) -> None:
        super().__init__()
        self.require(abs(start) < float("inf"), "start", start, "a finite logit, such as 0")
        self.logits: Tensor
        logits = torch.full((shape.heads,), start, dtype=torch.float32)
        if learnable:
            self.logits = nn.Parameter(logits)
        else:
            self.register_buffer("logits", logits, persistent=False)

    def sink_logit(self, q: Tensor, positions: TokenPositions) -> Tensor:
        return self.logits  # (H,)

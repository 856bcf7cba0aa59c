"""`OutputGate`: a gate on the output of attention, which can switch off a head."""

import torch
from torch import Tensor, nn

from kerple.base.bf16 import linear
from kerple.positions.base import Position, Shape


class OutputGate(Position):
    """The output o of attention is multiplied by a gate before the output projection: ``o · σ(W_g x)`` (Qiu et al.
    2025, arXiv 2505.06708, section 2.2).

    x is the hidden state of the token after the block's norm. W_g is initialised to 0, so that every gate is 1/2 at
    first. The gate does not depend on positions; use `Combined` to add a strategy with positions. The gate is computed
    in the precision of the linear layers.

    Parameters: `D * (D if elementwise else H)`, one set per layer by default.
    Cost: the product W_g x for each token. Attention stays fused.

    Args:
        shape: Sizes of the model.
        elementwise: Whether each of the H · δ numbers in o has a gate, as in Qwen3-Next. If False, each head has one.
    """

    shift_invariant = True
    per_layer = True

    def __init__(self, shape: Shape, elementwise: bool = False) -> None:
        super().__init__()
        self.heads = shape.heads
        gates = shape.heads * shape.head_dim if elementwise else shape.heads
        self.gate_weight = nn.Parameter(torch.zeros(gates, shape.dim, dtype=torch.float32))

    def transform_output(self, out: Tensor, x: Tensor) -> Tensor:
        gate = linear(x, self.gate_weight.to(x.dtype)).sigmoid()  # (B, T, H·δ or H)
        return out * gate.unflatten(-1, (self.heads, -1)).transpose(1, 2).to(out.dtype)

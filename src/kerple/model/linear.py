"""`Linear`: linear layers that are fast in bf16 on processors without bf16 instructions."""

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from kerple.base.bf16_instructions import emulates_bf16


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """Return ``x @ weight.T + bias``, as `torch.nn.functional.linear` does.

    On a CPU without bf16 instructions, products of bf16 factors are computed in fp32, forward and backward. Factors and
    results are rounded to bf16, and sums are fp32, as in hardware. Torch would emulate bf16 instructions: a product of
    matrices then takes up to 10 times as long.

    Args:
        x: Inputs (…, D).
        weight: Weight (n, D).
        bias: Bias vector (n,), or None.

    Returns:
        Tensor (…, n); bf16 under autocast to bf16, except for fp64 inputs.
    """
    rounded = x.dtype == weight.dtype == torch.bfloat16
    if torch.is_autocast_enabled("cpu") and torch.get_autocast_dtype("cpu") == torch.bfloat16:
        rounded = torch.float64 not in (x.dtype, weight.dtype)
    if not rounded or not emulates_bf16(x):
        return F.linear(x, weight, bias)
    with torch.autocast("cpu", enabled=False):
        bias = None if bias is None else bias.bfloat16().float()
        return F.linear(x.bfloat16().float(), weight.bfloat16().float(), bias).bfloat16()


class Linear(nn.Linear):
    """`torch.nn.Linear` that computes `linear`."""

    def forward(self, x: Tensor) -> Tensor:
        """Apply the layer, (…, D) -> (…, n)."""
        return linear(x, self.weight, self.bias)

"""`bf16_instructions` of this processor, and linear layers that are fast in bf16 without them."""

import os
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.nn import functional as F

INSTRUCTIONS = {"amx_bf16": "AMX", "avx512_bf16": "AVX512-BF16", "bf16": "ARM BF16", "sve_bf16": "SVE BF16"}
# environment variable that limits the instructions of oneDNN, which multiplies matrices on the CPU
LIMIT = "ONEDNN_MAX_CPU_ISA"
# values of this variable that allow bf16 instructions begin with one of these strings
LIMITS_WITH_BF16 = ("AVX512_CORE_BF16", "AVX512_CORE_FP16", "AVX512_CORE_AMX", "AVX10", "ALL", "DEFAULT")


def bf16_instructions() -> str:
    """Return the name of this CPU's bf16 instructions, or an empty string if it has none or they are switched off.

    ``ONEDNN_MAX_CPU_ISA`` can switch them off; ``ATEN_CPU_CAPABILITY`` cannot. In a compiled network this function runs
    during tracing.
    """
    limit = os.environ.get(LIMIT, "DEFAULT").upper()
    if not limit.startswith(LIMITS_WITH_BF16) or not torch.backends.mkldnn.is_available():
        return ""
    capabilities = torch.cpu.get_capabilities()
    return next((name for key, name in INSTRUCTIONS.items() if capabilities.get(key)), "")


# sets the mark that torch.compiler.assume_constant_result sets, without its slow import of the compiler
bf16_instructions._dynamo_marked_constant = True  # type: ignore[attr-defined]


def emulates_bf16(x: Tensor) -> bool:
    """Return whether a tensor is on a CPU without bf16 instructions.

    A fake tensor is on no processor: `kerple.model.cost.memory` simulates a GPU with fake tensors.
    """
    return x.device.type == "cpu" and not isinstance(x, FakeTensor) and not bf16_instructions()


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """Return ``x @ weight.T + bias``, as `torch.nn.functional.linear` does.

    On a CPU without bf16 instructions, products of bf16 factors are computed in fp32, forward and backward. Factors and
    results are rounded to bf16, and sums are fp32, as in hardware. Torch would emulate the instructions, which takes
    several times as long.

    Args:
        x: Inputs (…, D).
        weight: Weight (n, D).
        bias: Bias vector (n,), or None.

    Returns:
        Tensor (…, n); bf16 under autocast to bf16, except for fp64 inputs.
    """
    rounded = x.dtype == weight.dtype == torch.bfloat16
    if torch.is_autocast_enabled("cpu"):
        rounded = torch.get_autocast_dtype("cpu") == torch.bfloat16 and torch.float64 not in (x.dtype, weight.dtype)
    if not rounded or not emulates_bf16(x):
        return F.linear(x, weight, bias)
    return _RoundedLinear.apply(x.bfloat16(), weight, None if bias is None else bias.bfloat16())


class _RoundedLinear(torch.autograd.Function):
    """`linear` with rounded factors. It stores the inputs in bf16 for the backward pass, and no copy of the weight."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        ctx.save_for_backward(x, weight)
        with torch.autocast("cpu", enabled=False):
            bias = None if bias is None else bias.float()
            return F.linear(x.float(), weight.bfloat16().float(), bias).bfloat16()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
        x, weight = ctx.saved_tensors
        x_needs_grad, weight_needs_grad, bias_needs_grad = ctx.needs_input_grad
        with torch.autocast("cpu", enabled=False):  # a compiled backward pass has the autocast of the forward pass
            grad = grad.float().flatten(0, -2)  # (N, n)
            d_x = (grad @ weight.bfloat16().float()).bfloat16().view(x.shape) if x_needs_grad else None
            d_weight = (grad.mT @ x.float().flatten(0, -2)).bfloat16().to(weight.dtype) if weight_needs_grad else None
            return d_x, d_weight, grad.sum(0).bfloat16() if bias_needs_grad else None


class Linear(nn.Linear):
    """`torch.nn.Linear` that computes `linear`."""

    def forward(self, x: Tensor) -> Tensor:
        """Apply the layer, (…, D) -> (…, n)."""
        return linear(x, self.weight, self.bias)

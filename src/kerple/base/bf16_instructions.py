"""`bf16_instructions` and `emulates_bf16`: whether this processor multiplies bf16 in hardware."""

import os

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor

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

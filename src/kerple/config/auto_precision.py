"""The precision ``auto``: bf16-mixed if the device multiplies bf16 in hardware, else fp32."""

import os
from typing import Any

import torch

FAST, SAFE = "bf16-mixed", "32-true"
AMPERE = (8, 0)  # the first CUDA compute capability whose tensor cores multiply bf16
INSTRUCTIONS = {"amx_bf16": "AMX", "avx512_bf16": "AVX512-BF16", "bf16": "ARM BF16", "sve_bf16": "SVE BF16"}
# environment variable that limits the instructions of oneDNN, which multiplies matrices on the CPU
LIMIT = "ONEDNN_MAX_CPU_ISA"
# values of this variable that allow bf16 instructions begin with one of these strings
LIMITS_WITH_BF16 = ("AVX512_CORE_BF16", "AVX512_CORE_FP16", "AVX512_CORE_AMX", "AVX10", "ALL", "DEFAULT")
EMULATED = "this processor emulates bf16, and a step takes 1.7 to 10 times as long as in fp32"


def choose_precision(accelerator: Any = "auto") -> tuple[str, str]:
    """Choose the precision for a device. Return it and the reason in a few words.

    With several CUDA devices, the device with the lowest compute capability decides. On a CPU, bf16 is chosen only if
    the processor has bf16 instructions. Without these instructions, bf16 is emulated. ``ONEDNN_MAX_CPU_ISA`` can switch
    bf16 instructions off; ``ATEN_CPU_CAPABILITY`` cannot. Training steps of the demo were timed on one occasion, on an
    AMD Zen 4; the log was not kept. With AVX512-BF16, a step in bf16 took 0.54 to 0.63 times as long as in fp32. It
    took 1.7 times as long with instructions limited to AVX-512 without bf16, and 10 times as long with AVX2.

    Args:
        accelerator: Value of ``trainer.accelerator``. With ``auto``, ``gpu`` and ``cuda``, CUDA devices are used if
            there are any.
    """
    if accelerator in ("auto", "gpu", "cuda") and torch.cuda.is_available():
        oldest = min(range(torch.cuda.device_count()), key=torch.cuda.get_device_capability)
        capability = torch.cuda.get_device_capability(oldest)
        device = f"{torch.cuda.get_device_name(oldest)}, compute capability {capability[0]}.{capability[1]}"
        return (FAST if capability >= AMPERE else SAFE), f"the device is {device}"
    if accelerator not in ("auto", "cpu"):
        return SAFE, f"the accelerator is {accelerator}"
    if instructions := _bf16_instructions():
        return FAST, f"the processor has {instructions}"
    return SAFE, "the processor does not multiply bf16 in hardware"


def emulated(precision: Any, accelerator: Any = "auto") -> bool:
    """Return whether training with this precision and accelerator runs on a CPU that emulates bf16."""
    on_cpu = accelerator == "cpu" or (accelerator == "auto" and not torch.cuda.is_available())
    return on_cpu and str(precision).startswith("bf16") and not _bf16_instructions()


def _bf16_instructions() -> str:
    """Return the name of this CPU's bf16 instructions, or an empty string if it has none or they are switched off."""
    limit = os.environ.get(LIMIT, "DEFAULT").upper()
    if not limit.startswith(LIMITS_WITH_BF16) or not torch.backends.mkldnn.is_available():
        return ""
    capabilities = torch.cpu.get_capabilities()
    return next((name for key, name in INSTRUCTIONS.items() if capabilities.get(key)), "")

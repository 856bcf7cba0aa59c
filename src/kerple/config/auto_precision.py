"""The precision ``auto``: bf16-mixed if the device multiplies bf16 in hardware, else fp32."""

from typing import Any

import torch

from kerple.base.bf16 import bf16_instructions

FAST, SAFE = "bf16-mixed", "32-true"
AMPERE = (8, 0)  # the first CUDA compute capability whose tensor cores multiply bf16
EMULATED = "this processor emulates bf16, and a step takes 1.1 to 1.4 times as long as in fp32"


def choose_precision(accelerator: Any = "auto") -> tuple[str, str]:
    """Choose the precision for a device. Return it and the reason in a few words.

    With several CUDA devices, the device with the lowest compute capability decides. On a CPU, bf16 is chosen only if
    the processor has bf16 instructions. Without these instructions, bf16 is emulated (`kerple.base.bf16`). Training
    steps of the demo were timed on two occasions; the logs were not kept. On an AMD Zen 4 with AVX512-BF16, a step in
    bf16 took 0.54 to 0.63 times as long as in fp32. On an Intel processor with AVX-512 but no bf16 instructions, it
    took 1.1 to 1.4 times as long, also with instructions limited to AVX2.

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
    if instructions := bf16_instructions():
        return FAST, f"the processor has {instructions}"
    return SAFE, "the processor does not multiply bf16 in hardware"


def emulated(precision: Any, accelerator: Any = "auto") -> bool:
    """Return whether training with this precision and accelerator runs on a CPU that emulates bf16."""
    on_cpu = accelerator == "cpu" or (accelerator == "auto" and not torch.cuda.is_available())
    return on_cpu and str(precision).startswith("bf16") and not bf16_instructions()

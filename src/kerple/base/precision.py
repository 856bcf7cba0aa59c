"""Our Trainer, with ``precision: auto``: bf16-mixed if the device multiplies bf16 in hardware, and fp32 otherwise."""

import os
from typing import Any, Literal, cast

import torch
from jsonargparse import Namespace
from lightning_fabric.connector import _PRECISION_INPUT
from pytorch_lightning import Trainer
from pytorch_lightning.utilities.rank_zero import rank_zero_only

from kerple.base.errors import UserError

FAST, SAFE = "bf16-mixed", "32-true"
AMPERE = (8, 0)  # the first CUDA compute capability whose tensor cores multiply bf16
INSTRUCTIONS = {"amx_bf16": "AMX", "avx512_bf16": "AVX512-BF16", "bf16": "ARM BF16", "sve_bf16": "SVE BF16"}
# oneDNN multiplies matrices on the CPU; this variable can forbid it some of the processor's instructions
LIMIT = "ONEDNN_MAX_CPU_ISA"
LIMITS_WITH_BF16 = ("AVX512_CORE_BF16", "AVX512_CORE_FP16", "AVX512_CORE_AMX", "AVX10", "ALL", "DEFAULT")
EMULATED = "this processor emulates bf16, and a step takes 2 to 20 times as long as in fp32"


class AutoTrainer(Trainer):
    """Lightning's Trainer with the precision ``auto``, and no Apple GPU.

    An Apple GPU has no fp64, in which losses are summed: ``accelerator: auto`` leaves it out.

    Args:
        precision: Any of Lightning's, or ``auto`` for the one that `choose` returns.

    Raises:
        UserError: If the accelerator is an Apple GPU, or a number is out of range that Lightning accepts: a negative
            ``gradient_clip_val`` would reverse the gradient.
    """

    def __init__(self, *args: Any, precision: Literal["auto"] | _PRECISION_INPUT | None = None, **kwargs: Any) -> None:
        accelerator = kwargs.get("accelerator", "auto")
        if torch.backends.mps.is_available() and not torch.cuda.is_available():
            if accelerator in ("gpu", "mps"):
                raise UserError(f"trainer.accelerator: got {accelerator}, an Apple GPU without fp64; expected cpu")
            kwargs["accelerator"] = "cpu" if accelerator == "auto" else accelerator
        resolved = choose(kwargs.get("accelerator", "auto"))[0] if precision == "auto" else precision
        for name, lowest in (("gradient_clip_val", 0), ("accumulate_grad_batches", 1)):
            if (value := kwargs.get(name)) is not None and not value >= lowest:
                raise UserError(f"trainer.{name}: got {value}, expected {lowest} or more")
        for name in ("limit_train_batches", "val_check_interval", "check_val_every_n_epoch"):
            if kwargs.get(name) == 0:
                raise UserError(f"trainer.{name}: got {kwargs[name]}, expected a positive number")
        if kwargs.get("overfit_batches"):  # Lightning would replace our sampler, and with it the order
            raise UserError("trainer.overfit_batches: got a number, expected 0; give data.samples to fit few samples")
        super().__init__(*args, precision=cast("_PRECISION_INPUT | None", resolved), **kwargs)

    @property
    def log_dir(self) -> str:
        """The run's folder, where results are written, whatever folder a logger has."""
        return self.strategy.broadcast(self.default_root_dir)


def choose(accelerator: Any = "auto") -> tuple[str, str]:
    """Choose the precision for a device; return it and the reason in a few words.

    On the CPU the instructions decide, because bf16 is emulated without them. A training step of the demo's model took
    0.54 to 0.63 of fp32's time with AVX512-BF16 (AMD Zen 4); on the same processor it took 1.7 times as long with
    AVX-512 alone, and 10 times as long with AVX2. Only oneDNN uses these instructions: ``ONEDNN_MAX_CPU_ISA`` switches
    them off, ``ATEN_CPU_CAPABILITY`` does not (0.56 of the time with ``avx2``). This was timed by hand; no record of it
    is kept.

    Args:
        accelerator: The Trainer's option. With ``auto`` and ``gpu``, a CUDA device is used if there is one.
    """
    if accelerator in ("auto", "gpu", "cuda") and torch.cuda.is_available():
        oldest = min(range(torch.cuda.device_count()), key=torch.cuda.get_device_capability)
        capability = torch.cuda.get_device_capability(oldest)
        device = f"{torch.cuda.get_device_name(oldest)}, compute capability {capability[0]}.{capability[1]}"
        return (FAST if capability >= AMPERE else SAFE), f"the device is {device}"
    if accelerator not in ("auto", "cpu"):
        return SAFE, f"the accelerator is {accelerator}"
    instructions = _bf16_instructions()
    if instructions:
        return FAST, f"the processor has {instructions}"
    return SAFE, "the processor does not multiply bf16 in hardware"


def resolve_auto(trainer: Namespace, resumed: str | None = None) -> None:
    """Replace ``auto`` in the Trainer's options by a precision, and print one line that says which and why.

    Args:
        trainer: The options.
        resumed: Precision of the fit that is resumed, which keeps it; None for a new fit.
    """
    if trainer.precision == "auto":
        trainer.precision, reason = (resumed, "the run was begun with it") if resumed else choose(trainer.accelerator)
        print_once(f"precision {trainer.precision}, because {reason}")
    if emulated(trainer.precision, trainer.accelerator):
        print_once(f"warning: precision {trainer.precision}: {EMULATED}; {SAFE} is faster here")


@rank_zero_only
def print_once(line: str) -> None:
    """Print a line on the first process."""
    print(line, flush=True)


def emulated(precision: Any, accelerator: Any = "auto") -> bool:
    """Whether this precision makes a CPU compute in bf16 without instructions for it."""
    on_cpu = accelerator == "cpu" or (accelerator == "auto" and not torch.cuda.is_available())
    return on_cpu and str(precision).startswith("bf16") and not _bf16_instructions()


def _bf16_instructions() -> str:
    """Name of the instructions that multiply bf16 on this CPU; empty if there are none or they are switched off."""
    limit = os.environ.get(LIMIT, "DEFAULT").upper()
    if not limit.startswith(LIMITS_WITH_BF16) or not torch.backends.mkldnn.is_available():
        return ""
    capabilities = torch.cpu.get_capabilities()
    return next((name for key, name in INSTRUCTIONS.items() if capabilities.get(key)), "")

"""`precision: auto` on simulated hardware."""

import pytest
import torch
from jsonargparse import Namespace

from kerple.config.auto_precision import choose_precision, emulated
from kerple.training.trainer import AutoTrainer, resolve_auto


@pytest.fixture
def machine(monkeypatch):
    """Simulates a CPU with these instructions, and CUDA devices with these compute capabilities."""

    def build(*instructions, gpus=(), limit="DEFAULT"):
        monkeypatch.setenv("ONEDNN_MAX_CPU_ISA", limit)
        monkeypatch.setattr(torch.cpu, "get_capabilities", lambda: dict.fromkeys(instructions, True))
        monkeypatch.setattr(torch.backends.mkldnn, "is_available", lambda: True)
        monkeypatch.setattr(torch.backends.mps, "is_available", lambda: False)
        monkeypatch.setattr(torch.cuda, "is_available", lambda: bool(gpus))
        monkeypatch.setattr(torch.cuda, "device_count", lambda: len(gpus))
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda i=0: gpus[i])
        monkeypatch.setattr(torch.cuda, "get_device_name", lambda i=0: f"GPU {i}")

    return build


@pytest.mark.parametrize(
    ("instructions", "limit", "gpus", "precision"),
    [
        (["avx2", "amx_bf16"], "DEFAULT", [], "bf16-mixed"),
        (["avx2"], "DEFAULT", [], "32-true"),
        (["amx_bf16"], "AVX512_CORE", [], "32-true"),  # instructions that are switched off do not count
        (["avx2"], "DEFAULT", [(8, 0)], "bf16-mixed"),
        (["avx2"], "DEFAULT", [(9, 0), (7, 5)], "32-true"),  # the oldest GPU decides
    ],
)
def test_bf16_is_chosen_for_hardware_that_multiplies_it(machine, instructions, limit, gpus, precision):
    machine(*instructions, limit=limit, gpus=gpus)
    assert choose_precision("auto")[0] == choose_precision("gpu" if gpus else "cpu")[0] == precision


def test_a_resumed_fit_keeps_its_precision_and_emulated_bf16_has_one_warning(machine, capsys):
    def resolved(precision, resumed=None):
        trainer = Namespace(precision=precision, accelerator="cpu")
        resolve_auto(trainer, resumed)
        return trainer.precision

    machine("amx_bf16")
    assert resolved("auto", "32-true") == "32-true"
    assert resolved("bf16-mixed", "32-true") == "bf16-mixed"  # the user's option
    capsys.readouterr()
    machine("avx2", gpus=((7, 0),))
    assert resolved("bf16-mixed") == "bf16-mixed"
    (line,) = capsys.readouterr().out.splitlines()
    assert line.startswith("warning: precision bf16-mixed")
    assert emulated("bf16-mixed", "cpu")
    assert not emulated("bf16-mixed", "auto")


def test_the_trainer_accepts_auto_and_does_not_use_apple_gpus(machine, monkeypatch):
    machine("avx2")
    monkeypatch.setattr(torch.backends.mps, "is_available", lambda: True)
    options = {"precision": "auto", "logger": False, "enable_progress_bar": False, "enable_checkpointing": False}
    trainer = AutoTrainer(**options)
    assert (trainer.precision, trainer.strategy.root_device.type) == ("32-true", "cpu")
    with pytest.raises(ValueError, match=r"trainer\.accelerator: got mps, expected cpu, because an Apple GPU"):
        AutoTrainer(accelerator="mps", **options)

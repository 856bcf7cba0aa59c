"""`precision: auto` on hardware that is made up here."""

from collections.abc import Callable

import pytest
import torch
from jsonargparse import Namespace

from kerple.base.precision import AutoTrainer, choose, emulated, settle

INSTRUCTIONS = ("amx_bf16", "avx512_bf16", "bf16", "sve_bf16")
Machine = Callable[..., None]


@pytest.fixture
def machine(monkeypatch):
    """A machine with these instructions on its CPU and CUDA devices of these compute capabilities."""

    def build(*instructions: str, gpus: tuple[tuple[int, int], ...] = (), limit: str | None = None) -> None:
        monkeypatch.delenv("ONEDNN_MAX_CPU_ISA", raising=False)
        monkeypatch.delenv("DNNL_MAX_CPU_ISA", raising=False)
        if limit:
            monkeypatch.setenv("ONEDNN_MAX_CPU_ISA", limit)
        assert set(instructions) <= {*INSTRUCTIONS, "avx2"}
        capabilities = {name: name in instructions for name in (*INSTRUCTIONS, "avx2")}
        monkeypatch.setattr(torch.cpu, "get_capabilities", lambda: capabilities)
        monkeypatch.setattr(torch.backends.mkldnn, "is_available", lambda: True)
        monkeypatch.setattr(torch.backends.mps, "is_available", lambda: False)
        monkeypatch.setattr(torch.cuda, "is_available", lambda: bool(gpus))
        monkeypatch.setattr(torch.cuda, "device_count", lambda: len(gpus))
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda i=0: gpus[i])
        monkeypatch.setattr(torch.cuda, "get_device_name", lambda i=0: f"GPU {i}")

    return build


@pytest.mark.parametrize("instruction", INSTRUCTIONS)
def test_a_processor_that_multiplies_bf16_trains_in_it(machine, instruction):
    machine("avx2", instruction)
    assert choose("auto")[0] == choose("cpu")[0] == "bf16-mixed"
    machine("avx2")
    assert choose("auto")[0] == choose("cpu")[0] == "32-true"


@pytest.mark.parametrize(
    ("limit", "precision"),
    [("AVX512_CORE", "32-true"), ("AVX512_CORE_BF16", "bf16-mixed"), ("avx2", "32-true"), ("DEFAULT", "bf16-mixed")],
)
def test_instructions_that_are_switched_off_do_not_count(machine, limit, precision):
    machine("avx2", "amx_bf16", "avx512_bf16", limit=limit)
    assert choose("cpu")[0] == precision


@pytest.mark.parametrize(
    ("gpus", "precision"), [(((7, 5),), "32-true"), (((8, 0),), "bf16-mixed"), (((9, 0), (7, 5)), "32-true")]
)
def test_the_compute_capability_of_the_oldest_gpu_decides(machine, gpus, precision):
    machine("avx2", gpus=gpus)
    assert choose("gpu")[0] == choose("auto")[0] == precision
    assert choose("cpu")[0] == "32-true"


def settled(precision: str, resumed: str | None = None) -> str:
    trainer = Namespace(precision=precision, accelerator="cpu")
    settle(trainer, resumed)
    return trainer.precision


def test_the_choice_is_printed_in_one_line(machine, capsys):
    machine("avx2")
    assert settled("auto") == "32-true"
    assert len(capsys.readouterr().out.splitlines()) == 1


def test_a_resumed_fit_keeps_its_precision(machine):
    machine("avx2", "amx_bf16")
    assert settled("auto", "32-true") == "32-true"
    assert settled("bf16-mixed", "32-true") == "bf16-mixed"  # as the user says


def test_emulated_bf16_has_one_warning(machine, capsys):
    machine("avx2")
    assert settled("bf16-mixed") == "bf16-mixed"
    (line,) = capsys.readouterr().out.splitlines()
    assert line.startswith("warning: precision bf16-mixed")
    machine("avx2", "avx512_bf16")
    assert (settled("bf16-mixed"), settled("32-true")) == ("bf16-mixed", "32-true")
    assert capsys.readouterr().out == ""
    machine("avx2", gpus=((7, 0),))
    assert not emulated("bf16-mixed", "auto")
    assert emulated("bf16-mixed", "cpu")


def test_the_trainer_takes_auto_without_the_command_line(machine):
    machine("avx2")
    assert AutoTrainer(accelerator="cpu", precision="auto", logger=False).precision == "32-true"


def test_an_apple_gpu_is_left_out_because_it_has_no_fp64(machine, monkeypatch):
    machine("bf16")
    monkeypatch.setattr(torch.backends.mps, "is_available", lambda: True)
    options = {"logger": False, "enable_progress_bar": False, "enable_checkpointing": False}
    assert AutoTrainer(**options).strategy.root_device.type == "cpu"
    for asked in ("mps", "gpu"):
        with pytest.raises(ValueError, match=f"trainer.accelerator: got {asked}, an Apple GPU"):
            AutoTrainer(accelerator=asked, **options)

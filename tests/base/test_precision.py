"""`precision: auto` on hardware that is made up here."""

from collections.abc import Callable

import pytest
import torch
from jsonargparse import Namespace

from kerple.base.precision import AutoTrainer, choose, emulated, settle

INSTRUCTIONS = ("amx_bf16", "avx512_bf16", "bf16", "sve_bf16")
Machine = Callable[..., None]


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch) -> Machine:
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
def test_a_processor_that_multiplies_bf16_trains_in_it(machine: Machine, instruction: str) -> None:
    machine("avx2", instruction)
    assert choose("auto")[0] == choose("cpu")[0] == "bf16-mixed"


def test_an_ordinary_processor_trains_in_fp32(machine: Machine) -> None:
    machine("avx2")
    assert choose("auto")[0] == choose("cpu")[0] == "32-true"


@pytest.mark.parametrize(
    ("limit", "precision"),
    [
        ("AVX2", "32-true"),
        ("AVX512_CORE", "32-true"),
        ("AVX512_CORE_BF16", "bf16-mixed"),
        ("AVX10_1_512_AMX", "bf16-mixed"),
        ("avx2", "32-true"),
        ("DEFAULT", "bf16-mixed"),
    ],
)
def test_instructions_that_are_switched_off_do_not_count(machine: Machine, limit: str, precision: str) -> None:
    machine("avx2", "amx_bf16", "avx512_bf16", limit=limit)
    assert choose("cpu")[0] == precision


@pytest.mark.parametrize(
    ("gpus", "precision"),
    [
        (((7, 5),), "32-true"),
        (((8, 0),), "bf16-mixed"),
        (((9, 0), (7, 5)), "32-true"),
    ],
)
def test_the_compute_capability_of_the_oldest_gpu_decides(
    machine: Machine, gpus: tuple[tuple[int, int], ...], precision: str
) -> None:
    machine("avx2", gpus=gpus)
    assert choose("gpu")[0] == choose("auto")[0] == precision
    assert choose("cpu")[0] == "32-true"


def settled(command: str, precision: str, trained: str | None = None) -> Namespace:
    config = Namespace(auto_precision=trained, trainer=Namespace(precision=precision, accelerator="cpu"))
    settle(config, command)
    return config


def test_the_choice_is_said_in_one_line_and_stored(machine: Machine, capsys: pytest.CaptureFixture[str]) -> None:
    machine("avx2")
    config = settled("fit", "auto")
    assert (config.trainer.precision, config.auto_precision) == ("32-true", "32-true")
    assert capsys.readouterr().out == "precision 32-true, because the processor does not multiply bf16 in hardware\n"


def test_a_test_on_another_machine_chooses_again(machine: Machine, capsys: pytest.CaptureFixture[str]) -> None:
    machine("avx2")
    assert settled("test", "auto", trained="bf16-mixed").trainer.precision == "32-true"
    assert "the run was trained with bf16-mixed on another machine" in capsys.readouterr().out

    machine("amx_bf16")
    assert settled("test", "auto", trained="bf16-mixed").trainer.precision == "bf16-mixed"
    assert "trained" not in capsys.readouterr().out


def test_a_resumed_fit_keeps_its_precision(machine: Machine, capsys: pytest.CaptureFixture[str]) -> None:
    machine("avx2", "amx_bf16")
    config = settled("fit", "auto", trained="32-true")
    assert (config.trainer.precision, config.auto_precision) == ("32-true", "32-true")
    assert "this machine would choose bf16-mixed" in capsys.readouterr().out


def test_bf16_that_is_asked_for_is_given_with_one_warning(machine: Machine, capsys: pytest.CaptureFixture[str]) -> None:
    machine("avx2")
    config = settled("fit", "bf16-mixed")
    assert (config.trainer.precision, config.auto_precision) == ("bf16-mixed", None)
    (line,) = capsys.readouterr().out.splitlines()
    assert line.startswith("warning: precision bf16-mixed: this processor emulates bf16")

    machine("avx2", "avx512_bf16")
    settled("fit", "bf16-mixed")
    settled("fit", "32-true")
    assert capsys.readouterr().out == ""


def test_a_gpu_emulates_nothing(machine: Machine) -> None:
    machine("avx2", gpus=((7, 0),))
    assert not emulated("bf16-mixed", "gpu")
    assert not emulated("bf16-mixed", "auto")
    assert emulated("bf16-mixed", "cpu")


def test_the_trainer_takes_auto_without_the_command_line(machine: Machine) -> None:
    machine("avx2")
    assert AutoTrainer(accelerator="cpu", precision="auto", logger=False).precision == "32-true"
    machine("avx2", "amx_bf16")
    assert AutoTrainer(accelerator="cpu", precision="auto", logger=False).precision == "bf16-mixed"


def test_an_apple_gpu_is_left_out_because_it_has_no_fp64(machine: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    machine("bf16")
    monkeypatch.setattr(torch.backends.mps, "is_available", lambda: True)
    options = {"logger": False, "enable_progress_bar": False, "enable_checkpointing": False}
    assert AutoTrainer(**options).strategy.root_device.type == "cpu"
    for asked in ("mps", "gpu"):
        with pytest.raises(ValueError, match=f"trainer.accelerator: got {asked}, an Apple GPU"):
            AutoTrainer(accelerator=asked, **options)

"""Each fault that public code had, alone in tiny models of many families, is found; no sound family is accused."""

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from copy import deepcopy
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch

from kerple.base.errors import UserError
from kerple.cli.probe import read_fp32_model
from kerple.probe.measured import measure_layers
from kerple.probe.report import probe_model
from tests.hf.test_bos_and_gguf import YARN as YARN_IN_GGUF
from tests.hf.test_bos_and_gguf import write_gguf
from tests.hf.tiny import hf, small
from tests.probe.models import FAMILIES, LENGTH, build

TABLE = Path(__file__).parents[2] / "docs/concepts/probe.md"


def module_of(model: Any) -> Any:
    return sys.modules[type(model).__module__]


def rope(name: str) -> dict[str, Any]:
    return FAMILIES[name][1].get("rope_parameters") or {}


def kinds(name: str) -> dict[str, dict[str, Any]]:
    """The RoPE of each kind of layer."""
    parameters = rope(name)
    return {"": parameters} if "rope_theta" in parameters else parameters


def rotaries(model: Any) -> list[Any]:
    return [m for m in model.modules() if "RotaryEmbedding" in type(m).__name__]


def buffers(rotary: Any) -> list[torch.Tensor]:
    return [b for n, b in rotary.named_buffers() if n.endswith("inv_freq")]


def rebuilt(name: str, change: Callable[[dict[str, Any]], dict[str, Any]], only: str = "") -> Any:
    """The model with other RoPE, as a loader makes it that misreads its configuration."""
    parameters = rope(name)
    if "rope_theta" in parameters:
        return build(name, rope_parameters=change(parameters))
    return build(name, rope_parameters={k: change(v) if not only or k == only else v for k, v in parameters.items()})


def frequencies_when(model: Any, condition: Callable[[torch.Tensor], bool], factor: float = 3.0) -> Any:
    """The model whose frequencies are others where a condition on the positions of a call is met."""
    for rotary in rotaries(model):

        def forward(x: Any, position_ids: Any, *args: Any, old: Any = rotary.forward, rotary: Any = rotary, **k: Any):
            changed = buffers(rotary) if condition(position_ids) else []
            for b in changed:
                b.mul_(factor)
            angles = old(x, position_ids, *args, **k)
            for b in changed:
                b.div_(factor)
            return angles

        rotary.forward = forward
    return model


def other_positions(model: Any, change: Callable[[torch.Tensor], torch.Tensor]) -> Any:
    for rotary in rotaries(model):
        rotary.forward = lambda x, position_ids, *a, old=rotary.forward, **k: old(x, change(position_ids), *a, **k)
    if hasattr(model.base_model, "wpe"):
        model.base_model.wpe.register_forward_pre_hook(lambda m, a: (change(a[0]),))
    return model


def set_frequencies(name: str, value: Callable[[torch.Tensor], torch.Tensor]) -> Any:
    model = build(name)
    for b in (b for rotary in rotaries(model) for b in buffers(rotary)):
        b.copy_(value(b))
    return model


def patterned(name: str, change: Callable[[list[int]], list[int]]) -> Any:
    """The model with another pattern of layers without positions."""
    if pattern := FAMILIES[name][1].get("no_rope_layers"):
        return build(name, no_rope_layers=change(pattern))
    model = build(name)
    local = [k == "sliding_attention" for k in model.config.layer_types]
    for layer, rotated in zip(model.model.layers, change([int(x) for x in local]), strict=True):
        attention = layer.self_attn
        if hasattr(attention, "is_sliding"):
            attention.is_sliding = bool(rotated)
        if name == "cohere2":
            attention.sliding_window = 8 if rotated else None
    return model


@contextmanager
def norm_after_rotation(model: Any) -> Iterator[None]:
    module = module_of(model)
    name = "apply_rotary_emb" if "llama4" in module.__name__ else "apply_rotary_pos_emb"
    old = getattr(module, name)

    def normed(x: torch.Tensor) -> torch.Tensor:
        weight = torch.linspace(0.5, 1.5, x.shape[-1])
        return torch.nn.functional.rms_norm(x, x.shape[-1:], weight)

    with patch.object(module, name, lambda *a, **k: tuple(normed(x) for x in old(*a, **k))):
        yield


def from_zero(model: Any) -> Any:
    """A cache that counts from 0: after the prefill positions begin again."""

    def restart(module: Any, args: Any, kwargs: dict[str, Any]) -> Any:
        cache = kwargs.get("cache", kwargs.get("past_key_values"))
        if cache is not None and cache.get_seq_length():
            tokens = kwargs["input_ids"] if "input_ids" in kwargs else args[0]
            kwargs["position_ids"] = torch.arange(tokens.shape[1])[None]
        return args, kwargs

    model.base_model.register_forward_pre_hook(restart, with_kwargs=True)
    return model


def window_changed(name: str, by: int) -> Any:
    model = build(name)
    model.config.sliding_window += by
    return model


WITH_ROPE = [n for n in FAMILIES if n not in ("gpt2", "bloom")]
YARN = [n for n in WITH_ROPE if any(p.get("rope_type") == "yarn" for p in kinds(n).values())]
WINDOWS = [n for n in FAMILIES if FAMILIES[n][1].get("sliding_window")]
PATTERNS = ["smollm3", "cohere2", "exaone4", "llama4"]
SCALED = [n for n in WITH_ROPE if any("factor" in p and p["factor"] for p in kinds(n).values())]
WITH_LOCAL, LOCAL = ["gemma3", "olmo3"], "sliding_attention"
OWN_ROTARY = [n for n in WITH_ROPE if n not in ("llama+linear", "llama+dynamic", "llama+llama3")]


REBUILT = [n for n in SCALED if n not in ("gemma3", "phi3", "llama+dynamic")]


def changed(**changes: Any) -> Callable[[str], Any]:
    """Other parameters of RoPE than in the configuration."""
    return lambda n: rebuilt(n, lambda p: p | changes)


FAULTS: dict[str, tuple[list[str], Callable[[str], Any]]] = {
    "YaRN left out": (YARN, changed(rope_type="default")),
    "YaRN in window layers": (WITH_LOCAL, lambda n: rebuilt(n, lambda p: rope(n)["full_attention"], LOCAL)),
    "β swapped": (YARN, changed(beta_fast=1.0, beta_slow=32.0)),
    "wrong θ": (WITH_ROPE, changed(rope_theta=2000.0)),
    "wrong factor": (SCALED, lambda n: rebuilt(n, lambda p: p | ({"factor": 8.0} if p.get("factor") else {}))),
    "window dropped": (WINDOWS, build),
    "window too long by one": (WINDOWS, lambda n: window_changed(n, 1)),
    "window too short by one": (WINDOWS, lambda n: window_changed(n, -1)),
    "positions restarted inside a sequence": (
        [*OWN_ROTARY, "gpt2"],
        lambda n: other_positions(build(n), lambda ids: ids % 20),
    ),
    "a norm after the rotation": (OWN_ROTARY, build),
    "a cache that counts from 0": ([*OWN_ROTARY, "gpt2"], lambda n: from_zero(build(n))),
    "layers without positions rotated": (PATTERNS, lambda n: patterned(n, lambda p: [1] * len(p))),
    "pattern of layers without positions inverted": (PATTERNS, lambda n: patterned(n, lambda p: [1 - x for x in p])),
    "`inv_freq` zeroed at load": (OWN_ROTARY, lambda n: set_frequencies(n, torch.zeros_like)),
    "`inv_freq` rebuilt unscaled at load": (
        REBUILT,
        lambda n: set_frequencies(n, lambda b: 1000.0 ** (-torch.arange(len(b)) / len(b))),
    ),
    "prefill and decoding with different frequencies": (
        OWN_ROTARY,
        lambda n: frequencies_when(build(n), lambda ids: ids.shape[-1] == 1),
    ),
    "YaRN lost when the table of angles grows": (
        YARN,
        lambda n: frequencies_when(build(n), lambda ids: bool(ids.max() > LENGTH)),
    ),
    "LongRoPE's list chosen by allocated length": (
        ["phi3"],
        lambda n: set_frequencies(n, lambda b: b / (1 + torch.arange(8) / 4)),
    ),
}


@pytest.mark.parametrize("by", [0, 1, -1])
def test_a_window_that_is_too_long_to_be_read_is_measured_after_a_cache(by):
    model = build("mistral", sliding_window=2000, max_position_embeddings=4096)
    config = deepcopy(model.config)
    model.config.sliding_window += by
    assert any(verdict.differences for verdict in measure_layers(model, config)) == bool(by)


def test_a_scaling_that_transformers_loses_when_it_reads_a_gguf_file_is_found(tmp_path):
    model = small(hf.Qwen2Config, intermediate_size=64, num_key_value_heads=2, rope_theta=500.0)
    write_gguf(tmp_path / "model.gguf", model, YARN_IN_GGUF)
    sound, config = read_fp32_model(str(tmp_path / "model.gguf"))
    assert probe_model(sound, config).faults == []
    with pytest.raises(UserError, match=r"expected torch\.float32"):
        probe_model(deepcopy(sound).bfloat16(), config)
    lost = hf.AutoModelForCausalLM.from_pretrained(tmp_path, gguf_file="model.gguf").eval()
    assert "without yarn" in probe_model(lost, config).faults[0]


PATCHES: dict[str, Callable[[Any], Any]] = {
    "a norm after the rotation": norm_after_rotation,
    "window dropped": lambda model: patch.object(
        module_of(model), "create_sliding_window_causal_mask", module_of(model).create_causal_mask
    ),
}


@pytest.mark.parametrize("name", FAMILIES)
def test_no_sound_family_is_accused(name):
    model = build(name)
    assert probe_model(model, model.config).faults == []


@pytest.mark.parametrize("every", [False, pytest.param(True, marks=pytest.mark.slow)], ids=["first", "every"])
@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_is_found_in_the_families_that_can_have_it(fault, every):
    names, seed = FAULTS[fault]
    names = names if every else names[:1]
    found = []
    for name in names:
        config = build(name).config
        model = seed(name)
        with PATCHES[fault](model) if fault in PATCHES else nullcontext():
            differs = any(verdict.differences for verdict in measure_layers(model, config))
            found += [name] if differs or probe_model(model, config, layers=False).faults else []
    assert found == names
    if every:
        assert f"| {fault} | {len(found)} | {', '.join(found)} |" in TABLE.read_text(encoding="utf-8")

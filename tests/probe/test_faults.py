"""Each fault that public code has had is found in tiny models of many families, and correct models have no fault."""

import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from copy import deepcopy
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch

from kerple.base.errors import UserError
from kerple.hf.pretrained_model_reader import read_fp32_model
from kerple.probe.capture import SHORT
from kerple.probe.layer_checks import measure_layers
from kerple.probe.probe_model import probe_model
from tests.hf.test_bos_and_gguf import YARN as YARN_IN_GGUF
from tests.hf.test_bos_and_gguf import write_gguf
from tests.hf.test_export import rope
from tests.hf.test_modeling import random_kerple
from tests.hf.tiny import hf, random_model, small
from tests.probe.models import FAMILIES, LENGTH, build

from kerple.hf import retrofit  # isort: skip  # needs transformers, which tests.hf.tiny looks for

RANDOM_POSITIONS = {"class_path": "RandomizedPositions", "init_args": {"position": "RoPE"}}
PAGE = Path(__file__).parents[2] / "results/probe/faults.md"


def table_rows() -> list[list[str]]:
    """Return the cells of the tables of the page."""
    lines = PAGE.read_text(encoding="utf-8").splitlines()
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in lines if line.startswith("|")]


def kinds(name: str) -> dict[str, dict[str, Any]]:
    """Return the ``rope_parameters`` of each kind of layer; the kind is empty if all layers are equal."""
    parameters = FAMILIES[name][1].get("rope_parameters") or {}
    return {"": parameters} if "rope_theta" in parameters else parameters


def rebuild(name: str, change: Callable[[dict[str, Any]], dict[str, Any]], only: str = "") -> Any:
    """Build a model with changed ``rope_parameters``, in one kind of layer or in all."""
    parameters = {kind: change(p) if only in ("", kind) else p for kind, p in kinds(name).items()}
    return build(name, rope_parameters=parameters.get("", parameters))


def change_rope(**changes: Any) -> Callable[[str], Any]:
    return lambda name: rebuild(name, lambda parameters: parameters | changes)


def change_positions(change: Callable[[torch.Tensor], torch.Tensor], name: str) -> Any:
    """Build a model that computes angles or embeddings from changed positions."""
    model = build(name)
    for rotary in (m for m in model.modules() if "RotaryEmbedding" in type(m).__name__):
        rotary.forward = lambda x, position_ids, *a, old=rotary.forward, **k: old(x, change(position_ids), *a, **k)
    if hasattr(model.base_model, "wpe"):
        model.base_model.wpe.register_forward_pre_hook(lambda m, a: (change(a[0]),))
    return model


def set_frequencies(value: Callable[[torch.Tensor], torch.Tensor], name: str) -> Any:
    model = build(name)
    for buffer in (buffer for key, buffer in model.named_buffers() if key.endswith("inv_freq")):
        buffer.copy_(value(buffer))
    return model


def change_pattern(change: Callable[[list[int]], list[int]], name: str) -> Any:
    """Build a model with another pattern of layers without positions."""
    if pattern := FAMILIES[name][1].get("no_rope_layers"):
        return build(name, no_rope_layers=change(pattern))
    model = build(name)
    local = [int(kind == "sliding_attention") for kind in model.config.layer_types]
    for layer, rotated in zip(model.model.layers, change(local), strict=True):
        attention = layer.self_attn
        if hasattr(attention, "is_sliding"):
            attention.is_sliding = bool(rotated)
        if name == "cohere2":
            attention.sliding_window = 8 if rotated else None
    return model


def change_window(by: int, name: str) -> Any:
    model = build(name)
    model.config.sliding_window += by
    return model


@contextmanager
def norm_after_rotation(model: Any) -> Iterator[None]:
    module = sys.modules[type(model).__module__]
    name = "apply_rotary_emb" if "llama4" in module.__name__ else "apply_rotary_pos_emb"
    old = getattr(module, name)

    def norm(x: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.rms_norm(x, x.shape[-1:], torch.linspace(0.5, 1.5, x.shape[-1]))

    with patch.object(module, name, lambda *a, **k: tuple(norm(x) for x in old(*a, **k))):
        yield


def scale_scores(name: str) -> Any:
    model = build(name)
    for module in (m for m in model.modules() if isinstance(getattr(m, "scaling", None), float)):
        module.scaling *= 1.5
    return model


def drop_attribute(attribute: str, name: str) -> Any:
    model = build(name)
    for module in (m for m in model.modules() if hasattr(m, "layer_idx") and hasattr(m, attribute)):
        setattr(module, attribute, None)
    return model


def forget_state(name: str) -> Any:
    """Build a model whose linear layers forget their state when tokens are decoded."""
    model = build(name)

    def forget(module: Any, args: Any, options: dict[str, Any]) -> Any:
        single = (options | dict(enumerate(args)))["hidden_states"].shape[1] == 1
        return args, options | ({key: None for key in options if "cache" in key} if single else {})

    for module in (m for m in model.modules() if type(m).__name__.endswith(("DeltaNet", "H1Mixer"))):
        module.register_forward_pre_hook(forget, with_kwargs=True)
    return model


@contextmanager
def without_documents(model: Any) -> Iterator[None]:
    module = sys.modules[type(model).__module__]
    masks = [name for name in vars(module) if name.startswith("create_") and name.endswith("_mask")]
    old = {name: getattr(module, name) for name in masks}
    new = {name: lambda *a, mask=mask, **k: mask(*a, **k | {"position_ids": None}) for name, mask in old.items()}
    with patch.multiple(module, **new):
        yield


def without_window(model: Any) -> AbstractContextManager:
    module = sys.modules[type(model).__module__]
    return patch.object(module, "create_sliding_window_causal_mask", module.create_causal_mask)


WITH_ROPE = [n for n in FAMILIES if n not in ("gpt2", "bloom")]
RECURRENT = ["qwen3_next", "falcon_h1"]
ROW_COUNTING = ["llama+dynamic", "phi3", "llama4"]  # other documents change their logits by design
SEPARATED = [n for n in FAMILIES if n not in ("bloom", "gpt_oss", *RECURRENT, *ROW_COUNTING)]
LATENT = ["deepseek_v2", "deepseek_v3"]
YARN = [n for n in WITH_ROPE if any(p.get("rope_type") == "yarn" for p in kinds(n).values())]
WINDOWS = [n for n in FAMILIES if FAMILIES[n][1].get("sliding_window")]
PATTERNS = ["smollm3", "cohere2", "exaone4", "llama4"]
SCALED = [n for n in WITH_ROPE if any(p.get("factor") for p in kinds(n).values())]
WITH_LOCAL, LOCAL = ["gemma3", "olmo3"], "sliding_attention"
OWN_ROTARY = [n for n in WITH_ROPE if n not in ("llama+linear", "llama+dynamic", "llama+llama3")]
RESTARTED = [*OWN_ROTARY, "gpt2"]
REBUILT = [n for n in SCALED if n not in ("gemma3", "phi3", "llama+dynamic")]

# for each fault, the models that can have it, a function that builds such a model, and a patch of its code
FAULTS: dict[str, tuple[Any, ...]] = {
    "YaRN left out": (YARN, change_rope(rope_type="default")),
    "YaRN in window layers": (WITH_LOCAL, lambda n: rebuild(n, lambda p: kinds(n)["full_attention"], LOCAL)),
    "`beta_fast` and `beta_slow` swapped": (YARN, change_rope(beta_fast=1.0, beta_slow=32.0)),
    "wrong θ": (WITH_ROPE, change_rope(rope_theta=2000.0)),
    "wrong scaling factor": (SCALED, lambda n: rebuild(n, lambda p: p | ({"factor": 8.0} if p.get("factor") else {}))),
    "window dropped": (WINDOWS, build, without_window),
    "window too long by one": (WINDOWS, partial(change_window, 1)),
    "window too short by one": (WINDOWS, partial(change_window, -1)),
    "positions restarted inside a sequence": (RESTARTED, partial(change_positions, lambda ids: ids % 20)),
    "a norm with weights after the rotation": ([n for n in OWN_ROTARY if n not in LATENT], build, norm_after_rotation),
    "wrong softmax scale": ([n for n in FAMILIES if n != "bloom"], scale_scores),
    "soft cap left out": (["gemma2"], partial(drop_attribute, "attn_logit_softcapping")),
    "sinks left out": (["gpt_oss"], partial(drop_attribute, "sinks")),
    "packed documents not separated": (SEPARATED, build, without_documents),
    "state of linear layers lost while decoding": (RECURRENT, forget_state),
    "positions restarted after a cache": (RESTARTED, partial(change_positions, lambda ids: ids - ids[..., :1])),
    "RoPE in layers without positions": (PATTERNS, partial(change_pattern, lambda p: [1] * len(p))),
    "pattern of layers without positions inverted": (PATTERNS, partial(change_pattern, lambda p: [1 - x for x in p])),
    "`inv_freq` zeroed at load": (OWN_ROTARY, partial(set_frequencies, torch.zeros_like)),
    "`inv_freq` rebuilt unscaled at load": (
        REBUILT,
        partial(set_frequencies, lambda b: 1000.0 ** (-torch.arange(len(b)) / len(b))),
    ),
    "prefill and decoding with different frequencies": (
        OWN_ROTARY,
        partial(change_positions, lambda ids: 3 * ids if ids.shape[-1] == 1 else ids),  # three times the angles
    ),
    "YaRN lost when the table of angles grows": (
        YARN,
        partial(change_positions, lambda ids: 3 * ids if ids.max() > LENGTH else ids),
    ),
    "LongRoPE's long factors used for short texts": (
        ["phi3"],
        partial(set_frequencies, lambda b: b / (1 + torch.arange(8) / 4)),
    ),
}


@pytest.mark.parametrize("by", [0, 1, -1])
def test_a_long_window_is_measured_after_a_cache(by):
    model = build("mistral", sliding_window=2000, max_position_embeddings=4096)
    config = deepcopy(model.config)
    model.config.sliding_window += by
    assert any(verdict.differences for verdict in measure_layers(model, config)) == bool(by)


def test_the_scaling_that_transformers_ignores_in_a_gguf_file_is_a_fault(tmp_path):
    model = small(hf.Qwen2Config, intermediate_size=64, num_key_value_heads=2, rope_theta=500.0)
    write_gguf(tmp_path / "model.gguf", model, YARN_IN_GGUF)
    correct, config = read_fp32_model(str(tmp_path / "model.gguf"))
    assert probe_model(correct, config).faults == []
    with pytest.raises(UserError, match=r"expected torch\.float32"):
        probe_model(deepcopy(correct).bfloat16(), config)
    with pytest.raises(UserError, match=r"model: got training mode, expected evaluation mode .*model\.eval"):
        probe_model(deepcopy(correct).train(), config)
    unscaled = hf.AutoModelForCausalLM.from_pretrained(tmp_path, gguf_file="model.gguf").eval()
    assert "without yarn" in probe_model(unscaled, config).faults[0]


def test_a_model_without_attention_does_not_pass():
    config = hf.MambaConfig(vocab_size=96, hidden_size=32, num_hidden_layers=2, state_size=4)  # without heads
    model = hf.AutoModelForCausalLM.from_config(config).eval()
    report = probe_model(model, model.config, invariances=False)
    assert report.outcome == "nothing could be measured; 0 of 2 layers measured"
    assert [layer.expected for layer in report.layers] == ["state-space layer"] * 2


@pytest.mark.parametrize(
    ("name", "fails", "text"),
    [
        ("llama", lambda ids: ids.max() >= LENGTH // 2, f"positions up to {LENGTH - 1}"),
        ("mistral", lambda ids: ids.shape[1] > SHORT, "a text longer than 36"),
        ("llama", lambda ids: ids.shape[1] == 1, "decoding"),
    ],
)
@pytest.mark.parametrize("error", [IndexError, ValueError])
def test_a_layer_with_a_text_that_the_model_cannot_read_is_not_measured(name, fails, text, error):
    model = build(name, **({"sliding_window": 36} if name == "mistral" else {}))

    def rotate(x: torch.Tensor, position_ids: torch.Tensor, old: Any = model.model.rotary_emb.forward) -> Any:
        if fails(position_ids):
            raise error("out of range")
        return old(x, position_ids)

    model.model.rotary_emb.forward = rotate
    report = probe_model(model, model.config, invariances=False)
    assert report.outcome == "nothing could be measured; 0 of 4 layers measured"
    (reason,) = {str(v.unknown) for v in report.layers}
    assert reason.startswith(f"the model cannot read all inputs: {text} (")
    assert reason.endswith(f"{error.__name__}: out of range)")


def test_a_layer_whose_values_are_0_agrees():
    """As after an initialisation with 0: NaN would be read as different hidden states."""
    model = build("llama")
    model.model.layers[1].self_attn.v_proj.weight.data.zero_()
    assert probe_model(model, model.config, invariances=False).outcome == "no faults found; 4 of 4 layers measured"


def test_a_model_without_a_cache_is_measured_without_decoding():
    model = build("llama")
    model.register_forward_hook(lambda m, a, output: type(output)(logits=output.logits))
    report = probe_model(model, model.config, invariances=False)
    assert report.outcome == "no faults found; 4 of 4 layers measured"


@pytest.mark.parametrize("kind", ["Dory", "RecurrentGemma"])
def test_layers_that_are_run_repeatedly_and_configurations_without_a_length_are_read(kind):
    layers = {"num_hidden_layers": 4, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16}
    options = {
        "Dory": {"n_input_layers": 1, "n_recurrent_layers": 2, "n_output_layers": 1, "max_position_embeddings": LENGTH},
        "RecurrentGemma": {"lru_width": 64, "attention_window_size": 8},
    }[kind]
    sizes = {"vocab_size": 96, "hidden_size": 64, "intermediate_size": 48, "pad_token_id": 0}
    model = random_model(getattr(hf, f"{kind}Config")(**sizes, **layers, **options))
    verdicts = [verdict.verdict for verdict in measure_layers(model, model.config)]
    # Dory multiplies queries by weights after the rotation, and probe does not know this family
    attention = [2] if kind == "RecurrentGemma" else []
    assert [i for i, verdict in enumerate(verdicts) if verdict == "agrees"] == attention
    assert verdicts.count("not judged") == (4 if kind == "Dory" else 0)


def test_logits_of_another_shape_are_not_compared():
    model = build("llama")
    model.base_model.register_forward_hook(  # as a family that adds prompt tokens to every input
        lambda m, a, output: output.__class__(last_hidden_state=output[0].repeat(1, output[0].shape[1], 1))
    )
    report = probe_model(model, model.config, layers=False)
    assert {i.verdict for i in report.invariances if "cached" in i.name} == {"not tested"}


LONGER_WINDOW = {"sliding_window": 2 * LENGTH}  # than the longest input, as in Phi-3.5


@pytest.mark.parametrize(("name", "changes"), [*((name, {}) for name in FAMILIES), ("mistral", LONGER_WINDOW)])
def test_a_correct_model_has_no_fault(name, changes):
    model = build(name, **changes)
    report = probe_model(model, model.config)
    # transformers 5.24 makes the masks of gpt-oss without position_ids
    ignored = "packed documents" if name == "gpt_oss" else "no fault"
    assert [fault for fault in report.faults if not fault.startswith(ignored)] == []
    counts = {"bloom": 0, "qwen3_next": 1}
    assert report.outcome.endswith(f"; {counts.get(name, 4)} of 4 layers measured")
    assert report.inconclusive == (name == "bloom")


@pytest.mark.parametrize(
    ("position", "verdict"),
    [
        (rope(scaling="dynamic_ntk", factor=2.0), "agrees"),
        (RANDOM_POSITIONS, "not judged"),
        ("KerpleLog", "not judged"),
        ("NoPE", "agrees"),
        ("RoPE", "agrees"),
    ],
)
def test_in_our_models_only_rope_and_nope_are_judged_and_nothing_is_a_fault(position, verdict):
    model = random_kerple(position)
    report = probe_model(model, model.config)
    assert report.faults == []
    assert {v.verdict for v in report.layers} == {verdict}
    assert {i.verdict for i in report.invariances if "eager attention" in i.name} == {"not tested"}  # they have neither


@pytest.mark.parametrize(
    ("strategy", "options", "verdict", "family"),
    [
        ("RoPE", {"scaling": "dynamic_ntk", "factor": 2.0}, "not judged", "llama"),
        ("FIRE", {}, "not judged", "llama"),
        ("KerpleLog", {"layers": [0, 2], "keep_rope": True}, "not judged", "llama"),
        ("NoPE", {}, "agrees", "llama"),
        ("NoPE", {}, "agrees", "ministral3"),  # whose queries have a factor that grows with the position
    ],
)
def test_the_strategies_of_a_retrofitted_model_are_not_judged_and_no_fault(strategy, options, verdict, family):
    changes = {"max_position_embeddings": LENGTH // 2} if family == "llama" else {}
    model = retrofit(build(family, **changes), strategy, **options)
    report = probe_model(model, model.config)
    assert report.faults == []
    assert [v.verdict for v in report.layers] == [verdict, "agrees" if "layers" in options else verdict] * 2
    assert all(strategy in v.expected for v in report.layers if v.verdict == "not judged")
    assert report.inconclusive == (strategy in ("RoPE", "FIRE"))  # nothing is judged


@pytest.mark.parametrize("every", [False, pytest.param(True, marks=pytest.mark.slow)], ids=["first", "every"])
@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_is_found_in_the_models_that_can_have_it(fault, every):
    names, build_with_fault, *patches = FAULTS[fault]
    names = names if every else names[:1]
    found = []
    for name in names:
        config, model = build(name).config, build_with_fault(name)
        with patches[0](model) if patches else nullcontext():
            differs = any(verdict.differences for verdict in measure_layers(model, config))
            found += [name] if differs or probe_model(model, config, layers=False).faults else []
    assert found == names
    if every:
        groups = {row[0]: row[1].split(", ") for row in table_rows() if len(row) == 2}
        ((number, listed),) = [row[1:] for row in table_rows() if row[0] == fault]
        models = [model for name in listed.split(", ") for model in groups.get(name, [name])]
        assert (int(number), sorted(models)) == (len(found), sorted(found))

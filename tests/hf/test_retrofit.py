"""`retrofit` puts strategies into models of transformers. The oracle is the same model as our own `Transformer`."""

import json
import subprocess
import sys
from copy import deepcopy
from functools import partial
from pathlib import Path
from threading import Thread
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from huggingface_hub import HfApi, ModelCard
from huggingface_hub.errors import EntryNotFoundError
from torch.func import functional_call

from kerple.base.errors import UserError
from kerple.hf.adapter import hugging_face_network
from kerple.hf.position_limit import longest_input
from kerple.hf.translation_from_transformers import read_family
from kerple.hf.windowed_attention import decoder
from kerple.model.stored_model import build_transformer
from kerple.positions import Combined, KerpleLog, LayerPattern, NoPE, RoPE, SelfExtend, Shape, SSMax, strategies
from kerple.probe.invariances import measure_invariances
from tests.hf.tiny import CONFIGS, LENGTH, VOCABULARY, configuration, hf, our_network, small, text, tiny
from tests.probe.models import build

from kerple.hf import from_pretrained, retrofit  # isort: skip  # needs transformers, which tests.hf.tiny looks for

OWN_ROPE: Any = {"position": partial(RoPE, base=1000.0)}  # that of tiny("llama")
OPTIONS = {"ReRoPE": OWN_ROPE, "SelfExtend": OWN_ROPE}
NEEDS_MORE = {"FoX", "PaTH", "LearnedRelativeBias", "OutputGate", "Abacus", "Coupled", "Learned", "Sinusoidal"}
PADDING = 5
VISION = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
VISION |= {"image_size": 28}


def disturbed(model: Any) -> Any:
    """Change the parameters of a model's strategies, whose initial values may have no effect."""
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in model.base_model.kerple.parameters():
            parameter.add_(torch.rand(parameter.shape, generator=generator) * 0.3)
    return model


@pytest.fixture(scope="module")
def llama() -> Any:
    return disturbed(retrofit(tiny("llama"), KerpleLog))


def slow(names: Any, fast: set[str]) -> list[Any]:
    return [name if name in fast else pytest.param(name, marks=pytest.mark.slow) for name in names]


@pytest.mark.parametrize("family", slow([family for family in CONFIGS if family != "bloom"], {"qwen2"}))
def test_logits_and_gradients_are_those_of_our_network(family: str) -> None:
    model, tokens = disturbed(retrofit(tiny(family), KerpleLog)), text(2, 2 * LENGTH)
    model.get_input_embeddings().padding_idx = None  # otherwise the padding token's embedding has no gradient
    logits = model(tokens).logits
    torch.testing.assert_close(logits, our_network(model)(tokens), rtol=1e-5, atol=1e-5)
    # our weights are functions of theirs, so the gradients of our loss are those of the same parameters
    stored = read_family(model.config, model.state_dict(keep_vars=True))
    ours = functional_call(build_transformer(stored.model).eval(), stored.weights, (tokens,))
    parameters = {name: p for name, p in model.named_parameters() if p.requires_grad}
    actual, expected = (torch.autograd.grad(mean_loss(x, tokens), list(parameters.values())) for x in (logits, ours))
    for name, gradient, other in zip(parameters, actual, expected, strict=True):
        scale = float(other.abs().max())
        assert scale > 0, name
        torch.testing.assert_close(gradient, other, rtol=1e-5, atol=1e-5 * scale + 1e-7, msg=name)
    assert_cached_and_padded_are_equal(model, tokens)


def mean_loss(logits: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
    return torch.nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), tokens[:, 1:].flatten())


@torch.no_grad()
def assert_cached_and_padded_are_equal(model: Any, tokens: torch.Tensor) -> None:
    """Compare logits with those of tokens in two parts with a cache, and of tokens after padding."""
    expected, first = model(tokens).logits, tokens.shape[1] * 3 // 4
    if model.config.use_cache:
        cache = model(tokens[:, :first], use_cache=True).cache
        cached = model(tokens[:, first:], cache=cache).logits
        torch.testing.assert_close(cached, expected[:, first:], rtol=1e-4, atol=1e-5)
    mask = torch.ones(2, tokens.shape[1] + PADDING, dtype=torch.int64)
    mask[:, :PADDING] = 0
    padded = torch.cat([text(2, PADDING, seed=2), tokens], 1)
    torch.testing.assert_close(model(padded, attention_mask=mask).logits[:, PADDING:], expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("family", ["gpt2", "opt"])
@torch.no_grad()
def test_a_strategy_reads_more_tokens_than_the_models_table_has_rows(family: str) -> None:
    opt = partial(small, hf.OPTConfig, ffn_dim=48, word_embed_proj_dim=32, max_position_embeddings=4 * LENGTH)
    model = retrofit(tiny("gpt2") if family == "gpt2" else opt(), "ALiBi")
    assert longest_input(model) is None
    tokens = text(2, 4 * LENGTH + 9)
    logits = model(tokens).logits
    torch.testing.assert_close(model(tokens[:, :40]).logits, logits[:, :40], rtol=1e-4, atol=1e-5)
    if family == "gpt2":
        torch.testing.assert_close(logits, our_network(model)(tokens), rtol=1e-4, atol=1e-5)
    assert_cached_and_padded_are_equal(model, tokens)
    found = {each.name: each for each in measure_invariances(model, model.config)}
    assert {each.by_design for name, each in found.items() if "shift" in name or "padding" in name} == {None}


@pytest.mark.parametrize("name", slow(sorted(strategies().keys() - NEEDS_MORE), {"RoPE"}))
@torch.no_grad()
def test_every_strategy_of_queries_keys_and_positions_is_that_of_our_network(name: str) -> None:
    tokens, model = text(2, 40), disturbed(retrofit(tiny("llama"), name, **OPTIONS.get(name, {})))
    torch.testing.assert_close(model(tokens).logits, our_network(model)(tokens), rtol=1e-4, atol=1e-5)
    assert_cached_and_padded_are_equal(model, tokens)


@torch.no_grad()
def test_a_strategy_for_tests_around_another_rope_than_that_of_the_model_is_refused() -> None:
    model = tiny("llama")
    model.config.rope_parameters = {"rope_type": "default", "rope_theta": 500.0}
    message = r"strategy: got SelfExtend of another RoPE than that of layer 0, .* position=partial\(RoPE, base=500\.0, "
    for options in ({}, {"position": partial(RoPE, base=400.0)}):
        with pytest.raises(UserError, match=message):
            retrofit(model, SelfExtend, **options)
    retrofit(model, SelfExtend, position=partial(RoPE, base=500.0), neighbor_window=8)
    gpt2 = retrofit(tiny("gpt2"), SelfExtend)  # without RoPE
    assert gpt2.base_model.kerple.name == "SelfExtend"


@pytest.mark.parametrize("name", sorted(NEEDS_MORE))
def test_strategies_that_need_other_inputs_are_refused(name: str) -> None:
    model = tiny("llama")
    before = model(text(1, 9)).logits
    with pytest.raises(UserError, match=f"strategy: got {name}, which needs (hidden states|embeddings)"):
        retrofit(model, name)
    assert torch.equal(model(text(1, 9)).logits, before)


@torch.no_grad()
def test_positions_with_gaps_are_kept_in_the_cache_and_reordered_and_cropped(llama: Any) -> None:
    tokens = text(2, 20)
    ids = torch.arange(20) + 30 * (torch.arange(20) >= 7)
    expected = llama(tokens, position_ids=ids[None]).logits
    assert (expected - llama(tokens).logits).abs().max() > 1e-3
    network = our_network(llama)
    gaps = (ids - torch.arange(20)).long()
    torch.testing.assert_close(expected, network.head(network.features(tokens, offset=gaps)), rtol=1e-4, atol=1e-5)
    cache = llama(tokens[:, :14], position_ids=ids[None, :14], use_cache=True).cache
    cache.crop(-2)
    cache.reorder_cache(torch.tensor([1, 0]))
    continued = llama(tokens.flip(0)[:, 12:], position_ids=ids[None, 12:], cache=cache).logits
    torch.testing.assert_close(continued.flip(0), expected[:, 12:], rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("name", slow(sorted(strategies().keys() - NEEDS_MORE), {"KerpleLog"}))
def test_the_loss_and_gradients_of_packed_documents_are_those_of_separate_inputs(name: str) -> None:
    model, tokens, lengths = disturbed(retrofit(tiny("llama"), name, **OPTIONS.get(name, {}))), text(2, 40), [17, 1, 22]
    ids = torch.cat([torch.arange(n) for n in lengths]).expand(2, -1)
    separate = torch.cat([model(part, use_cache=False).logits for part in tokens.split(lengths, 1)], 1)
    for use_cache in (True, False):
        packed = model(tokens, position_ids=ids, use_cache=use_cache).logits
        torch.testing.assert_close(packed, separate, rtol=1e-4, atol=1e-5)
    targets, parameters = tokens.roll(-1, 1).flatten(), {n: p for n, p in model.named_parameters() if p.requires_grad}
    losses = [torch.nn.functional.cross_entropy(logits.flatten(0, 1), targets) for logits in (packed, separate)]
    torch.testing.assert_close(*losses, rtol=1e-6, atol=1e-6)
    got, expected = (torch.autograd.grad(x, list(parameters.values()), materialize_grads=True) for x in losses)
    for parameter, ours, theirs in zip(parameters, got, expected, strict=True):
        assert (ours - theirs).abs().max() <= 1e-5 * max(theirs.abs().max(), 1e-2), parameter


@torch.no_grad()
def test_generation_is_the_same_with_every_cache_padding_and_beams(llama: Any) -> None:
    prompts = text(3, 8)
    options = {"max_new_tokens": 12, "do_sample": False, "pad_token_id": 0, "eos_token_id": VOCABULARY + 1}
    options["attention_mask"] = torch.ones_like(prompts)
    expected = llama.generate(prompts, use_cache=False, **options)
    for changed in ({}, {"cache_implementation": "static"}, {"cache": llama(prompts[:, :5], use_cache=True).cache}):
        assert torch.equal(llama.generate(prompts, **options | changed), expected)
    padded = torch.cat([text(3, PADDING, seed=2), prompts], 1)
    mask = torch.ones_like(padded)
    mask[0, :PADDING], mask[2, :2] = 0, 0
    longer = llama.generate(padded, **options | {"attention_mask": mask})
    assert torch.equal(longer[0, PADDING:], expected[0])
    beams = [llama.generate(prompts, num_beams=3, use_cache=use_cache, **options) for use_cache in (True, False)]
    assert torch.equal(*beams)


@pytest.mark.parametrize("family", ["llama", "gemma3_text"])
def test_generation_with_a_static_cache_after_an_interrupt_and_inside_of_another_forward_pass(family: str) -> None:
    model, prompts = disturbed(retrofit(tiny(family), KerpleLog)), text(2, 8)
    layer, outputs = decoder(model).layers[0], []
    options: dict[str, Any] = {"max_new_tokens": 3, "do_sample": False, "cache_implementation": "static"}
    options |= {"attention_mask": torch.ones_like(prompts).index_fill_(1, torch.tensor([0]), 0), "eos_token_id": None}
    expected, logits = model.generate(prompts, **options), model(text(1, 12)).logits

    def interrupt(*_: Any) -> None:
        hook.remove()
        raise KeyboardInterrupt

    def generate(*_: Any) -> None:
        hook.remove()
        outputs.append(model.generate(prompts, **options))

    hook = layer.register_forward_pre_hook(generate)
    torch.testing.assert_close(model(text(1, 12)).logits, logits)
    hook = layer.register_forward_pre_hook(interrupt)
    with pytest.raises(KeyboardInterrupt):
        model(text(1, 12))
    for found in (*outputs, model.generate(prompts, **options)):
        assert torch.equal(found, expected)


@pytest.mark.slow
def test_a_strategy_in_some_layers_leaves_the_others_as_they_are() -> None:
    tokens, original = text(2, 40), tiny("gemma3_text")
    for options in ({"layers": "full_attention"}, {"layers": [0, 2], "keep_rope": True}, {"keep_rope": True}):
        model = disturbed(retrofit(deepcopy(original), KerpleLog, **options))
        torch.testing.assert_close(model(tokens).logits, our_network(model)(tokens), rtol=1e-4, atol=1e-5)
    unchanged = retrofit(deepcopy(original), "NoPE", keep_rope=True)
    torch.testing.assert_close(unchanged(tokens).logits, original(tokens).logits, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("family", ["smollm3", "cohere2"])
@torch.no_grad()
def test_layers_without_rope_have_the_strategy_alone_if_others_keep_rope(family: str) -> None:
    model = disturbed(retrofit(tiny(family), KerpleLog, keep_rope=True))
    torch.testing.assert_close(model(text(2, 40)).logits, our_network(model)(text(2, 40)), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("keep_rope", [False, True])
@pytest.mark.parametrize("family", ["mistral", "gemma3_text"])
@torch.no_grad()
def test_layers_with_a_window_ignore_gaps(family: str, keep_rope: bool) -> None:
    model, tokens = disturbed(retrofit(tiny(family), KerpleLog, keep_rope=keep_rope)), text(2, 25)
    offset = 50 * (torch.arange(24) >= 12)
    losses = hugging_face_network(model).losses(tokens, offset=offset)
    torch.testing.assert_close(losses, our_network(model).losses(tokens, offset=offset), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("keep_rope", [False, pytest.param(True, marks=pytest.mark.slow)])
@pytest.mark.parametrize("pattern", ["bias bias none", "none bias bias", "bias none none"])
@torch.no_grad()
def test_layers_of_a_pattern_keep_their_weights_if_others_have_none(pattern: str, keep_rope: bool) -> None:
    options = {"kinds": {"bias": KerpleLog, "none": NoPE}, "pattern": pattern.split(), "keep_rope": keep_rope}
    model = disturbed(retrofit(tiny("llama", num_hidden_layers=4), LayerPattern, layers=[0, 1, 2], **options))
    torch.testing.assert_close(model(text(2, 40)).logits, our_network(model)(text(2, 40)), rtol=1e-4, atol=1e-5)


@pytest.mark.slow
def test_torch_load_reads_a_model_in_another_process(tmp_path: Path) -> None:
    model, tokens = disturbed(retrofit(tiny("llama"), KerpleLog)), text(2, 40)
    torch.save((model, tokens, model(tokens).logits.detach()), tmp_path / "model.pt")
    script = "import sys, torch; m, x, y = torch.load(sys.argv[1], weights_only=False); assert m(x).logits.equal(y)"
    subprocess.run([sys.executable, "-c", script, tmp_path / "model.pt"], check=True)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_parameters_of_the_strategy_stay_in_fp32_and_are_clamped_after_each_step(dtype: torch.dtype) -> None:
    model, other = retrofit(tiny("llama").to(dtype), KerpleLog).train(), retrofit(tiny("llama"), KerpleLog)
    model.to(dtype)
    for retrofitted in (model, deepcopy(model)):
        rate, untouched = (m.base_model.kerple.positions[0].r2 for m in (retrofitted, other))
        assert rate.dtype == torch.float32
        with torch.no_grad():
            rate.fill_(-0.04)
            untouched.fill_(-0.04)
        with torch.autocast("cpu", dtype):
            retrofitted(text(1, 12), labels=text(1, 12)).loss.backward()
        torch.optim.Adagrad(retrofitted.parameters(), lr=1e-6).step()
        assert float(rate.detach().min()) > 0
        assert float(untouched.detach().max()) < 0


@pytest.mark.slow
@torch.no_grad()
def test_a_saved_model_is_read_with_its_strategy_and_not_without(tmp_path: Any, monkeypatch: Any) -> None:
    tokens = text(2, 40)
    models = [
        disturbed(retrofit(tiny("llama"), "ALiBi", layers=[1])),
        disturbed(retrofit(tiny("gpt2"), Combined, parts=[SSMax, KerpleLog])),
        disturbed(
            retrofit(tiny("llama"), LayerPattern, kinds={"bias": KerpleLog, "none": NoPE}, pattern=["bias", "none"])
        ),
    ]
    for i, model in enumerate(models):
        model.save_pretrained(tmp_path / f"{i}")
        for read in (from_pretrained, hf.AutoModelForCausalLM.from_pretrained):
            again = read(tmp_path / f"{i}")
            assert type(again) is type(tiny("gpt2" if i == 1 else "llama"))
            assert torch.equal(again(tokens).logits, model(tokens).logits)
        again.save_pretrained(tmp_path / "again")
        assert (tmp_path / "again/config.json").read_text() == (tmp_path / f"{i}/config.json").read_text()
    monkeypatch.delitem(hf.models.auto.configuration_auto.CONFIG_MAPPING._extra_content, "kerple_retrofit")
    with pytest.raises(ValueError, match="kerple_retrofit"):  # without this project, transformers refuses the model
        hf.AutoModelForCausalLM.from_pretrained(tmp_path / "0")


READERS = [from_pretrained, hf.AutoModelForCausalLM.from_pretrained]
LINEAR = {"rope_parameters": {"rope_type": "linear", "rope_theta": 1000.0, "factor": 4.0}}


@pytest.mark.parametrize("read", READERS)
@pytest.mark.parametrize(
    ("family", "strategy", "keep_rope", "changes"),
    [
        ("llama", "KerpleLog", False, {"use_cache": False, "output_hidden_states": True}),
        ("llama", "KerpleLog", True, LINEAR),
        ("llama", "FIRE", False, {"max_position_embeddings": 2 * LENGTH, "dtype": torch.bfloat16}),  # a longer training
        ("gpt2", "ALiBi", False, {"num_attention_heads": 2, "attn_pdrop": 0.0}),
    ],
)
def test_entries_of_the_configuration_are_changed_when_the_model_is_read(
    read: Any, family: str, strategy: str, keep_rope: bool, changes: dict[str, Any], tmp_path: Path
) -> None:
    retrofit(tiny(family), strategy, keep_rope).save_pretrained(tmp_path)
    model, expected = read(tmp_path, **changes), retrofit(tiny(family, **changes), strategy, keep_rope)
    assert {name: getattr(model.config, name) for name in changes} == changes
    expected.to(model.dtype).load_state_dict(read(tmp_path, dtype=model.dtype).state_dict())
    torch.testing.assert_close(model(text(2, 40)).logits, expected(text(2, 40)).logits)


def test_attention_dropout_can_be_set_to_0_when_the_model_is_read(tmp_path: Path) -> None:
    retrofit(tiny("llama", attention_dropout=0.1), KerpleLog).save_pretrained(tmp_path)
    with pytest.raises(UserError, match=r"model: got dropout 0\.1 .* set it when the model is loaded"):
        from_pretrained(tmp_path).train()(text(1, 9))
    assert from_pretrained(tmp_path, attention_dropout=0.0).train()(text(1, 9)).logits.isfinite().all()


def test_a_change_of_rope_parameters_is_refused_if_no_layer_has_rope(tmp_path: Path) -> None:
    retrofit(tiny("llama"), KerpleLog).save_pretrained(tmp_path)
    for read in READERS:
        with pytest.raises(UserError, match=r"rope_parameters: got .*, expected none, because retrofit has replaced"):
            read(tmp_path, **LINEAR)


@pytest.mark.slow
def test_push_to_hub_sends_the_files_that_are_read_back(tmp_path: Any, monkeypatch: Any) -> None:
    def no_card(*_: Any, **options: Any) -> None:
        raise EntryNotFoundError("no card")

    sent: dict[str, bytes] = {}

    def create_commit(self: Any, *, operations: Any, **options: Any) -> None:
        sent.update({part.path_in_repo: Path(part.path_or_fileobj).read_bytes() for part in operations})

    monkeypatch.setattr(HfApi, "create_commit", create_commit)
    monkeypatch.setattr(ModelCard, "load", no_card)
    monkeypatch.setattr(HfApi, "create_repo", lambda self, name, **options: SimpleNamespace(repo_id=name))
    model, tokens = disturbed(retrofit(tiny("llama"), KerpleLog)), text(2, 40)
    for push in (
        lambda: model.push_to_hub("user/model"),
        lambda: model.save_pretrained(tmp_path / "model", push_to_hub=True, repo_id="user/model"),
    ):
        sent.clear()
        push()
        assert {"config.json", "generation_config.json", "model.safetensors"} <= sent.keys()
        folder = tmp_path / f"{len(list(tmp_path.iterdir()))}"
        folder.mkdir()
        for name, content in sent.items():
            (folder / name).write_bytes(content)
        assert torch.equal(from_pretrained(str(folder))(tokens).logits, model(tokens).logits)


class Mine(KerpleLog):
    """A user's strategy."""


def test_a_strategy_of_the_user_inside_another_is_read(tmp_path: Any) -> None:
    model, tokens = retrofit(tiny("llama"), "Combined", parts=[Mine, NoPE]), text(2, 12)
    model.save_pretrained(tmp_path)
    with pytest.raises(UserError, match=r"Mine' in config\.json, expected a strategy of"):
        from_pretrained(tmp_path)
    read = from_pretrained(tmp_path, strategy=Mine)
    assert any(isinstance(module, Mine) for module in read.modules())
    assert torch.equal(read(tokens).logits, model(tokens).logits)


def test_a_strategy_of_the_user_is_read_only_if_it_is_given(tmp_path: Any) -> None:
    retrofit(tiny("llama"), "ALiBi").save_pretrained(tmp_path)
    for own in (Mine, type("ALiBi", (KerpleLog,), {})):
        with pytest.raises(UserError, match=rf"strategy: got {own.__name__}, expected null or ALiBi"):
            from_pretrained(tmp_path, strategy=own)
    retrofit(tiny("llama"), Mine).save_pretrained(tmp_path)
    with pytest.raises(
        UserError, match=r"strategy: got .*Mine' in config.json, expected a strategy of kerple.positions"
    ):
        from_pretrained(tmp_path)
    assert isinstance(from_pretrained(tmp_path, strategy=Mine).base_model.kerple.positions[0], Mine)
    read = from_pretrained(tmp_path.parent, strategy=Mine, subfolder=tmp_path.name)  # as other options of a hub's model
    assert isinstance(read.base_model.kerple.positions[0], Mine)
    for other in (partial(KerpleLog), type("Other", (Mine,), {})):  # the class is not that of the file
        with pytest.raises(UserError, match=r"strategy: got .*, expected null or .*\.Mine, which config"):
            from_pretrained(tmp_path, strategy=other)
    config = json.loads((tmp_path / "config.json").read_text())
    del config["model"]["kerple_retrofit"]["strategy"]["class_path"]
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(UserError, match=r"for kerple_retrofit in config.json, expected a class_path and init_args"):
        from_pretrained(tmp_path)


LLAMA = partial(tiny, "llama")
T5 = partial(small, hf.T5Config, hf.T5ForConditionalGeneration, d_model=32, d_kv=8, d_ff=32)
GEMMA2 = partial(small, hf.Gemma2Config, num_key_value_heads=2, head_dim=8, intermediate_size=32)
OTHER_HEADS = [(hf.LlamaConfig, hf.LlamaForSequenceClassification), (hf.LlamaConfig, hf.LlamaForTokenClassification)]
OTHER_HEADS += [(hf.GPT2Config, hf.GPT2ForQuestionAnswering)]
CTRL = partial(small, hf.CTRLConfig, dff=32)
GPT_OSS = partial(build, "gpt_oss")
GEMMA4 = partial(small, hf.Gemma4TextConfig, head_dim=8, global_head_dim=16, intermediate_size=32)
GEMMA4 = partial(GEMMA4, vocab_size_per_layer_input=8, hidden_size_per_layer_input=8)
GEMMA3 = partial(small, hf.Gemma3Config, text_config=configuration("gemma3_text"), vision_config=VISION)


@pytest.mark.parametrize(
    ("model", "strategy", "options", "message"),
    [
        (lambda: retrofit(LLAMA(), "ALiBi"), "ALiBi", {}, "which already has the strategy ALiBi"),
        (T5, "ALiBi", {}, "model: got T5ForConditionalGeneration, which has an encoder"),
        *(
            (partial(small, *classes), "ALiBi", {}, f"model: got {classes[1].__name__}, expected .*LM")
            for classes in OTHER_HEADS
        ),
        (GEMMA2, "ALiBi", {}, "softcap"),
        (
            GEMMA3,
            "ALiBi",
            {},
            "model: got Gemma3ForConditionalGeneration, which reads more than text, expected a model of text",
        ),
        (lambda: "gpt2", "ALiBi", {}, "model: got a str, expected a PreTrainedModel"),
        (GEMMA4, "NoPE", {}, "model: got Gemma4ForCausalLM with heads of different sizes or numbers"),
        (CTRL, "NoPE", {}, "model: got CTRLLMHeadModel, whose positions are neither RoPE nor a table of weights"),
        (lambda: tiny("bloom", max_position_embeddings=LENGTH), "ALiBi", {}, "registry"),
        (GPT_OSS, "StickBreaking", {}, "model: got a sink and a strategy that replaces the softmax, such as Stick"),
        (LLAMA, "Kerple", {}, "strategy: got Kerple, did you mean"),
        (LLAMA, KerpleLog, {"radius": 1}, "options: got radius, expected one of"),
        (LLAMA, KerpleLog(Shape(32, 4, 32)), {}, "strategy: got a KerpleLog, expected a class"),
        (LLAMA, KerpleLog, {"layers": [5]}, "layers: got 5, expected 0 to 1"),
        (LLAMA, KerpleLog, {"layers": True}, "layers: got True, expected 0 to 1"),
        (LLAMA, lambda shape: KerpleLog(Shape(32, 2, 32)), {}, r"KerpleLog.bias: got shape \(2, 3\)"),
    ],
)
def test_wrong_input_is_one_line(model: Any, strategy: Any, options: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError, match=message) as error:
        retrofit(model(), strategy, **options)
    assert "\n" not in str(error.value)


def test_a_model_that_is_refused_is_unchanged(monkeypatch: Any) -> None:
    tokens, model, gpt2 = text(1, 9), tiny("llama"), tiny("gpt2")
    expected, before = model(tokens).logits, gpt2(tokens).logits
    last, first = model.model.layers[-1].self_attn, gpt2.transformer.h[0].attn
    with monkeypatch.context() as changed:
        changed.setattr(last, "forward", lambda hidden_states, **options: (hidden_states, None))
        with pytest.raises(UserError, match=r"RoPE cannot be left out of layer \[1\]"):
            retrofit(model, KerpleLog)
        changed.setattr(first, "forward", lambda: None)
        with pytest.raises(UserError, match="cannot run with a strategy"):
            retrofit(gpt2, KerpleLog)
    assert gpt2.transformer.wpe.weight.requires_grad
    for refused, logits in ((model, expected), (gpt2, before)):
        assert torch.equal(refused(tokens).logits, logits)


@torch.no_grad()
def test_threads_read_different_texts_with_one_model(llama: Any) -> None:
    first, second = text(1, 9), text(2, 14, seed=2)
    expected, found, inner = llama(first).logits, [], llama.base_model.layers[0]

    def other_thread(*_: Any) -> None:
        if not found:
            found.append(None)  # this thread reads the second text while the first one is being read
            thread = Thread(target=lambda: found.append(llama(second).logits))
            thread.start()
            thread.join()

    with inner.register_forward_pre_hook(other_thread):
        torch.testing.assert_close(llama(first, use_cache=True).logits, expected)
    torch.testing.assert_close(found[1], llama(second).logits)


@torch.no_grad()
def test_a_language_model_inside_of_a_model_of_images_reads_only_text() -> None:
    model, tokens = GEMMA3(), text(1, 12)
    images = {"token_type_ids": torch.zeros_like(tokens).index_fill_(1, torch.arange(3, 7), 1)}
    expected, cached = model(tokens).logits, {"max_new_tokens": 2, "cache_implementation": "static"}
    retrofit(model.model.language_model, "NoPE", keep_rope=True)
    torch.testing.assert_close(model(tokens).logits, expected)
    for read in (model, partial(model.generate, **cached)):
        with pytest.raises(UserError, match="model: got a mask that shows later tokens, expected causal attention"):
            read(tokens, **images)


def test_masks_that_attention_cannot_express_are_refused(llama: Any) -> None:
    tokens = text(1, 6)
    with pytest.raises(UserError, match="attention_mask: got padding between visible tokens"):
        llama(tokens, attention_mask=torch.tensor([[1, 1, 0, 1, 1, 1]]))
    with pytest.raises(UserError, match="attention_mask: got shape"):
        llama(tokens, attention_mask=torch.ones(1, 1, 6, 6))
    cache = llama(tokens, use_cache=True).cache
    with pytest.raises(UserError, match="attention_mask: got another mask"):
        llama(tokens, cache=cache, attention_mask=torch.tensor([[0] + [1] * 11]))

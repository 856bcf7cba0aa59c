"""BOS tokens before every input, and the scaling of RoPE in GGUF files."""

import hashlib
import math

import gguf
import numpy as np
import pytest
import torch
from tokenizers import processors

from kerple.compare.committed_records import _digest
from kerple.data.tokenizer import end_of_text, load_tokenizer
from kerple.hf.adapter import hugging_face_network
from kerple.hf.pretrained_files import find_model, read_model_config, source_digest
from kerple.hf.pretrained_model_reader import read_network
from kerple.hf.pretrained_tokenizer import bos_token
from kerple.measure.receptive_field import gradient_by_distance
from kerple.positions.visibility import EVERYTHING, Visibility
from tests.hf.tiny import LENGTH, VOCABULARY, hf, our_network, saved, small, text, tiny

BOS, END = 3, 5


def networks(model):
    """Return a model with BOS as a network that runs transformers, and as a network of this project."""
    ours = our_network(model)
    ours.bos = BOS
    return {"theirs": hugging_face_network(model, bos=BOS), "ours": ours}


def with_bos(tokens):
    return torch.cat([torch.full((len(tokens), 1), BOS), tokens], 1)


@pytest.mark.parametrize("family", ["llama", "gpt2", "bloom", "gemma3_text"])
@pytest.mark.parametrize("whose", ["theirs", "ours"])
@torch.no_grad()
def test_every_input_begins_with_bos_which_every_query_sees(family, whose):
    model, tokens = tiny(family), text(2, 21)
    network, inputs = networks(model)[whose], with_bos(tokens[:, :-1])

    def check(logits, visibility=EVERYTHING, **options):
        expected = -logits[:, 1:].log_softmax(-1).gather(-1, tokens[:, 1:, None])[..., 0]
        got = network.losses(tokens, visibility=visibility, **options)
        torch.testing.assert_close(got, expected, atol=1e-4, rtol=1e-4)
        torch.testing.assert_close(network.losses(tokens, 5, visibility, **options), got[:, -5:])

    check(model(inputs).logits)
    if family != "bloom":  # transformers' BLOOM has neither windows nor position ids
        i, j = torch.arange(21)[:, None], torch.arange(21)
        for first in (0, 2):
            visible = ((j <= i) & ((j > i - 4) | (j < first + 1)))[None, None]
            mask = torch.where(visible, 0.0, torch.finfo(torch.float32).min)
            check(model(inputs, attention_mask=mask).logits, Visibility(4, first))
        check(model(inputs, position_ids=torch.arange(9, 30)[None]).logits, offset=9)
    assert network.max_length == (4 * LENGTH - 1 if family == "gpt2" else None)
    generated = with_bos(tokens[:1])
    for _ in range(6):
        generated = torch.cat([generated, model(generated).logits[:, -1:].argmax(-1)], 1)
    assert network.continued(tokens[:1], 6) == generated[0, -6:].tolist()
    assert gradient_by_distance(network, tokens).shape == (2, 20)


@torch.inference_mode()
def test_windows_of_a_cache_include_bos_and_attention_maps_do_not():
    network, tokens = networks(tiny("llama"))["ours"], text(2, 30)
    for visibility in (Visibility(4), Visibility(4, 2, "cache")):
        cache = network.new_cache(visibility)
        parts = [network(part, visibility, cache=cache) for part in tokens.split([5, 1, 24], 1)]
        torch.testing.assert_close(torch.cat(parts, 1), network(tokens, visibility), atol=1e-4, rtol=1e-4)
    shapes = []
    network.visit_attention(tokens, lambda layer, p: shapes.append(p.shape))
    assert shapes == [(2, 6, 30, 30)] * 2
    network.bos = None
    assert not torch.allclose(network(tokens, Visibility(4)), torch.cat(parts, 1), atol=1e-2)


def test_bos_is_the_token_that_the_tokenizer_or_its_configuration_adds(tmp_path):
    folder = saved(tmp_path / "plain", "llama")
    assert bos_token(find_model(str(folder))) is None
    tokenizer = hf.AutoTokenizer.from_pretrained(folder, bos_token="a")
    tokenizer.save_pretrained(folder)
    assert bos_token(find_model(f"{folder}/")) is None
    config = folder / "tokenizer_config.json"
    config.write_text(config.read_text().replace("{", '{"add_bos_token": true,', 1))
    assert bos_token(find_model(f"{folder}/.")) == tokenizer.bos_token_id
    template = processors.TemplateProcessing("b $A", special_tokens=[("b", tokenizer.convert_tokens_to_ids("b"))])
    tokenizer.backend_tokenizer.post_processor = template
    tokenizer.save_pretrained(saved(tmp_path / "template", "llama"))
    assert read_network(str(tmp_path / "template")).bos == tokenizer.convert_tokens_to_ids("b")
    assert read_network(str(tmp_path / "template"), bos=False).bos is None
    two = [(token, tokenizer.convert_tokens_to_ids(token)) for token in "bc"]
    tokenizer.backend_tokenizer.post_processor = processors.TemplateProcessing("b c $A", special_tokens=two)
    tokenizer.save_pretrained(saved(tmp_path / "two", "llama"))
    with pytest.raises(ValueError, match="adds more than one token before a text, expected one, BOS"):
        read_network(str(tmp_path / "two"))


def test_the_digest_of_a_model_on_the_hub_is_that_of_its_name_and_commit(tmp_path, monkeypatch):
    snapshot = tmp_path / "models--org--name" / "snapshots" / ("a" * 40)
    snapshot.mkdir(parents=True)
    (snapshot / "config.json").write_text("{}")
    (refs := tmp_path / "models--org--name" / "refs").mkdir()
    (refs / "main").write_text("a" * 40)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    expected = hashlib.sha256(f"org/name@{'a' * 40}".encode()).hexdigest()
    assert source_digest(find_model("org/name")) == expected


@pytest.mark.parametrize("weights", ["model.safetensors", "model[1].gguf"])
def test_the_digest_covers_every_file_that_changes_a_number(tmp_path, weights):
    names = [weights, "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json", "generation_config.json"]
    if weights == "model.safetensors":
        names += ["config.json", "tokenizer.json", "merges.txt", "tokenizer.model", "modeling_own.py", "qwen.tiktoken"]
    for name in (*names, "README.md"):
        (tmp_path / name).write_text(name)
    path = str(tmp_path) if "config.json" in names else str(tmp_path / weights)
    before = _digest(path)
    assert before == source_digest(find_model(path))
    (tmp_path / "README.md").write_text("new")
    assert source_digest(find_model(path)) == before
    found = {before}
    for name in names:
        (tmp_path / name).write_text("new")
        found.add(source_digest(find_model(path)))
    assert len(found) == len(names) + 1


def write_gguf(path, model, scaling, divisors=(), **tokenizer):
    """Write a Qwen2 with entries ``rope.scaling.…`` and tensors of divisors, as llama.cpp writes them."""
    config, writer = model.config, gguf.GGUFWriter(path, "qwen2")
    entries = {
        "context_length": config.max_position_embeddings, "embedding_length": config.hidden_size,
        "block_count": config.num_hidden_layers, "feed_forward_length": config.intermediate_size,
        "head_count": config.num_attention_heads, "head_count_kv": config.num_key_value_heads,
        "layer_norm_rms_eps": config.rms_norm_eps, "rope_freq_base": config.rope_parameters["rope_theta"],
        "tokenizer_model": "gpt2", "token_merges": ["a b"], "bos_token_id": BOS, "eos_token_id": END,
        "token_list": [*"ab", "ab", *map(chr, range(0x100, 0x100 + VOCABULARY - 3))],
    }  # fmt: skip
    for key, value in (entries | (tokenizer or {"add_bos_token": True})).items():
        getattr(writer, f"add_{key}")(value)
    for key, value in scaling.items():
        (writer.add_string if isinstance(value, str) else writer.add_float32)(f"qwen2.rope.scaling.{key}", value)
    for name, values in divisors:
        writer.add_tensor(name, np.array(values, dtype=np.float32))
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.QWEN2, config.num_hidden_layers)
    for name, value in model.state_dict().items():
        writer.add_tensor(names.get_name(name, (".weight", ".bias")), value.numpy())
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


SHORT, LONG = [1.0, 1.5, 2.0, 4.0], [1.0, 2.0, 8.0, 30.0]
YARN = {"type": "yarn", "factor": 4.0, "original_context_length": 16.0, "yarn_beta_fast": 8.0}


def longrope(short, factor, original):
    lists = {"rope_type": "longrope", "short_factor": short, "long_factor": LONG}
    return lists | {"attention_factor": factor, "original_max_position_embeddings": original}


LISTS = [("rope_factors_long.weight", LONG), ("rope_factors_short.weight", SHORT)]
YARN_PARAMETERS = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16, "beta_fast": 8.0}
GGUF = [
    ({}, (), {"rope_type": "default"}),
    ({"type": "none", "factor": 4.0}, (), {"rope_type": "default"}),
    ({"factor": 4.0}, (), {"rope_type": "linear", "factor": 4.0}),
    (YARN, (), YARN_PARAMETERS | {"attention_factor": 0.1 * math.log(4) + 1}),
    ({}, [("rope_freqs.weight", LONG)], longrope(LONG, 1.0, 2 * LENGTH)),  # Llama 3 has divisors for all lengths
    ({"attn_factor": 1.25, "original_context_length": 16.0}, LISTS, longrope(SHORT, 1.25, 16)),
]


@pytest.mark.parametrize(("scaling", "divisors", "rope"), GGUF)
@torch.inference_mode()
def test_the_scaling_of_a_gguf_file_is_applied(tmp_path, scaling, divisors, rope):
    model = small(hf.Qwen2Config, intermediate_size=64, num_key_value_heads=2, rope_theta=500.0)
    write_gguf(tmp_path / "model.gguf", model, scaling, divisors)
    model.config.rope_parameters = {"rope_theta": 500.0} | rope
    scaled, tokens = hf.Qwen2ForCausalLM(model.config).eval(), text(1, 41)
    scaled.load_state_dict(model.state_dict())
    network = read_network(str(tmp_path / "model.gguf"))
    assert network.bos == BOS
    name = f"hf:{tmp_path / 'model.gguf'}"
    assert end_of_text(load_tokenizer(name), name) == END
    expected, unscaled = (m(with_bos(tokens)).logits[:, 1:] for m in (scaled, model))
    torch.testing.assert_close(network(tokens), expected, atol=1e-5, rtol=1e-5)
    assert torch.allclose(expected, unscaled, atol=1e-3) == (rope["rope_type"] == "default")


@torch.inference_mode()
def test_a_gguf_file_of_this_name_in_the_working_directory_is_not_read(tmp_path, monkeypatch):
    model = small(hf.Qwen2Config, intermediate_size=64, num_key_value_heads=2)
    (tmp_path / "folder").mkdir()
    write_gguf(tmp_path / "folder" / "model.gguf", model, {})
    expected = model(with_bos(text(1, 9))).logits[:, 1:]
    model.model.norm.weight.mul_(2)
    write_gguf(tmp_path / "model.gguf", model, {})
    monkeypatch.chdir(tmp_path)
    network = read_network("folder/model.gguf")
    torch.testing.assert_close(network(text(1, 9)), expected, atol=1e-5, rtol=1e-5)


# llama.cpp: in models with 27B parameters the softmax scale is that of a head of hidden_size / heads dimensions
ATTENTION = [
    ("gemma2", 46, {}, {"query_pre_attn_scalar": 40 // 4}),
    ("gemma2", 42, {}, {"query_pre_attn_scalar": 16}),
    ("gemma3", 62, {}, {"query_pre_attn_scalar": 40 // 4}),
    ("gemma3", 34, {}, {"query_pre_attn_scalar": 16}),
    ("phi3", 4, {"sliding_window": 7}, {"sliding_window": 7}),
    ("phi3", 4, {"sliding_window": 0}, {"sliding_window": None}),  # Phi-4
    ("phi3", 4, {}, {"sliding_window": None}),
]


@pytest.mark.parametrize(("architecture", "layers", "entries", "expected"), ATTENTION)
def test_the_options_of_attention_in_a_gguf_file_are_read(tmp_path, architecture, layers, entries, expected):
    writer = gguf.GGUFWriter(tmp_path / "model.gguf", architecture)
    entries = entries | {"block_count": layers, "embedding_length": 40, "head_count": 4, "head_count_kv": 2}
    entries |= {"context_length": 64} if architecture == "phi3" else {"context_length": 64, "key_length": 16}
    for key, value in entries.items():
        getattr(writer, f"add_{key}")(value)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    config = read_model_config(find_model(str(tmp_path / "model.gguf")))
    assert {name: getattr(config, name) for name in expected} == expected


@pytest.mark.parametrize(
    ("tokenizer", "bos"),
    [
        ({"tokenizer_pre": "llama-bpe"}, BOS),  # as in files of Llama 3
        ({"tokenizer_pre": "llama-bpe", "add_bos_token": False}, None),
        ({"tokenizer_pre": "qwen2"}, None),
    ],
)
def test_bos_of_a_gguf_file_is_the_token_that_llama_cpp_adds(tmp_path, tokenizer, bos):
    write_gguf(tmp_path / "model.gguf", small(hf.Qwen2Config, num_key_value_heads=2), {}, **tokenizer)
    assert bos_token(find_model(str(tmp_path / "model.gguf"))) == bos


UNKNOWN = [YARN | {"yarn_log_multiplier": 0.1}, {"type": "longrope"}, {"alpha": 2.0}, YARN | {"factor": -4.0}]


@pytest.mark.parametrize("scaling", UNKNOWN)
def test_an_unknown_scaling_of_a_gguf_file_is_an_error(tmp_path, scaling):
    write_gguf(tmp_path / "model.gguf", small(hf.Qwen2Config, num_key_value_heads=2), scaling)
    message = r"got model\.gguf, whose RoPE has a scaling of type .* use the safetensors of the model"
    with pytest.raises(ValueError, match=message):
        read_model_config(find_model(str(tmp_path / "model.gguf")))

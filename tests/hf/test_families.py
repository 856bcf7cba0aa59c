"""Models of each family, translated to the `Transformer` of this project, give the same logits."""

from functools import partial

import pytest
import torch
import torch.nn.functional as F
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from kerple.base.errors import UserError
from kerple.hf import pretrained_model_reader
from kerple.hf.exporter import export
from kerple.hf.modeling import KerpleConfig
from kerple.hf.pretrained_model_reader import read_network, read_stored_model
from kerple.hf.rope import read_rope
from kerple.hf.translation_from_transformers import read_family, read_options
from kerple.model.stored_model import build_transformer, copy_weights
from kerple.positions import ALiBi, NoPE, RoPE, SelfExtend, Shape
from kerple.training.allowed_classes import allowed_classes
from tests.hf.tiny import CONFIGS, LENGTH, VOCABULARY, YARN, configuration, hf, our_network, saved, text, tiny

ORIGINAL = {"rope_theta": 500.0, "original_max_position_embeddings": LENGTH // 2}
DIVISORS = {"short_factor": [1.0, 1.1, 1.2, 1.5], "long_factor": [1.0, 2.0, 5.0, 9.0]}
LLAMA3 = {"rope_type": "llama3", "factor": 4.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
KINDS = ("full_attention", "sliding_attention")
PLAIN = {"rope_type": "default", "rope_theta": 300.0}
UNUSED = {"attention_factor": 1.2}  # only YaRN and LongRoPE have this factor
VARIANTS = [
    *((family, {}) for family in CONFIGS),
    ("llama", {"tie_word_embeddings": False, "num_key_value_heads": 6, "hidden_act": "gelu_pytorch_tanh"}),
    ("llama", {"rope_parameters": {"rope_type": "linear", "rope_theta": 500.0, "factor": 4.0} | UNUSED}),
    ("llama", {"rope_parameters": {"rope_type": "dynamic", "rope_theta": 500.0, "factor": 2.0} | UNUSED}),
    ("llama", {"rope_parameters": ORIGINAL | LLAMA3 | UNUSED}),
    ("llama", {"rope_parameters": ORIGINAL | DIVISORS | {"rope_type": "longrope"}}),
    ("llama", {"rope_parameters": ORIGINAL | {"rope_type": "proportional", "partial_rotary_factor": 0.5}}),
    ("llama", {"rope_parameters": YARN | {"beta_fast": 8.0, "attention_factor": 1.3}}),
    ("mistral", {"max_position_embeddings": 8}),  # below the window
    ("qwen3", {"sliding_window": 7, "layer_types": ["full_attention"] + ["sliding_attention"] * 4}),
    ("smollm3", {"no_rope_layers": [0, 1, 1, 0, 1]}),
    ("olmo3", {"rope_parameters": YARN | dict.fromkeys(KINDS, PLAIN)}),
    ("gpt_neox", {"use_parallel_residual": False, "hidden_act": "relu"}),
    ("gpt2", {"n_inner": 40, "activation_function": "gelu"}),
]


@pytest.mark.parametrize(
    ("family", "changes"),
    [pytest.param(*variant, marks=[pytest.mark.slow] if variant[1] else []) for variant in VARIANTS],
)
@torch.inference_mode()
def test_logits_equal_those_of_transformers_also_with_a_cache_and_after_export(family, changes, tmp_path):
    theirs, tokens = tiny(family, **changes), text(2, 3 * LENGTH)
    stored = read_family(theirs.config, theirs.state_dict())
    ours = build_transformer(stored.model).eval()
    account = copy_weights(ours, stored)
    assert not account.new
    # our network has two norms per layer, and Cohere 2 has one
    norms = sum(w.numel() for name, w in stored.weights.items() if "mlp_norm" in name) if family == "cohere2" else 0
    assert sum(account.copied.values()) == sum(p.numel() for p in theirs.parameters()) + norms
    expected = theirs(tokens).logits
    torch.testing.assert_close(ours(tokens), expected, atol=1e-4, rtol=1e-4)
    if family != "gpt2":  # with another training length, the model's own scaling stays as it is
        assert ours.training_length == getattr(theirs.config, "max_position_embeddings", 2048)
        longer = build_transformer(stored.model | {"length": 2 * LENGTH + 1}).eval()
        copy_weights(longer, stored)
        torch.testing.assert_close(longer(tokens), expected, atol=1e-4, rtol=1e-4)
    losses = F.cross_entropy(expected[:, :-1].mT, tokens[:, 1:], reduction="none")
    if "dynamic" not in str(changes):  # with which the last token changes the logits of the others
        torch.testing.assert_close(ours.losses(tokens), losses, atol=1e-4, rtol=1e-4)
    if ours.prefix_consistent:
        cache = ours.new_cache()
        parts = [ours(part, cache=cache) for part in tokens.split([5, 60, 1, 30], 1)]
        torch.testing.assert_close(torch.cat(parts, 1), expected, atol=1e-4, rtol=1e-4)
    export(stored, tmp_path, None, None)
    exported = hf.AutoModelForCausalLM.from_pretrained(tmp_path).eval()
    torch.testing.assert_close(exported(tokens).logits, expected, atol=1e-4, rtol=1e-4)
    other = build_transformer(stored.model, ALiBi)
    copy_weights(other, stored)
    assert other(tokens).isfinite().all()


@pytest.mark.parametrize(
    ("kind", "options"),
    [
        ("llama3", {"low_freq_factor": 2.0, "high_freq_factor": 2.0}),
        ("llama3", {"low_freq_factor": 4.0, "high_freq_factor": 1.0}),
        ("yarn", {"beta_fast": 4.0, "beta_slow": 4.0}),
    ],
)
def test_a_ramp_without_a_slope_equals_that_of_transformers(kind, options):
    rope = {"rope_type": kind, "rope_theta": 1e4, "factor": 8.0, "original_max_position_embeddings": 512} | options
    config = hf.LlamaConfig(hidden_size=256, num_attention_heads=4, max_position_embeddings=4096, rope_parameters=rope)
    expected, _ = ROPE_INIT_FUNCTIONS[kind](config, "cpu")
    ours = RoPE(Shape(64, 1, 512), **read_rope(config.rope_parameters, partial=False, length=4096))
    torch.testing.assert_close(ours.frequencies(torch.tensor([8])).flatten().float(), expected, rtol=1e-6, atol=0)


def test_a_head_that_differs_from_a_tied_embedding_is_kept():
    model, tokens = tiny("qwen2"), text(2, LENGTH)
    model.config.tie_word_embeddings = True  # as in the configuration of a model whose head was trained alone
    torch.testing.assert_close(our_network(model)(tokens), model(tokens).logits, atol=1e-4, rtol=1e-4)


def test_weights_fit_a_larger_vocabulary_and_no_other_size():
    theirs = tiny("llama")
    stored = read_family(theirs.config, theirs.state_dict())
    network = build_transformer({**stored.model, "vocabulary": VOCABULARY + 4})
    new_rows = network.embedding.weight[VOCABULARY:].clone()
    assert copy_weights(network, stored).new["embedding.weight"] == 4 * 48
    assert torch.equal(network.embedding.weight, torch.cat([theirs.model.embed_tokens.weight, new_rows]))
    too_small = "got shape .96, 48. for embedding.weight, expected .50, 48..*set data.vocabulary to 96"
    other_width = "got shape .64, 48. for blocks.0.mlp.gate.weight, expected .32, 48."
    other_dim = "got shape .96, 48. for embedding.weight, expected .96, 24.; use the model options with which"
    wrong = [({"vocabulary": 50}, too_small), ({"hidden": 32}, other_width), ({"dim": 24}, other_dim)]
    for changes, message in wrong:
        network = build_transformer(stored.model | changes)
        before = {name: value.clone() for name, value in network.state_dict().items()}
        with pytest.raises(ValueError, match=message):
            copy_weights(network, stored)
        assert all(torch.equal(value, before[name]) for name, value in network.state_dict().items())


def test_a_file_names_only_strategies_of_this_project():
    with pytest.raises(ValueError, match=r"position: names the class os.system, expected a class of this project"):
        build_transformer(read_options(configuration("llama")) | {"position": {"class_path": "os.system"}})


def test_a_checkpoint_without_a_model_is_an_error(tmp_path):
    config = {"model": {"position": "NoPE"}, "data": {"class_path": "TokenShards"}, "trainer": {"callbacks": []}}
    whole = {"config": config, "hyper_parameters": {"length": 16}}
    whole["state_dict"] = {"network.embedding.weight": torch.zeros(9, 4)}
    for damage in ({"state_dict": {}}, {"state_dict": whole["state_dict"] | {"network.norm.weight": "x"}}):
        torch.save(whole | damage, tmp_path / "last.ckpt")
        with pytest.raises(ValueError, match=r"last\.ckpt is not a checkpoint"):
            read_stored_model(str(tmp_path / "last.ckpt"), allowed_classes())


def test_the_training_length_of_a_model_with_yarn_is_that_of_its_configuration(tmp_path):
    """The length is 1× in every result, whether the network is the model, its translation or a new one with weights."""
    yarn = {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0, "original_max_position_embeddings": 8}
    path = str(saved(tmp_path, "llama", rope_parameters=yarn))
    assert read_network(path).training_length == LENGTH
    stored = read_stored_model(path)
    assert stored.model["length"] == build_transformer(stored.model).training_length == LENGTH
    assert stored.model["position"]["init_args"]["original_length"] == 8
    assert read_network(path, position=NoPE).training_length == LENGTH


def test_self_extend_has_the_rope_of_the_model_or_is_refused(tmp_path):
    """With another base, all distances would be other ones than in training, without a word."""
    path = str(saved(tmp_path, "llama", rope_parameters={"rope_type": "default", "rope_theta": 500.0}))
    with pytest.raises(UserError, match=r"SelfExtend of RoPE, which differs .* model\.position\.position \{.*500\.0"):
        read_network(path, position=SelfExtend)
    network = read_network(path, position=partial(SelfExtend, position=partial(RoPE, base=500.0), neighbor_window=4))
    tokens = text(1, 4)  # of which all are near
    torch.testing.assert_close(network(tokens), read_network(path)(tokens), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(
    ("family", "given", "message"),
    [
        ("llama", 0, "got 0, expected 1 token or more, or null"),
        ("llama", -3, "got -3, expected 1 token or more, or null"),
        ("kerple", LENGTH + 1, f"got {LENGTH + 1}, expected {LENGTH}, that of the exported model, or null"),
    ],
)
def test_a_training_length_that_a_model_cannot_have_is_an_error(family, given, message, monkeypatch):
    config = KerpleConfig({"length": LENGTH}) if family == "kerple" else configuration(family)
    monkeypatch.setattr(pretrained_model_reader, "find_model", str)
    monkeypatch.setattr(pretrained_model_reader, "read_model_config", lambda *_: config)
    with pytest.raises(UserError, match=f"^model.length: {message}"):
        read_network("model", given)

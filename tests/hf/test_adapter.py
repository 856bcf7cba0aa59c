"""`HuggingFaceNetwork`, compared with the logits of the models themselves."""

import math

import pytest
import torch
import torch.nn.functional as F

from kerple.base.errors import UserError
from kerple.hf.adapter import hugging_face_network
from kerple.hf.pretrained_model_reader import read_network
from kerple.hf.rope import scaled
from kerple.model.network import SupportsOffset
from kerple.positions import NoPE, RoPE, Shape
from kerple.positions.visibility import Visibility
from tests.hf.tiny import CONFIGS, LENGTH, SIZES, configuration, hf, random_model, small, text, tiny
from tests.probe.models import build

from kerple.hf import retrofit  # isort: skip  # needs transformers, which tests.hf.tiny looks for

GPTJ = {"rotary_dim": 4, "n_positions": 2 * LENGTH}
ONE_OF_TWO = {"num_local_experts": 2, "num_experts_per_tok": 1, "lm_head_bias": True, "num_key_value_heads": 4}
ONE_OF_TWO |= {"experts_implementation": "eager"}  # the other has no fp64
SPECIAL_HEADS = {  # families whose logits are not the product of the base model's output and the head
    "bias of Phi": (hf.PhiConfig, {"num_key_value_heads": 4, "intermediate_size": 48}),
    "bias of GPT-J": (hf.GPTJConfig, GPTJ),
    "bias of CodeGen": (hf.CodeGenConfig, GPTJ),
    "bias of CTRL": (hf.CTRLConfig, {"dff": 48, "n_positions": 2 * LENGTH}),
    "bias of PhiMoE": (hf.PhimoeConfig, ONE_OF_TWO | {"intermediate_size": 48}),
    "divisor of Granite": (hf.GraniteConfig, {"logits_scaling": 3.0, "intermediate_size": 48}),
    "factor of Cohere": (hf.CohereConfig, {"logit_scale": 0.3, "intermediate_size": 48}),
    "decoder of OPT": (hf.OPTConfig, {"ffn_dim": 48, "word_embed_proj_dim": 16}),
}


@pytest.mark.parametrize("family", [*CONFIGS, *SPECIAL_HEADS])
@torch.inference_mode()
def test_losses_in_chunks_equal_the_cross_entropy_of_the_models_logits(family):
    kind, options = SPECIAL_HEADS.get(family, (None, {}))
    model = random_model(kind(**SIZES | {"num_hidden_layers": 3} | options)) if kind else tiny(family)
    model, tokens = model.double(), text(2, 2 * LENGTH + 1)
    network = hugging_face_network(model, LENGTH)
    assert isinstance(network, SupportsOffset) == (family != "bloom")  # transformers' BLOOM takes no position_ids
    assert network.chunked_logits
    expected = F.cross_entropy(model(tokens[:, :-1]).logits.mT, tokens[:, 1:], reduction="none")
    torch.testing.assert_close(network.losses(tokens), expected, rtol=1e-9, atol=1e-9, check_dtype=False)
    torch.testing.assert_close(network.losses(tokens, 7), expected[:, -7:], rtol=1e-9, atol=1e-9, check_dtype=False)


@torch.inference_mode()
def test_losses_of_a_model_that_needs_more_of_its_base_model_are_those_of_its_logits():
    class Scaled(hf.LlamaForCausalLM):
        def forward(self, *args, **options):
            output = super().forward(*args, **options)
            output.logits = output.logits * self.model.norm.weight.sum()
            return output

    model, tokens = Scaled(configuration("llama")).eval(), text(2, LENGTH)
    network = hugging_face_network(model)
    assert not network.chunked_logits
    expected = F.cross_entropy(model(tokens[:, :-1]).logits.mT, tokens[:, 1:], reduction="none")
    torch.testing.assert_close(network.losses(tokens), expected)


WINDOW = {"sliding_window": 7, "use_sliding_window": True, "num_key_value_heads": 4, "num_local_experts": 2}
WINDOW |= {"intermediate_size": 48, "num_experts": 2, "num_experts_per_tok": 1}
WINDOW |= {"layer_types": ["sliding_attention"] * 2}


@pytest.mark.parametrize("kind", [hf.MixtralConfig, hf.PhimoeConfig, hf.Qwen2MoeConfig])
@torch.inference_mode()
def test_a_models_own_window_limits_a_wider_one(kind):
    model = small(kind, **WINDOW)
    network, tokens = hugging_face_network(model, LENGTH), text(1, 40)
    torch.testing.assert_close(network(tokens, Visibility(20)), model(tokens).logits, atol=1e-5, rtol=1e-4)
    model.config.sliding_window = 40
    assert not torch.allclose(network(tokens, Visibility(20)), model(tokens).logits, atol=1e-3)


@pytest.mark.parametrize(("family", "window", "keep_first"), [("llama", 5, 4), ("gpt_neox", 1, 0), ("gpt2", 600, 0)])
@torch.inference_mode()
def test_a_window_equals_an_explicit_mask(family, window, keep_first):
    length = 700  # more queries than are computed at once
    model = tiny(family, n_positions=length) if family == "gpt2" else tiny(family)
    tokens = text(1, length)
    i, j = torch.arange(length)[:, None], torch.arange(length)
    visible = ((j <= i) & ((j > i - window) | (j < keep_first)))[None, None]
    expected = model(tokens, attention_mask=torch.where(visible, 0.0, torch.finfo(torch.float32).min)).logits
    logits = hugging_face_network(model, LENGTH)(tokens, Visibility(window, keep_first))
    torch.testing.assert_close(logits, expected, atol=2e-4, rtol=1e-4)
    assert not torch.allclose(logits, model(tokens).logits, atol=1e-2)
    assert model.config._attn_implementation == "sdpa"


@pytest.mark.parametrize("family", ["llama4", "falcon", "mpt", "falcon_h1"])
@torch.inference_mode()
def test_a_model_that_cannot_be_limited_to_a_window_is_an_error(family):
    kinds = {"falcon": hf.FalconConfig, "mpt": hf.MptConfig}
    network = hugging_face_network(small(kinds[family]) if family in kinds else build(family))
    state_space = "text reaches later tokens of FalconH1ForCausalLM"
    reason = state_space if family == "falcon_h1" else r".* can limit \d of \d layers only"
    for _ in range(2):
        with pytest.raises(UserError, match=f"window: got 8, but {reason}"):
            network(text(1, 24), Visibility(8))


GPT = {"n_positions": 40, "n_embd": 32, "n_layer": 2, "n_head": 4}
TABLES = {
    "GPTJ": (40, GPT | {"rotary_dim": 8}),  # buffers of sinusoids
    "CodeGen": (40, GPT | {"rotary_dim": 8}),
    "CTRL": (40, GPT | {"dff": 48}),
    "Mpt": (40, {"max_seq_len": 40, "d_model": 32, "n_heads": 4, "n_layers": 2}),  # ALiBi for this number of keys
    "OPT": (40, {"ffn_dim": 48, "word_embed_proj_dim": 32}),
    "GPTNeo": (40, {"max_position_embeddings": 40, "num_layers": 2, "attention_types": [[["global", "local"], 1]]}),
    "XGLM": (None, {"d_model": 32, "num_layers": 2, "attention_heads": 4, "ffn_dim": 48}),  # the table grows
    "Bloom": (None, {}),
    "Falcon": (None, {"alibi": True}),
}


@pytest.mark.parametrize("family", TABLES)
@torch.inference_mode()
def test_the_longest_input_is_that_of_the_models_table_of_any_kind(family):
    limit, options = TABLES[family]
    network = hugging_face_network(small(getattr(hf, f"{family}Config"), **{"max_position_embeddings": 40} | options))
    assert network.max_length == limit
    assert not (family == "Falcon" and isinstance(network, SupportsOffset))  # with ALiBi it ignores position_ids
    assert network.losses(text(1, 41)).isfinite().all()
    if limit is None:
        assert network.losses(text(1, 42)).isfinite().all()
    else:
        with pytest.raises(UserError, match="lengths: got 41 positions, expected at most 40, for which"):
            network.losses(text(1, 42))
        network.longest_input = None  # as on a GPU, where the limit is not tested
        with pytest.raises(UserError, match=r"model: \w+ cannot read 41 tokens \(\w+Error: .+\); use another model"):
            network.losses(text(1, 42))


def test_a_strategy_in_place_of_rope_refuses_a_scaling_of_rope():
    with pytest.raises(UserError, match=r"model.scaling: got yarn and factor 4\.0 with model.position, expected null"):
        read_network("any", scaling="yarn", factor=4.0, position=NoPE)


def test_results_of_a_retrofitted_model_have_the_name_of_its_strategy():
    assert hugging_face_network(retrofit(tiny("llama"), "KerpleLog")).name == "KerpleLog"
    assert hugging_face_network(retrofit(tiny("gpt2"), "ALiBi")).name == "ALiBi"  # its learned positions are zero


LONGROPE = {"rope_type": "longrope", "rope_theta": 1000.0, "short_factor": [1.0] * 4, "long_factor": [4.0] * 4}
LONGROPE |= {"original_max_position_embeddings": 12}  # reached in the continuation


@pytest.mark.parametrize("strategy", [None, "RandomizedPositions", LONGROPE])
def test_continuations_are_greedy_and_need_no_cache_if_positions_depend_on_the_length(strategy):
    llama = tiny("llama", rope_parameters=LONGROPE) if strategy is LONGROPE else tiny("llama")
    network = hugging_face_network(retrofit(llama, strategy) if isinstance(strategy, str) else llama)
    tokens = text(1, 9)
    for token in network.continued(tokens, 6):
        assert token == int(network(tokens)[0, -1].argmax())
        tokens = F.pad(tokens, (0, 1), value=token)
    assert tokens.shape[1] == 15


def test_continuations_ignore_the_models_generation_config_and_bidirectional_models_are_rejected():
    network = hugging_face_network(small(hf.OPTConfig, ffn_dim=48, word_embed_proj_dim=32))
    assert network.name == "Learned"
    prompt, greedy = text(1, 9), network.continued(text(1, 9), 8)
    network.model.generation_config.repetition_penalty = 9.0
    assert network.continued(prompt, 8) == greedy
    assert network.model.generation_config.repetition_penalty == 9.0
    with pytest.raises(ValueError, match="depend on later tokens"):
        hugging_face_network(small(hf.BertConfig, hf.BertLMHeadModel, intermediate_size=48))


@torch.inference_mode()
def test_positions_of_images_do_not_limit_the_length_of_texts():
    vision = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 1, "num_attention_heads": 2}
    vision |= {"image_size": 28, "patch_size": 14}  # 4 positions, in a table as wide as the text's embedding
    model = small(hf.Gemma3Config, text_config=configuration("gemma3_text").to_dict(), vision_config=vision)
    assert model.model.vision_tower.embeddings.position_embedding.num_embeddings == 4
    network = hugging_face_network(model)
    assert (network.max_length, network.name) == (None, "RoPE (mixed)")
    assert network.losses(text(1, 41)).isfinite().all()


LLAMA3 = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
LLAMA3 |= {"original_max_position_embeddings": 512}
DIVISORS = [1.0 + i / 4 for i in range(16)]
OWN_SCALINGS = {
    "linear": {"rope_type": "linear", "factor": 4.0},
    "dynamic": {"rope_type": "dynamic", "factor": 4.0},  # of 4,096 tokens, read as the training length by a user
    "llama3": LLAMA3,
    "yarn": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 1024, "truncate": False},
    "longrope": {"rope_type": "longrope", "original_max_position_embeddings": 1024, "short_factor": DIVISORS[::-1]}
    | {"long_factor": DIVISORS},
}


@pytest.mark.parametrize(
    ("family", "own", "scaling", "reason"),
    [
        ("phi3", {"rope_type": "default"}, "yarn", "accepts only none and ntk"),
        ("phi3", {}, "dynamic_ntk", "has the scaling longrope, with which dynamic_ntk cannot be combined"),
        ("llama", LLAMA3, "dynamic_ntk", "has the scaling llama3, with which dynamic_ntk cannot be combined"),
        ("llama", {"rope_type": "proportional"}, "pi", "has the scaling proportional, with which pi cannot be"),
        ("llama+yarn", {"mscale": 1.0, "mscale_all_dim": 1.0}, "pi", "also has the rope_parameters mscale, mscale_all"),
        ("gemma3", {}, "pi", "has RoPE that differs between layers"),
        ("ministral3", {}, "yarn", "also scales queries"),
    ],
)
def test_a_scaling_that_a_model_does_not_support_is_an_error(family, own, scaling, reason):
    config = build(family).config
    config.rope_parameters = config.rope_parameters | own
    with pytest.raises(
        UserError, match=f"^model: got {config.model_type}, which {reason}.*RoPE that {scaling} can scale"
    ):
        scaled(config, scaling, 2.0, LENGTH)


ROPE_SWITCHES = [
    (hf.FalconConfig, {"alibi": False}, {"alibi": True}),
    (hf.GraniteMoeHybridConfig, {"position_embedding_type": "rope"}, {"position_embedding_type": "nope"}),
    (hf.Zamba2Config, {"use_mem_rope": True}, {"use_mem_rope": False}),
]


@pytest.mark.parametrize(("kind", "with_rope", "without_rope"), ROPE_SWITCHES)
def test_a_model_without_rope_but_with_its_parameters_cannot_be_scaled(kind, with_rope, without_rope):
    assert scaled(kind(**with_rope), "yarn", 2.0, LENGTH).rope_parameters["rope_type"] == "yarn"
    config = kind(**without_rope)
    assert config.rope_parameters["rope_theta"]
    with pytest.raises(UserError, match=f"got {config.model_type}, which has no RoPE, expected RoPE that yarn can"):
        scaled(config, "yarn", 2.0, LENGTH)


def rescaled(own: torch.Tensor, scaling: str, s: float, length: int, base: float) -> list[float]:
    """Apply the published formula of a scaling to each frequency of a model, by its number of rotations."""
    r = 2 * len(own)

    def pair(rotations: float) -> float:
        return r * math.log(length / (rotations * 2 * math.pi)) / (2 * math.log(base))

    found = []
    for i, f in enumerate(own.double().tolist()):
        rotations = length * f / (2 * math.pi)
        low, high = math.floor(pair(32)), math.ceil(pair(1))
        kept = {
            "pi": 0.0,
            "ntk": (s ** (-2 * i / (r - 2)) - 1 / s) / (1 - 1 / s),
            "yarn": 1 - min(max((pair(rotations) - low) / (high - low), 0), 1),
            "llama3": min(max((rotations - 1) / (4 - 1), 0), 1),
        }[scaling]
        found.append(kept * f + (1 - kept) * f / s)
    return found


@pytest.mark.parametrize("own", OWN_SCALINGS)
@pytest.mark.parametrize("scaling", ["pi", "ntk", "yarn", "llama3"])
def test_a_scaling_is_applied_to_the_frequencies_of_the_models_own_scaling(own, scaling):
    length = 8192 if own == "dynamic" else 4096
    config = configuration("llama")
    config.head_dim, config.max_position_embeddings = 32, 4096
    config.rope_parameters = {"rope_theta": 10000.0} | OWN_SCALINGS[own]
    assert scaled(config, None, None, length).rope_parameters == config.rope_parameters
    new, embedding = scaled(config, scaling, 2.0, length), hf.models.llama.modeling_llama.LlamaRotaryEmbedding
    factor = 0.1 * math.log(2) + 1 if scaling == "yarn" else 1
    for tokens in (1000, length, 2 * length):
        theirs, ours = embedding(config), embedding(new)
        theirs(torch.zeros(1), torch.tensor([[min(tokens, length) - 1 if own != "dynamic" else length - 1]]))
        ours(torch.zeros(1), torch.tensor([[tokens - 1]]))
        expected = torch.tensor(rescaled(theirs.inv_freq, scaling, 2.0, length, 10000.0))
        torch.testing.assert_close(ours.inv_freq, expected, rtol=1e-6, atol=0)
        assert ours.attention_scaling == pytest.approx(theirs.attention_scaling * factor, rel=1e-12)


def test_llama3_with_equal_ends_is_one_step_in_a_model_with_its_own_scaling():
    config = configuration("llama")
    config.head_dim, config.rope_parameters = 32, {"rope_theta": 10000.0, "rope_type": "linear", "factor": 4.0}
    new = scaled(config, "llama3", 2.0, 4096, {"low_freq_factor": 4.0, "high_freq_factor": 4.0})
    rotations = 4096 * 10000.0 ** (-torch.arange(0, 32, 2) / 32) / 4.0 / (2 * math.pi)
    assert new.rope_parameters["long_factor"] == pytest.approx([4.0 if n >= 4 else 8.0 for n in rotations])


# the rotation of 1 radian per token completes 5 periods in 32 tokens; YaRN and Llama 3 do not change it
@pytest.mark.parametrize(("scaling", "frequency"), [("none", 1.0), ("pi", 0.25), ("yarn", 1.0), ("llama3", 1.0)])
def test_heads_with_two_rotated_channels_are_scaled(scaling, frequency):
    config = hf.GPTNeoXConfig(hidden_size=32, num_attention_heads=4, rotary_pct=0.25)
    factor = None if scaling == "none" else 4.0
    new, embedding = scaled(config, scaling, factor, LENGTH), hf.models.gpt_neox.modeling_gpt_neox
    assert embedding.GPTNeoXRotaryEmbedding(new).inv_freq.tolist() == [frequency]


@pytest.mark.parametrize("scaling", ["ntk", "dynamic_ntk"])
def test_ntk_scaling_of_two_rotated_channels_is_an_error(scaling):
    config = hf.GPTNeoXConfig(hidden_size=32, num_attention_heads=4, rotary_pct=0.25)
    with pytest.raises(UserError, match=f"scaling: got {scaling}, expected pi or yarn, because .* 4 or more rotated"):
        scaled(config, scaling, 4.0, LENGTH)


@torch.inference_mode()
def test_losses_with_dynamic_rope_in_one_kind_of_layers_do_not_depend_on_earlier_inputs():
    dynamic = {"rope_type": "dynamic", "rope_theta": 500.0, "factor": 4.0}
    ropes = {"full_attention": dynamic, "sliding_attention": {"rope_theta": 1e4, "rope_type": "default"}}
    network = hugging_face_network(tiny("gemma3_text", rope_parameters=ropes))
    short = network.losses(text(1, 65))
    network.losses(text(1, 200))
    assert torch.equal(network.losses(text(1, 65)), short)


@pytest.mark.parametrize("scaling", ["none", "pi", "ntk", "dynamic_ntk", "yarn", "llama3"])
@torch.inference_mode()
def test_scaled_rope_has_the_frequencies_of_this_projects_rope(scaling):
    """`tests/positions/test_rotary.py` compares the RoPE of this project with published code."""
    factor = None if scaling == "none" else 4.0
    model = hf.AutoModelForCausalLM.from_config(scaled(configuration("llama"), scaling, factor, LENGTH)).eval()
    network, rope = hugging_face_network(model, LENGTH), model.model.rotary_emb
    options = {} if factor is None else {"scaling": scaling, "factor": factor}
    options |= {"beta_fast": 4.0, "beta_slow": 1.0} if scaling == "llama3" else {}
    ours = RoPE(Shape(48, 6, LENGTH), base=1000.0, **options)
    for length in (201, 101):  # dynamic scaling must not depend on the earlier, longer input
        network.losses(text(1, length))
        expected = ours.frequencies(torch.tensor([length - 2])).flatten()
        torch.testing.assert_close(rope.inv_freq.double(), expected, atol=1e-7, rtol=1e-5)
    assert rope.attention_scaling == pytest.approx(ours.attention_factor)

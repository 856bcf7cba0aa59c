"""The protocols over a model of transformers are sums over its own logits."""

import math

import pytest
import torch

from kerple.hf.adapter import hugging_face_network
from kerple.hf.rope import scaled
from kerple.measure.protocols import Protocol
from kerple.model.network import Offset
from kerple.positions.visibility import Visibility
from tests.hf.tiny import CONFIGS, LENGTH, configuration, hf, small, text, tiny


def plain_loop(model, tokens, protocol, length):
    """Sum of losses of a block (1, N+1), target by target, from whole logits."""
    total, block = 0.0, tokens.shape[1] - 1
    for t in range(protocol.skip, block):
        start = t // length * length
        if protocol.name == "sliding":
            end = max(length, protocol.skip + protocol.stride)
            while end <= t:
                end += protocol.stride
            end = min(end, block)
            start = end - length
        if protocol.name == "last" and t - start < length - protocol.k:
            continue
        logits = model(tokens[:, start : t + 1]).logits[0, -1].double()
        total -= float(logits.log_softmax(-1)[tokens[0, t + 1]])
    return total


LLAMA = [("llama", Protocol("sliding", stride=12, skip=36)), ("llama", Protocol("last", k=7))]


@pytest.mark.parametrize(("family", "protocol"), [*((name, Protocol("full")) for name in CONFIGS), *LLAMA], ids=str)
@torch.inference_mode()
def test_sums_equal_a_plain_loop(family, protocol):
    model, tokens = tiny(family).double(), text(1, 2 * LENGTH + 1)
    network = hugging_face_network(model, LENGTH)
    assert network.chunked_logits == (family not in ("gemma3_text", "cohere2"))  # a cap, a scale
    for length in (16, 2 * LENGTH):
        if protocol.name == "sliding" and length > protocol.skip + protocol.stride:
            continue
        summed = float(protocol(network, tokens, length).double().sum())
        assert summed == pytest.approx(plain_loop(model, tokens, protocol, length), rel=1e-9)


@pytest.mark.parametrize(("family", "window", "keep_first"), [("llama", 5, 4), ("gpt_neox", 1, 0), ("gpt2", 600, 0)])
@torch.inference_mode()
def test_a_window_is_the_mask_of_the_last_keys_and_the_first(family, window, keep_first):
    """Against transformers given the whole mask, over more rows than are computed at once."""
    length = 700
    model = tiny(family, n_positions=length) if family == "gpt2" else tiny(family)
    tokens = text(1, length)
    i, j = torch.arange(length)[:, None], torch.arange(length)
    seen = ((j <= i) & ((j > i - window) | (j < keep_first)))[None, None]
    expected = model(tokens, attention_mask=torch.where(seen, 0.0, torch.finfo(torch.float32).min)).logits
    got = hugging_face_network(model, LENGTH)(tokens, Visibility(window, keep_first))
    torch.testing.assert_close(got, expected, atol=2e-4, rtol=1e-4)
    assert not torch.allclose(got, model(tokens).logits, atol=1e-2)
    assert model.config._attn_implementation == "sdpa"


@torch.inference_mode()
def test_offsets_move_learned_positions_and_not_rope():
    tokens, model = text(2, 20), tiny("gpt2")
    rope, learned = hugging_face_network(tiny("llama").double(), LENGTH), hugging_face_network(model)
    torch.testing.assert_close(rope.losses(tokens, offset=50), rope.losses(tokens), atol=1e-4, rtol=1e-4)
    torch.testing.assert_close(learned(tokens, offset=9), model(tokens, position_ids=torch.arange(9, 29)[None]).logits)
    assert isinstance(learned, Offset)
    assert not isinstance(hugging_face_network(tiny("bloom"), LENGTH), Offset)


def test_learned_positions_are_rows_of_a_table_but_the_reserved_ones_and_an_encoder_is_found_out():
    network = hugging_face_network(small(hf.OPTConfig, ffn_dim=48, word_embed_proj_dim=32, max_position_embeddings=24))
    assert (network.max_length, network.name) == (24, "Learned")
    with torch.inference_mode():
        assert network.losses(text(1, 25)).isfinite().all()
    with pytest.raises(ValueError, match=r"length: got 25 tokens .*, expected at most 24, the number of learned"):
        network.losses(text(1, 26))
    with pytest.raises(ValueError, match="depend on later tokens"):
        hugging_face_network(small(hf.BertConfig, hf.BertLMHeadModel, intermediate_size=48))


HEAD = 8  # of the tiny Llama: 48 / 6


def turns(scaling, factor, seen):
    """Radians per position of each pair, from the papers' formulas (base 1000, training length 32)."""
    base, made = 1000.0, []
    if scaling == "ntk":
        base *= factor ** (HEAD / (HEAD - 2))
    if scaling == "dynamic_ntk":
        base *= (factor * max(seen, LENGTH) / LENGTH - (factor - 1)) ** (HEAD / (HEAD - 2))
    for i in range(HEAD // 2):
        angle = base ** (-2 * i / HEAD)
        if scaling == "pi":
            angle /= factor
        if scaling == "yarn":
            low, high = (HEAD * math.log(LENGTH / (n * 2 * math.pi)) / (2 * math.log(base)) for n in (32, 1))
            low, high = max(math.floor(low), 0), min(math.ceil(high), HEAD - 1)
            mixed = min(max((i - low) / max(high - low, 0.001), 0), 1)
            angle = angle * (1 - mixed) + angle / factor * mixed
        if scaling == "llama3":
            kept = min(max((LENGTH * angle / (2 * math.pi) - 1) / (4 - 1), 0), 1)
            angle = angle * kept + angle / factor * (1 - kept)
        made.append(angle)
    return torch.tensor(made, dtype=torch.float64)


@pytest.mark.parametrize("scaling", ["none", "pi", "ntk", "dynamic_ntk", "yarn", "llama3"])
@torch.inference_mode()
def test_scalings_have_the_frequencies_of_their_papers(scaling):
    config = scaled(configuration("llama"), scaling, None if scaling == "none" else 4.0, LENGTH)
    model = hf.AutoModelForCausalLM.from_config(config).eval()
    network, rope = hugging_face_network(model, LENGTH), model.model.rotary_emb
    for length in (201, 101):  # dynamic scaling does not depend on earlier inputs
        network.losses(text(1, length))
        torch.testing.assert_close(rope.inv_freq.double(), turns(scaling, 4.0, length - 1), atol=1e-7, rtol=1e-5)
    assert rope.attention_scaling == pytest.approx(0.1 * math.log(4) + 1 if scaling == "yarn" else 1.0)

"""Strategies against published code, and against formulas of their papers."""

import math
from typing import Any, cast

import pytest
import torch
from torch import Tensor

from kerple import positions
from kerple.positions import Learned, Position, QueryKeyBlock, Shape, Sinusoidal, Temperature, TokenPositions
from kerple.positions.t5 import t5_bucket

HEADS, HEAD_DIM, LENGTH = 3, 8, 40
SHAPE = Shape(HEADS * HEAD_DIM, HEADS, 64)
TOKENS = TokenPositions.arange(LENGTH)
SEEN = torch.ones(LENGTH, LENGTH, dtype=torch.bool).tril()


def close(got: Tensor, expected: Tensor, tolerance: float = 1e-4) -> None:
    torch.testing.assert_close(got, expected, atol=tolerance, rtol=tolerance)


def embed(position: Position, x: Tensor, ids: list[int]) -> Tensor:
    return position.embed(x, TokenPositions(torch.arange(len(ids)), torch.tensor(ids), contiguous=False)).detach()


def test_sinusoidal_is_its_formula() -> None:
    ids, x = [0, 1, 7, 511, 40_000], torch.randn(1, 5, 12)
    angles = [[t / 10000 ** (2 * i / 12) for i in range(6)] for t in ids]
    expected = torch.tensor([[wave(a) for a in row for wave in (math.sin, math.cos)] for row in angles])  # (5, 12)
    sinusoidal, scaled = Sinusoidal(Shape(12, 2, 10)), Sinusoidal(Shape(12, 2, 10), scaled=True)
    close(embed(sinusoidal, torch.zeros(1, 5, 12), ids), expected[None], 1e-6)
    close(embed(sinusoidal, x, ids), x + expected, 1e-6)
    close(embed(scaled, x, ids), x * 12**0.5 + expected, 1e-6)
    assert embed(sinusoidal, x.bfloat16(), ids).dtype == torch.bfloat16


def test_learned_positions_beyond_the_table() -> None:
    error, clamp, interpolate = (Learned(Shape(12, 2, 10), beyond) for beyond in ("error", "clamp", "interpolate"))
    assert [position.max_length for position in (error, clamp, interpolate)] == [10, None, None]
    close(embed(clamp, torch.zeros(1, 4, 12), [8, 9, 10, 900])[0], clamp.table[[8, 9, 9, 9]], 1e-6)
    table, vectors = interpolate.table, embed(interpolate, torch.zeros(1, 19, 12), list(range(19)))[0]
    close(vectors[::2], table, 1e-6)  # position 18 is row 9, so positions advance by half a row
    close(vectors[1::2], (table[1:] + table[:-1]) / 2, 1e-6)


@pytest.mark.parametrize("heads", [1, 8, 12, 20])
def test_alibi_has_the_slopes_of_bloom(heads: int) -> None:
    bloom = pytest.importorskip("transformers.models.bloom.modeling_bloom")
    theirs = bloom.build_alibi_tensor(torch.ones(1, 50, dtype=torch.int64), heads, torch.float32).view(heads, 50)
    ours = positions.ALiBi(Shape(8 * heads, heads, 64)).bias(torch.arange(50).float())
    torch.testing.assert_close(ours.flip(-1), theirs - theirs[:, -1:], atol=1e-4, rtol=1e-5)


def test_learnable_slopes_start_at_alibis_and_do_not_become_negative() -> None:
    fixed, learnable = positions.ALiBi(SHAPE), positions.ALiBi(SHAPE, learnable=True)
    torch.testing.assert_close(learnable.slopes.data, fixed.slopes)
    learnable.slopes.data -= 0.1
    learnable.constrain_()
    torch.testing.assert_close(learnable.slopes.data, (fixed.slopes - 0.1).clamp(min=0))


@pytest.mark.parametrize(("buckets", "max_distance"), [(32, 128), (32, 4096), (8, 20), (16, 512)])
def test_t5_buckets_are_those_of_transformers_at_any_distance(buckets: int, max_distance: int) -> None:
    t5, distance = pytest.importorskip("transformers.models.t5.modeling_t5"), torch.arange(40_000)
    expected = t5.T5Attention._relative_position_bucket(-distance, False, buckets, max_distance)
    assert torch.equal(t5_bucket(distance, buckets, max_distance), expected)
    ours = positions.T5(SHAPE, buckets, max_distance)
    assert torch.equal(ours.bias(distance.float()), ours.table[:, expected])


def test_sandwich_is_its_formula() -> None:
    ours = positions.Sandwich(SHAPE, size=128).bias(torch.arange(2000).float())
    for head in range(HEADS):
        for d in (*range(10), 511, 1999):
            waves = sum(math.cos(d / 10000 ** (2 * i / 128)) for i in range(64))
            assert ours[head, d].item() == pytest.approx(waves * HEADS / (8 * (head + 1)), rel=1e-5)


def added_scores(position: Position, q: Tensor, k: Tensor, state: Tensor | None = None) -> Tensor:
    """Return the terms that a strategy adds to the scores of the last queries, 0 for unseen keys."""
    queries, keys = q.shape[2], k.shape[2]
    tokens, seen = TokenPositions.arange(keys), torch.ones(queries, keys, dtype=torch.bool).tril(keys - queries)
    s = (q @ k.mT / math.sqrt(HEAD_DIM)).masked_fill(~seen, 0)
    block = QueryKeyBlock(tokens[-queries:], tokens, seen, state)
    biased = position.add_token_biases(s, q, block)
    modified = position.modify_scores(biased, q, k, block) if position.uses("modify_scores") else biased
    return (cast(Tensor, modified) - s) * seen


@pytest.mark.parametrize("rows", [4, 64])
def test_cope_is_that_of_x_transformers(rows: int) -> None:
    package = pytest.importorskip("x_transformers.x_transformers")
    ours, theirs = positions.CoPE(SHAPE, rows=rows), package.CoPE(HEAD_DIM, HEADS, rows)
    ours.vectors.data = theirs.pos_emb.data = torch.randn(rows, HEAD_DIM)
    q, k = 2 * torch.randn(2, 2, HEADS, LENGTH, HEAD_DIM)
    logits = (q @ k.mT / math.sqrt(HEAD_DIM)).masked_fill(~SEEN, -torch.finfo(torch.float32).max)
    close(added_scores(ours, q, k), theirs(q, logits).tril())


def test_fox_is_x_transformers_data_dependent_alibi() -> None:
    package = pytest.importorskip("x_transformers.x_transformers")
    ours, theirs = positions.FoX(SHAPE, start=5.0), package.DataDependentAlibi(SHAPE.dim, HEADS)
    linear = theirs.to_forget_gates[0]
    assert linear.bias.tolist() == ours.gates.bias.tolist()  # both are initialised to 5 here
    ours.gates.load_state_dict(linear.state_dict())
    x, q = torch.randn(2, LENGTH, SHAPE.dim), torch.zeros(2, HEADS, LENGTH, HEAD_DIM)
    close(added_scores(ours, q, q, ours.token_state(x, TOKENS, None)), theirs(x).tril())


def test_fox_keeps_near_gates_precise_after_a_long_past() -> None:
    # prefix sums in fp32 would be off by 0.01 after 100,000 tokens of gates near 0.5
    ours, tokens = positions.FoX(SHAPE), TokenPositions.arange(100_000)
    x, q, k = torch.randn(1, 100_000, SHAPE.dim), torch.zeros(1, HEADS, 1, 8), torch.zeros(1, HEADS, 100_000, 8)
    first = ours.token_state(x[:, :99_000], tokens[:99_000], None)  # in two pieces, as with a cache
    state = torch.cat([first, ours.token_state(x[:, 99_000:], tokens[99_000:], first)], 2)
    gates = torch.nn.functional.logsigmoid(ours.gates(x[0, -50:]).double()).T
    expected = gates.flip(-1).cumsum(-1).flip(-1)  # of keys 51 to 2 before the end
    bias = added_scores(ours, q, k, state)[0, :, 0, -51:-1]
    torch.testing.assert_close(bias.double(), expected, atol=1e-5, rtol=1e-6)


def test_transformer_xl_has_the_probabilities_of_xlnet() -> None:
    xlnet = pytest.importorskip("transformers.models.xlnet.modeling_xlnet")
    config = xlnet.XLNetConfig(
        d_model=SHAPE.dim, n_head=HEADS, d_inner=8, n_layer=1, vocab_size=5, attn_type="uni", dropout=0.0
    )
    theirs, ours = xlnet.XLNetRelativeAttention(config).eval(), positions.TransformerXL(SHAPE)
    theirs.r_w_bias.data, theirs.r_r_bias.data = ours.u.data.clone(), ours.v.data.clone()
    q, k = torch.randn(2, 2, HEADS, LENGTH, HEAD_DIM)
    waves = xlnet.XLNetModel(config).relative_positional_encoding(LENGTH, LENGTH, bsz=2)  # (T + 1, B, D)
    projected = torch.einsum("ibd,hed->ibhe", waves, ours.projection)
    q_, k_ = (x.permute(2, 0, 1, 3) for x in (q, k))  # (T, B, H, δ)
    mask = (~SEEN).float()[:, :, None, None]
    _, expected = theirs.rel_attn_core(q_, k_, k_, projected, attn_mask=mask, output_attentions=True)  # (Tq, Tk, B, H)
    scores = q @ k.mT / math.sqrt(HEAD_DIM) + added_scores(ours, q, k)
    close(scores.masked_fill(~SEEN, -math.inf).softmax(-1), expected.permute(2, 3, 0, 1))


def attention_arguments(attention: torch.nn.Module, x: Tensor, **inputs: Any) -> dict[str, Any]:
    """Return the arguments of the attention function in a module of transformers: query, key (B, H, T, δ), options."""
    arguments: dict[str, Any] = {}

    def spy(module: torch.nn.Module, query: Tensor, key: Tensor, value: Tensor, mask: None, **options: Any) -> Any:
        arguments.update(query=query, key=key, **options)
        return value.transpose(1, 2), None

    pytest.importorskip("transformers.modeling_utils").ALL_ATTENTION_FUNCTIONS.register("spy", spy)
    attention.config._attn_implementation = "spy"
    for parameter in attention.parameters():
        torch.nn.init.normal_(parameter, std=0.3)
    attention(x, attention_mask=None, **inputs)
    return arguments


SIZES = {"hidden_size": 24, "num_attention_heads": 3, "num_key_value_heads": 3, "head_dim": 8}


def test_temperatures_are_those_of_transformers() -> None:
    def model(name: str) -> Any:
        return pytest.importorskip(f"transformers.models.{name}.modeling_{name}")

    def scaled(position: Position, q: Tensor) -> Tensor:
        return position.transform_qk(q, q, None, TOKENS)[0]

    q, ids = torch.randn(2, HEADS, LENGTH, HEAD_DIM), torch.arange(LENGTH)[None]
    ours = positions.SSMax(SHAPE, start=0.0, bias=1.0)
    theirs = model("mistral_large4").MistralLarge4TextSoftmaxScaling(HEADS)
    theirs.scale.data, theirs.bias.data = ours.scale.data, ours.offset.data = torch.rand(2, HEADS)
    close(scaled(ours, q), theirs(q, ids, head_dim_first=True), 1e-6)
    factor = model("ministral3").get_llama_4_attn_scale(ids, 0.1, 7)
    close(scaled(Temperature(SHAPE, "ministral3", length=7), q), q * factor, 1e-6)
    factor = model("beam").compute_attention_scaling(ids)
    close(scaled(Temperature(SHAPE, "beam", length=2048), q), q * factor, 1e-6)
    llama4 = model("llama4")
    config = llama4.Llama4TextConfig(**SIZES, num_hidden_layers=4, floor_scale=7, attn_scale=0.1)
    attention, x = llama4.Llama4TextAttention(config, layer_idx=3), torch.randn(2, LENGTH, 24)  # a layer without RoPE
    expected = attention_arguments(attention, x, position_embeddings=None)["query"]
    q = attention.q_proj(x).view(2, LENGTH, HEADS, HEAD_DIM).transpose(1, 2)
    close(scaled(Temperature(SHAPE, "llama4", length=7), q), expected, 1e-6)


@pytest.mark.parametrize("kind", ["hybrid", "hybrid_sliding"])
def test_the_learned_relative_bias_is_inklings(kind: str) -> None:
    inkling = pytest.importorskip("transformers.models.inkling.modeling_inkling")
    sizes = {"d_rel": 5, "swa_num_attention_heads": 3, "swa_num_key_value_heads": 3, "swa_head_dim": 8}
    lengths = {"rel_extent": 13, "sliding_window_size": 9, "log_scaling_n_floor": 11}
    config = inkling.InklingTextConfig(**SIZES, **sizes, **lengths, num_hidden_layers=1, layer_types=[kind])
    attention, x = inkling.InklingAttention(config, layer_idx=0), torch.randn(2, LENGTH, 24)
    theirs = attention_arguments(attention, x)
    extent, temperature_length = (13, 11) if kind == "hybrid" else (9, None)
    ours = positions.LearnedRelativeBias(SHAPE, 5, extent, temperature_length)
    ours.weights.data, ours.curves.data = attention.r_proj.weight.data, attention.rel_logits_proj.proj.data
    s = theirs["query"] @ theirs["key"].mT
    # their queries are already multiplied by the temperature
    tau = 1.0 if temperature_length is None else 1 + 0.1 * ((TOKENS.rows + 1) / 11).clamp(min=1).log()[:, None]
    state = ours.token_state(x, TOKENS, None)
    q, k = ours.transform_qk(theirs["query"] / tau, theirs["key"], state, TOKENS)
    close(q, theirs["query"], 1e-6)
    assert k is theirs["key"]
    biased = ours.add_token_biases(s, q, QueryKeyBlock(TOKENS, TOKENS, SEEN, state))
    close(biased.tril(), (s + theirs["position_bias"]).tril(), 1e-5)

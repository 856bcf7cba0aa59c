"""Strategies against published code and formulas."""

import math
from typing import Any, cast

import pytest
import torch
from torch import Tensor

from kerple import positions
from kerple.attention import AttentionSpec
from kerple.attention.reference import attend_reference
from kerple.positions import (
    T5,
    ALiBi,
    CoPE,
    FoX,
    Learned,
    LearnedRelativeBias,
    Position,
    QueryKeyBlock,
    Shape,
    Sinusoidal,
    SSMax,
    Temperature,
    TokenPositions,
)
from kerple.positions.t5 import t5_bucket

HEADS, HEAD_DIM, LENGTH = 3, 8, 40
SHAPE = Shape(HEADS * HEAD_DIM, HEADS, 64)


def test_the_sinusoid_is_the_papers() -> None:
    where = torch.tensor([0, 1, 7, 511, 40_000])
    at = TokenPositions(torch.arange(5), where, contiguous=False)
    waves = Sinusoidal(Shape(12, 2, 10)).embed(torch.zeros(1, 5, 12), at)[0]
    for row, t in zip(waves, where.tolist(), strict=True):
        for i in range(6):
            angle = t / 10000 ** (2 * i / 12)
            assert row[2 * i].item() == pytest.approx(math.sin(angle), abs=1e-6)
            assert row[2 * i + 1].item() == pytest.approx(math.cos(angle), abs=1e-6)
    x = torch.randn(1, 5, 12)
    torch.testing.assert_close(Sinusoidal(Shape(12, 2, 10)).embed(x, at) - x, waves[None])
    torch.testing.assert_close(Sinusoidal(Shape(12, 2, 10), scaled=True).embed(x, at) - x * 12**0.5, waves[None])
    assert Sinusoidal(Shape(12, 2, 10)).embed(x.bfloat16(), at).dtype == torch.bfloat16


def test_learned_positions_beyond_the_table() -> None:
    def embedded(learned: Learned, *positions: int) -> torch.Tensor:
        at = TokenPositions(torch.arange(len(positions)), torch.tensor(positions), False)
        return learned.embed(torch.zeros(1, len(positions), 12), at)[0].detach()

    learned = {beyond: Learned(Shape(12, 2, 10), beyond) for beyond in ("error", "clamp", "interpolate")}
    assert [position.max_length for position in learned.values()] == [10, None, None]
    rows = learned["clamp"].table.detach()
    torch.testing.assert_close(embedded(learned["clamp"], 8, 9, 10, 900), rows[[8, 9, 9, 9]])
    rows, squeezed = learned["interpolate"].table.detach(), embedded(learned["interpolate"], *range(19))
    torch.testing.assert_close(squeezed[::2], rows)  # position 18 is row 9, so positions advance by half a row
    torch.testing.assert_close(squeezed[1::2], (rows[1:] + rows[:-1]) / 2)


def shape(heads: int) -> Shape:
    return Shape(8 * heads, heads, 64)


@pytest.mark.parametrize("heads", [1, 8, 12, 20])
def test_alibi_has_the_slopes_of_bloom(heads: int) -> None:
    bloom = pytest.importorskip("transformers.models.bloom.modeling_bloom")
    theirs = bloom.build_alibi_tensor(torch.ones(1, 50, dtype=torch.int64), heads, torch.float32).view(heads, 50)
    ours = ALiBi(shape(heads)).bias(torch.arange(50).float())
    torch.testing.assert_close(ours.flip(-1), theirs - theirs[:, -1:], atol=1e-4, rtol=1e-5)


def test_learnable_slopes_start_at_alibis_and_never_turn_negative() -> None:
    fixed, learnable = ALiBi(shape(12)), ALiBi(shape(12), learnable=True)
    torch.testing.assert_close(learnable.slopes.data, fixed.slopes)
    learnable.slopes.data -= 0.1
    learnable.constrain_()
    torch.testing.assert_close(learnable.slopes.data, (fixed.slopes - 0.1).clamp(min=0))


@pytest.mark.parametrize(("buckets", "max_distance"), [(32, 128), (32, 4096), (8, 20), (16, 512)])
def test_t5_buckets_are_those_of_transformers_far_past_the_last(buckets: int, max_distance: int) -> None:
    t5 = pytest.importorskip("transformers.models.t5.modeling_t5")
    distance = torch.arange(40_000)
    expected = t5.T5Attention._relative_position_bucket(
        -distance, bidirectional=False, num_buckets=buckets, max_distance=max_distance
    )
    assert torch.equal(t5_bucket(distance, buckets, max_distance), expected)
    ours = T5(shape(12), buckets, max_distance)
    assert torch.equal(ours.bias(distance.float()), ours.table[:, expected])


def test_sandwich_is_its_formula() -> None:
    ours = positions.Sandwich(shape(4), size=128).bias(torch.arange(2000).float())
    for head in range(4):
        for d in (*range(10), 511, 1999):
            waves = sum(math.cos(d / 10000 ** (2 * i / 128)) for i in range(64))
            assert ours[head, d].item() == pytest.approx(waves * 4 / (8 * (head + 1)), rel=1e-5)


def added(position: Position, q: Tensor, k: Tensor, state: Tensor | None = None, keys: int = LENGTH) -> torch.Tensor:
    """Return the terms that a strategy adds to the scores of the last queries, 0 for unseen keys."""
    at, queries = TokenPositions.arange(keys), q.shape[2]
    seen = torch.ones(queries, keys, dtype=torch.bool).tril(keys - queries)
    s = (q @ k.mT / math.sqrt(HEAD_DIM)).masked_fill(~seen, 0)
    return (cast(Tensor, position.modify_scores(s, q, k, QueryKeyBlock(at[-queries:], at, seen, state))) - s) * seen


@pytest.mark.parametrize("rows", [4, 64])
def test_cope_is_that_of_x_transformers(rows: int) -> None:
    package = pytest.importorskip("x_transformers.x_transformers")
    ours, theirs = CoPE(SHAPE, rows=rows), package.CoPE(HEAD_DIM, HEADS, rows)
    ours.vectors.data = theirs.pos_emb.data = torch.randn(rows, HEAD_DIM)
    q, k = 2 * torch.randn(2, 2, HEADS, LENGTH, HEAD_DIM)
    future = torch.ones(LENGTH, LENGTH, dtype=torch.bool).triu(1)
    logits = (q @ k.mT / math.sqrt(HEAD_DIM)).masked_fill(future, -torch.finfo(torch.float32).max)
    torch.testing.assert_close(added(ours, q, k), theirs(q, logits).tril(), atol=1e-4, rtol=1e-4)


def test_fox_is_x_transformers_data_dependent_alibi() -> None:
    package = pytest.importorskip("x_transformers.x_transformers")
    ours, theirs = FoX(SHAPE, start=5.0), package.DataDependentAlibi(SHAPE.dim, HEADS)
    linear = theirs.to_forget_gates[0]
    assert linear.bias.tolist() == ours.gates.bias.tolist()  # both are initialised to 5 here
    ours.gates.load_state_dict(linear.state_dict())
    x, q = torch.randn(2, LENGTH, SHAPE.dim), torch.zeros(2, HEADS, LENGTH, HEAD_DIM)
    state = ours.token_state(x, TokenPositions.arange(LENGTH), None)
    torch.testing.assert_close(added(ours, q, q, state), theirs(x).tril(), atol=1e-4, rtol=1e-4)


def test_fox_keeps_near_gates_precise_after_a_long_past() -> None:
    # prefix sums in fp32 would be off by 0.01 after 100,000 tokens of gates near 0.5
    ours, at = FoX(SHAPE), TokenPositions.arange(100_000)
    x, q, k = torch.randn(1, 100_000, SHAPE.dim), torch.zeros(1, HEADS, 1, 8), torch.zeros(1, HEADS, 100_000, 8)
    first = ours.token_state(x[:, :99_000], at[:99_000], None)  # in two pieces, as with a cache
    state = torch.cat([first, ours.token_state(x[:, 99_000:], at[99_000:], first)], 2)
    bias = added(ours, q, k, state, 100_000)
    gates = torch.nn.functional.logsigmoid(ours.gates(x[0, -50:]).double()).T
    expected = gates.flip(-1).cumsum(-1).flip(-1)  # of keys 51 to 2 before the end
    torch.testing.assert_close(bias[0, :, 0, -51:-1].double(), expected, atol=1e-5, rtol=1e-6)


def test_transformer_xl_is_xlnets_relative_core() -> None:
    xlnet = pytest.importorskip("transformers.models.xlnet.modeling_xlnet")
    config = xlnet.XLNetConfig(
        d_model=SHAPE.dim, n_head=HEADS, d_inner=8, n_layer=1, vocab_size=5, attn_type="uni", dropout=0.0
    )
    core, ours = xlnet.XLNetRelativeAttention(config).eval(), positions.TransformerXL(SHAPE)
    core.r_w_bias.data, core.r_r_bias.data = ours.u.data.clone(), ours.v.data.clone()
    q, k, v = torch.randn(3, 2, HEADS, LENGTH, HEAD_DIM)
    waves = xlnet.XLNetModel(config).relative_positional_encoding(LENGTH, LENGTH, bsz=2)  # (T + 1, B, D)
    projected = torch.einsum("ibd,hed->ibhe", waves, ours.projection)
    future = torch.ones(LENGTH, LENGTH).triu(1)[:, :, None, None]
    at = TokenPositions.arange(LENGTH, offset=5)

    def modify(s: Tensor, q: Tensor, k: Tensor, rows: slice, columns: slice, seen: Tensor) -> Tensor:
        return ours.modify_scores(s, q, k, QueryKeyBlock(at[rows], at[columns], seen))

    expected = core.rel_attn_core(*(x.permute(2, 0, 1, 3) for x in (q, k, v)), projected, attn_mask=future)
    out = attend_reference(q, k, v, AttentionSpec(modify_scores=modify))
    torch.testing.assert_close(out, expected.permute(1, 2, 0, 3), atol=1e-4, rtol=1e-4)


def attended(attention: torch.nn.Module, x: Tensor, **inputs: Any) -> dict[str, Any]:
    """Return the arguments of the attention function in a module of transformers: query, key (B, H, T, δ), options."""
    passed: dict[str, Any] = {}

    def spy(module: torch.nn.Module, query: Tensor, key: Tensor, value: Tensor, mask: None, **options: Any) -> Any:
        passed.update(query=query, key=key, **options)
        return value.transpose(1, 2), None

    modeling_utils = pytest.importorskip("transformers.modeling_utils")
    modeling_utils.ALL_ATTENTION_FUNCTIONS.register("spy", spy)
    attention.config._attn_implementation = "spy"
    for parameter in attention.parameters():
        torch.nn.init.normal_(parameter, std=0.3)
    attention(x, attention_mask=None, **inputs)
    return passed


def scaled(position: Position, q: Tensor) -> Tensor:
    return position.transform_qk(q, q, None, TokenPositions.arange(q.shape[2]))[0]


def test_temperatures_are_those_of_transformers() -> None:
    def model(name: str) -> Any:
        return pytest.importorskip(f"transformers.models.{name}.modeling_{name}")

    q, ids = torch.randn(2, HEADS, LENGTH, HEAD_DIM), torch.arange(LENGTH)[None]
    ministral, large = model("ministral3"), model("mistral_large4").MistralLarge4TextSoftmaxScaling(HEADS)
    ours = SSMax(SHAPE, start=0.0, bias=1.0)
    large.scale.data, large.bias.data = ours.scale.data, ours.offset.data = torch.rand(2, HEADS)
    torch.testing.assert_close(scaled(ours, q), large(q, ids, head_dim_first=True), atol=1e-6, rtol=1e-6)
    theirs = q * ministral.get_llama_4_attn_scale(ids, 0.1, 7)
    torch.testing.assert_close(scaled(Temperature(SHAPE, "ministral3", length=7), q), theirs, atol=1e-6, rtol=1e-6)
    theirs = q * model("beam").compute_attention_scaling(ids)
    torch.testing.assert_close(scaled(Temperature(SHAPE, "beam", length=2048), q), theirs, atol=1e-6, rtol=1e-6)
    llama4 = model("llama4")
    sizes = {"hidden_size": 24, "num_attention_heads": 3, "num_key_value_heads": 3, "head_dim": 8}
    config = llama4.Llama4TextConfig(**sizes, num_hidden_layers=4, floor_scale=7, attn_scale=0.1)
    attention, x = (
        llama4.Llama4TextAttention(config, layer_idx=3),
        torch.randn(2, LENGTH, 24),
    )  # each fourth has no RoPE
    theirs = attended(attention, x, position_embeddings=None)["query"]
    q = attention.q_proj(x).view(2, LENGTH, HEADS, HEAD_DIM).transpose(1, 2)
    torch.testing.assert_close(scaled(Temperature(SHAPE, "llama4", length=7), q), theirs, atol=1e-6, rtol=1e-6)


@pytest.mark.parametrize("kind", ["hybrid", "hybrid_sliding"])
def test_the_learned_relative_bias_is_inklings(kind: str) -> None:
    inkling = pytest.importorskip("transformers.models.inkling.modeling_inkling")
    sizes = {"hidden_size": 24, "num_attention_heads": 3, "num_key_value_heads": 3, "head_dim": 8, "d_rel": 5}
    sizes |= {"swa_num_attention_heads": 3, "swa_num_key_value_heads": 3, "swa_head_dim": 8}
    lengths = {"rel_extent": 13, "sliding_window_size": 9, "log_scaling_n_floor": 11}
    config = inkling.InklingTextConfig(**sizes, **lengths, num_hidden_layers=1, layer_types=[kind])
    attention, x = inkling.InklingAttention(config, layer_idx=0), torch.randn(2, LENGTH, 24)
    theirs = attended(attention, x)
    extent, temperature_length = (13, 11) if kind == "hybrid" else (9, None)
    ours = LearnedRelativeBias(SHAPE, 5, extent, temperature_length)
    ours.weights.data, ours.curves.data = attention.r_proj.weight.data, attention.rel_logits_proj.proj.data
    at, seen = TokenPositions.arange(LENGTH), torch.ones(LENGTH, LENGTH, dtype=torch.bool).tril()
    expected = theirs["query"] @ theirs["key"].mT + theirs["position_bias"]
    tau = 1.0 if temperature_length is None else 1 + 0.1 * ((at.rows + 1) / 11).clamp(min=1).log()[:, None]
    s = theirs["query"] @ theirs["key"].mT / tau
    got = ours.modify_scores(s, s, s, QueryKeyBlock(at, at, seen, ours.token_state(x, at, None)))
    torch.testing.assert_close(got.tril(), expected.tril(), atol=1e-5, rtol=1e-5)

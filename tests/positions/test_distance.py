"""ALiBi, T5 and Sandwich against published code."""

import math

import pytest
import torch

from kerple.positions import T5, ALiBi, Sandwich, Shape
from kerple.positions.t5 import t5_bucket


def shape(heads: int) -> Shape:
    return Shape(8 * heads, heads, 64)


@pytest.mark.parametrize("heads", [1, 2, 8, 12, 16, 20])
def test_alibi_has_the_slopes_of_bloom_and_mpt(heads: int) -> None:
    bloom = pytest.importorskip("transformers.models.bloom.modeling_bloom")
    mpt = pytest.importorskip("transformers.models.mpt.modeling_mpt")
    length = 50
    mask = torch.ones(1, length, dtype=torch.int64)
    by_bloom = bloom.build_alibi_tensor(mask, heads, torch.float32).view(heads, length)
    by_mpt = mpt.build_mpt_alibi_tensor(heads, length).view(heads, length)
    ours = ALiBi(shape(heads)).bias(torch.arange(length).float())

    torch.testing.assert_close(ours.flip(-1), by_bloom - by_bloom[:, -1:], atol=1e-4, rtol=1e-5)
    torch.testing.assert_close(ours.flip(-1), by_mpt, atol=1e-4, rtol=1e-5)


def test_alibi_slopes_for_twelve_heads_are_the_published_ones() -> None:
    eight = [2.0**-i for i in range(1, 9)]
    between = [2**-0.5, 2**-1.5, 2**-2.5, 2**-3.5]

    assert ALiBi(shape(12)).slopes.tolist() == pytest.approx(eight + between)


def test_learnable_slopes_start_at_alibis_and_never_turn_negative() -> None:
    fixed, learnable = ALiBi(shape(12)), ALiBi(shape(12), learnable=True)
    torch.testing.assert_close(learnable.bias(torch.arange(9).float()), fixed.bias(torch.arange(9).float()))
    assert [p.shape for p in learnable.parameters()] == [(12,)]

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


def test_t5_bias_is_that_of_transformers() -> None:
    t5 = pytest.importorskip("transformers.models.t5.modeling_t5")
    config = pytest.importorskip("transformers").T5Config(
        d_model=96, num_heads=12, d_kv=8, is_decoder=True, relative_attention_num_buckets=32
    )
    theirs = t5.T5Attention(config, has_relative_attention_bias=True, layer_idx=0)
    ours = T5(shape(12))
    ours.table.data = theirs.relative_attention_bias.weight.data.T.clone()
    distance = torch.arange(300)[:, None] - torch.arange(300)
    expected = theirs.compute_bias(300, 300)[0]  # (H, 300, 300)

    torch.testing.assert_close(
        ours.bias(torch.arange(300).float())[:, distance.clamp(min=0)].tril(), expected.tril(), atol=1e-6, rtol=0
    )


@pytest.mark.parametrize("heads", [8, 12])
def test_sandwich_is_that_of_attn_gym(heads: int) -> None:
    package = pytest.importorskip("attn_gym.mods.sandwich")
    mod = package.generate_sandwich_bias(heads, 2000)
    ours = Sandwich(shape(heads)).bias(torch.arange(2000).float())

    for distance in (0, 1, 2, 63, 511, 1999):
        for head in range(heads):
            expected = mod(
                torch.zeros(()), torch.tensor(0), torch.tensor(head), torch.tensor(distance), torch.tensor(0)
            )
            torch.testing.assert_close(ours[head, distance], expected, atol=1e-4, rtol=1e-4)


def test_sandwich_is_its_formula() -> None:
    ours = Sandwich(shape(4), size=128).bias(torch.arange(10).float())
    for head in range(4):
        for d in range(10):
            waves = sum(math.cos(d / 10000 ** (2 * i / 128)) for i in range(64))
            assert ours[head, d].item() == pytest.approx(waves * 4 / (8 * (head + 1)), rel=1e-5)

    with pytest.raises(ValueError, match="size: got 7"):
        Sandwich(shape(4), size=7)

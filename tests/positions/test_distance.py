"""ALiBi, T5 and Sandwich against published code and formulas."""

import math

import pytest
import torch

from kerple.positions import T5, ALiBi, Sandwich, Shape
from kerple.positions.t5 import t5_bucket


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
    ours = Sandwich(shape(4), size=128).bias(torch.arange(2000).float())
    for head in range(4):
        for d in (*range(10), 511, 1999):
            waves = sum(math.cos(d / 10000 ** (2 * i / 128)) for i in range(64))
            assert ours[head, d].item() == pytest.approx(waves * 4 / (8 * (head + 1)), rel=1e-5)

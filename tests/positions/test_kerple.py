"""KERPLE's kernels: formulas, ranges and initial values of the paper, positive definiteness, and sums."""

import math
from collections.abc import Callable
from functools import partial

import pytest
import torch
from torch import Tensor

from kerple.base.errors import UserError
from kerple.positions import KernelSum, KerpleBias3, KerpleLog, KerpleLog3, KerplePower, Sandwich, Shape, strategies
from kerple.positions.kernel_sum import is_conditionally_positive_definite

HEADS, LENGTH = 3, 300
SHAPE = Shape(24, HEADS, 64)
DISTANCES = torch.arange(LENGTH, dtype=torch.float32)

# upper end of random initial values, and largest value
U1, U2, EXPONENT = (1, 1e6), (2, 1e6), (2, 2)
# for each name: the paper's bias and weight at distance d in one head, and the ranges of the parameters
KERNELS: dict[str, tuple[Callable | None, Callable | None, dict[str, tuple[int, float]]]] = {
    "KerpleLog": (lambda d, r1, r2: -r1 * math.log(1 + r2 * d), None, {"r1": U2, "r2": U1}),
    "KerplePower": (lambda d, r1, r2: -r1 * d**r2, None, {"r1": U1, "r2": EXPONENT}),
    "KerpleLog3": (lambda d, r1, r2, r3: -r1 * math.log(1 + r2 * d**r3), None, {"r1": U2, "r2": U1, "r3": EXPONENT}),
    "KerpleBiasWeight": (
        lambda d, r1, r2, r3, r4: -r1 * d**r2,
        lambda d, r1, r2, r3, r4: math.exp(-r3 * d**r4),
        {"r1": U1, "r2": EXPONENT, "r3": U1, "r4": EXPONENT},
    ),
    "KerpleBias2": (lambda d, r1, r2: r1 * math.exp(-r2 * d**2), None, {"r1": U1, "r2": U1}),
    "KerpleBias3": (lambda d, r1, r2, r3: r1 * math.exp(-r2 * d**r3), None, {"r1": U1, "r2": U1, "r3": EXPONENT}),
    "KerpleWeight1": (None, lambda d, r1: math.exp(-r1 * d**2), {"r1": U1}),
    "KerpleWeight2": (None, lambda d, r1, r2: math.exp(-r1 * d**r2), {"r1": U1, "r2": EXPONENT}),
}
INITIAL_VALUES = {"r1": [0.4, 1.7, 0.02], "r2": [0.03, 0.9, 0.5], "r3": [0.3, 1.9, 1.0], "r4": [0.5, 0.05, 1.2]}
each_kernel = pytest.mark.parametrize("name", KERNELS)


@each_kernel
def test_bias_and_weight_are_the_papers_formulas(name: str) -> None:
    *formulas, ranges = KERNELS[name]
    values = {r: INITIAL_VALUES[r] for r in ranges}
    position = strategies()[name](SHAPE, **values)
    tables = position.bias(DISTANCES), position.score_scale(DISTANCES)
    for table, formula in zip(tables, formulas, strict=True):
        if formula is None:
            assert table is None
            continue
        expected = [[formula(d, *(r[h] for r in values.values())) for d in range(LENGTH)] for h in range(HEADS)]
        torch.testing.assert_close(table.double(), torch.tensor(expected).double(), atol=1e-4, rtol=1e-5)
        table.sum().backward()  # the gradient of d^r, d^r · log(d), must be finite at distance 0
    assert all(parameter.grad.isfinite().all() for parameter in position.parameters())


@each_kernel
def test_random_initial_values_fill_the_papers_ranges_and_constraints_are_its_bounds(name: str) -> None:
    position, ranges = strategies()[name](Shape(4000, 4000, 64)), KERNELS[name][2]
    assert {r for r, _ in position.named_parameters()} == set(ranges)
    for r, (upper_end, _) in ranges.items():
        values = getattr(position, r).detach()
        assert 0.01 <= values.min() < 0.02 * upper_end + 0.01
        assert 0.98 * upper_end < values.max() <= upper_end
        assert abs(values.mean() - upper_end / 2) < 0.05 * upper_end
    for value in (-math.inf, -3.0, 50.0, math.inf):
        for parameter in position.parameters():
            parameter.data.fill_(value)
        position.constrain_()
        for r, values in position.named_parameters():
            assert values.unique().tolist() == pytest.approx([0.01 if value < 0 else min(value, ranges[r][1])])
        for table in (position.bias(DISTANCES[:20] * 5e4), position.score_scale(DISTANCES[:20] * 5e4)):
            assert table is None or table.isfinite().all()


def test_initial_values_are_set_and_invalid_ones_are_errors() -> None:
    position = KerpleLog(SHAPE, r1=0.5, r2=[0.1, 0.2, 0.3], floor=0.05)
    assert position.r1.tolist() == pytest.approx([0.5] * 3)
    assert position.r2.tolist() == pytest.approx([0.1, 0.2, 0.3])
    position.r1.data.fill_(0.0)
    position.constrain_()
    assert position.r1.tolist() == pytest.approx([0.05] * 3)
    for options in ({"r1": [1.0, 2.0]}, {"r1": float("nan")}, {"floor": 0.0}, {"floor": 5.0}):
        with pytest.raises(UserError, match=r"(r1|floor): got"):
            KerplePower(SHAPE, **options)


EVEN = torch.arange(40.0)
RANDOM = torch.rand(40, generator=torch.Generator().manual_seed(0)).double() * 200
ON_A_PLANE = torch.rand(40, 2, generator=torch.Generator().manual_seed(1)).double() * 30
EXPONENTS = [0.01, 0.3, 1.0, 1.5, 1.9, 2.0]

DEFINITE = {
    "power, every exponent": partial(KerplePower, r1=0.7, r2=EXPONENTS),
    "log": KerpleLog,
    "log, every exponent": partial(KerpleLog3, r1=1.5, r2=0.8, r3=EXPONENTS),
    "Gaussian, every exponent": partial(KerpleBias3, r1=0.5, r2=0.05, r3=EXPONENTS),
    "sum": partial(KernelSum, kernels=[KerplePower, KerpleLog, KerpleBias3], factors=[0.5, 1.0, 3.0]),
}


@pytest.mark.parametrize("points", [EVEN, RANDOM, ON_A_PLANE], ids=["even", "random", "plane"])
def test_kernels_are_conditionally_positive_definite_and_an_exponent_above_two_is_not(points: Tensor) -> None:
    for name, kernel in DEFINITE.items():
        assert is_conditionally_positive_definite(kernel(Shape(24, 6, 32)).bias, points), name
    exponents = torch.tensor([1.0, 2.5, 1.5])[:, None]  # one head with an invalid exponent is enough
    assert not is_conditionally_positive_definite(lambda d: -(d**exponents), points)
    assert not is_conditionally_positive_definite(lambda d: 1 / d, points)  # infinite at 0


def test_kernel_sum_adds_multiples_of_biases() -> None:
    kernels = [partial(KerpleLog, r1=0.5, r2=0.25), partial(KerplePower, r1=1.0, r2=0.5)]
    d = torch.tensor([0.0, 1.0, 2.0, 7.0, 1000.0])
    expected = -torch.log(1 + 0.25 * d) - 0.5 * d.sqrt()
    torch.testing.assert_close(KernelSum(SHAPE, kernels, factors=[2.0, 0.5]).bias(d), expected.expand(HEADS, -1))
    KernelSum(SHAPE, [Sandwich])  # is definite, but not if it is rounded to fp32

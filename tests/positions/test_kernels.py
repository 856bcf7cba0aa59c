"""What KERPLE's paper says of kernels (conditionally positive definite), checked numerically, and sums of them."""

from functools import partial

import pytest
import torch
from torch import Tensor

from kerple.base.errors import UserError
from kerple.positions import FIRE, ALiBi, KernelSum, KerpleBias3, KerpleLog, KerpleLog3, KerplePower, Shape
from kerple.positions.kernels import is_conditionally_positive_definite

HEADS = 6
SHAPE = Shape(24, HEADS, 32)
EVEN = torch.arange(40.0)
SCATTERED = torch.rand(40, generator=torch.Generator().manual_seed(0)).double() * 200
ON_A_PLANE = torch.rand(40, 2, generator=torch.Generator().manual_seed(1)).double() * 30
EXPONENTS = [0.01, 0.3, 1.0, 1.5, 1.9, 2.0]

KERNELS = {
    "power, every exponent": partial(KerplePower, r1=0.7, r2=EXPONENTS),
    "log": KerpleLog,
    "log, every exponent": partial(KerpleLog3, r1=1.5, r2=0.8, r3=EXPONENTS),
    "Gaussian, every exponent": partial(KerpleBias3, r1=0.5, r2=0.05, r3=EXPONENTS),
    "sum": partial(KernelSum, kernels=[KerplePower, KerpleLog, KerpleBias3], factors=[0.5, 1.0, 3.0]),
}


@pytest.mark.parametrize("points", [EVEN, SCATTERED, ON_A_PLANE], ids=["even", "scattered", "plane"])
def test_kernels_are_conditionally_positive_definite_and_an_exponent_above_two_is_not(points: Tensor) -> None:
    for name, kernel in KERNELS.items():
        assert is_conditionally_positive_definite(kernel(SHAPE).bias, points), name
    exponents = torch.tensor([1.0, 2.5, 1.5])[:, None]  # one bad head is enough
    assert not is_conditionally_positive_definite(lambda d: -(d**exponents), points)


def test_a_sum_is_the_sum_of_multiples() -> None:
    kernels = [partial(KerpleLog, r1=0.5, r2=0.25), partial(KerplePower, r1=1.0, r2=0.5)]
    d = torch.tensor([0.0, 1.0, 2.0, 7.0, 1000.0])
    expected = -torch.log(1 + 0.25 * d) - 0.5 * d.sqrt()
    torch.testing.assert_close(KernelSum(SHAPE, kernels, factors=[2.0, 0.5]).bias(d), expected.expand(HEADS, 5))


class Growing(ALiBi):
    def bias(self, distance: Tensor) -> Tensor:
        return -super().bias(distance)


def test_what_no_sum_of_kernels_can_be_is_refused() -> None:
    for kernels, factors in (([FIRE], None), ([KerpleLog], [-1.0]), ([KerpleLog, Growing], None)):
        with pytest.raises(UserError, match=r"KernelSum: (kernels|factors): got"):
            KernelSum(SHAPE, kernels, factors)

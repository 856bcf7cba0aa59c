"""What KERPLE's paper claims of its kernels (conditionally positive definite), checked numerically on points."""

import inspect

import pytest
import torch
from torch import Tensor

from kerple.positions import kernels
from kerple.positions.kernels import (
    Gaussian,
    Kernel,
    Log,
    Power,
    Scaled,
    Sum,
    is_conditionally_positive_definite,
    positive_definite_offset,
)

HEADS = 6
EVEN = torch.arange(40.0)
SCATTERED = torch.rand(40, generator=torch.Generator().manual_seed(0)).double() * 200
ON_A_PLANE = torch.rand(40, 2, generator=torch.Generator().manual_seed(1)).double() * 30

CLAIMING = {
    "Power": lambda: Power(HEADS),
    "Power, every exponent": lambda: Power(HEADS, 0.7, [0.01, 0.3, 1.0, 1.5, 1.9, 2.0]),
    "Log": lambda: Log(HEADS),
    "Log, every exponent": lambda: Log(HEADS, 1.5, 0.8, [0.01, 0.3, 1.0, 1.5, 1.9, 2.0], True),
    "Gaussian": lambda: Gaussian(HEADS),
    "Gaussian, every exponent": lambda: Gaussian(HEADS, 0.05, [0.01, 0.3, 1.0, 1.5, 1.9, 2.0], True),
    "Sum": lambda: Sum(HEADS, [Log, Power]),
    "Scaled": lambda: Scaled(HEADS, Log, learn=True),
    "written out": lambda: 0.5 * Power(HEADS) + Log(HEADS) + Gaussian(HEADS) * 3.0,
}
on_points = pytest.mark.parametrize("points", [EVEN, SCATTERED, ON_A_PLANE], ids=["even", "scattered", "plane"])


@on_points
@pytest.mark.parametrize("made", CLAIMING)
def test_a_kernel_that_claims_to_be_cpd_is(made: str, points: Tensor) -> None:
    torch.manual_seed(0)
    for _ in range(3):
        kernel = CLAIMING[made]()
        assert kernel.conditionally_positive_definite
        assert is_conditionally_positive_definite(kernel, points)


@on_points
@pytest.mark.parametrize("made", [made for made in CLAIMING if made != "Power, every exponent"])
def test_the_offset_makes_it_positive_semi_definite_and_half_of_it_does_not(made: str, points: Tensor) -> None:
    torch.manual_seed(0)
    kernel = CLAIMING[made]()
    offset = positive_definite_offset(kernel, points)

    places = points.double().reshape(len(points), -1)
    distance = torch.cdist(places, places)
    with torch.no_grad():
        gram = kernel(distance.flatten()).double().unflatten(-1, distance.shape)
    allowed = 1e-8 * gram.abs().max()
    assert torch.linalg.eigvalsh(gram + offset).min() >= -allowed
    if offset > 1:
        assert torch.linalg.eigvalsh(gram + offset / 2).min() < 0


def test_every_kernel_of_the_package_that_claims_to_be_cpd_is_tested() -> None:
    found = {name for name, value in vars(kernels).items() if inspect.isclass(value) and issubclass(value, Kernel)}

    assert found - {"Kernel"} <= {made.split(",")[0] for made in CLAIMING}


@on_points
def test_an_exponent_above_two_is_not_cpd(points: Tensor) -> None:
    def too_steep(distance: Tensor) -> Tensor:
        return -(distance**2.5)

    assert not is_conditionally_positive_definite(too_steep, points)
    with pytest.raises(ValueError, match=r"no offset up to .* expected a conditionally positive definite kernel"):
        positive_definite_offset(too_steep, points)


def test_minus_the_squared_distance_is_cpd_and_has_no_offset() -> None:
    # v = (1, -2, 1) on 0, 1, 2: v·Kv = 0 and v·K1 = -6, so v + ε1 gives -12ε + O(ε²) whatever is added to K
    limit = Power(HEADS, 0.5, 2.0)

    assert is_conditionally_positive_definite(limit, EVEN)
    with pytest.raises(ValueError, match="no offset"):
        positive_definite_offset(limit, EVEN)
    assert positive_definite_offset(Power(HEADS, 0.5, 1.9), EVEN) >= 1


def test_one_bad_head_is_enough() -> None:
    exponents = torch.tensor([1.0, 2.5, 1.5])

    assert not is_conditionally_positive_definite(lambda d: -(d ** exponents[:, None]), SCATTERED)


@pytest.mark.parametrize(
    ("function", "expected"),
    [
        (lambda d: -d, True),
        (lambda d: d, False),  # minus a CPD kernel
        (lambda d: torch.cos(d), True),  # positive definite by Bochner's theorem
        (lambda d: -torch.cos(d), False),
        (lambda d: torch.zeros_like(d) - 7.0, True),  # a constant is centred away, whatever its sign
        (lambda d: (d < 1.5).double() - (d >= 1.5).double() * d.clamp(max=3), False),
    ],
)
def test_the_check_agrees_with_theory(function, expected: bool) -> None:
    assert is_conditionally_positive_definite(function, EVEN) is expected


def test_the_offset_of_the_negative_distance_of_two_points_is_known() -> None:
    # [[c, c - d], [c - d, c]] has eigenvalues d and 2c - d
    points = torch.tensor([0.0, 20.0])

    assert positive_definite_offset(lambda d: -d, points) == 16.0


def test_kernels_are_their_formulas() -> None:
    distance = torch.tensor([0.0, 1.0, 2.0, 7.0, 1000.0], dtype=torch.float64)
    cases = [
        (Power(1, 0.5, 1.5), lambda d: -0.5 * d**1.5),
        (Power(1, 0.5, learn_exponent=False), lambda d: -0.5 * d),
        (Log(1, 0.5, 0.25), lambda d: -0.5 * (1 + 0.25 * d).log()),
        (Log(1, 0.5, 0.25, 1.5), lambda d: -0.5 * (1 + 0.25 * d**1.5).log()),
        (Gaussian(1, 0.25), lambda d: (-0.25 * d**2).exp()),
        (Gaussian(1, 0.25, 0.5, True), lambda d: (-0.25 * d**0.5).exp()),
        (2.0 * Power(1, 0.5, 0.5) + Log(1, 0.5, 0.25), lambda d: -(d**0.5) - 0.5 * (1 + 0.25 * d).log()),
        (Scaled(1, lambda h: Gaussian(h, 0.25), 3.0, learn=True), lambda d: 3 * (-0.25 * d**2).exp()),
    ]
    for kernel, formula in cases:
        torch.testing.assert_close(kernel(distance).double(), formula(distance)[None], atol=1e-6, rtol=1e-6)


def test_what_is_learned_is_what_was_asked_for() -> None:
    def learned(kernel: Kernel) -> list[str]:
        return sorted(name for name, _ in kernel.named_parameters())

    assert learned(Power(2)) == ["exponent", "strength"]
    assert learned(Power(2, learn_exponent=False)) == ["strength"]
    assert learned(Log(2)) == ["rate", "strength"]
    assert learned(Log(2, learn_exponent=True)) == ["exponent", "rate", "strength"]
    assert learned(Gaussian(2)) == ["rate"]
    assert learned(2.0 * Gaussian(2)) == ["kernel.rate"]
    assert learned(Scaled(2, Gaussian, learn=True)) == ["factor", "kernel.rate"]
    assert learned(Log(2) + Log(2)) == ["kernels.0.rate", "kernels.0.strength", "kernels.1.rate", "kernels.1.strength"]


def test_constraints_reach_kernels_inside_kernels() -> None:
    kernel = 2.0 * Power(2) + Scaled(2, Log, learn=True, floor=0.1)
    for parameter in kernel.parameters():
        parameter.data.fill_(-5.0)
    kernel.constrain_()

    assert {name: p.data.unique().tolist() for name, p in kernel.named_parameters()} == {
        "kernels.0.kernel.strength": pytest.approx([0.01]),
        "kernels.0.kernel.exponent": pytest.approx([0.01]),
        "kernels.1.factor": pytest.approx([0.1]),
        "kernels.1.kernel.strength": pytest.approx([0.01]),
        "kernels.1.kernel.rate": pytest.approx([0.01]),
    }


def test_the_gradient_at_distance_zero_is_finite() -> None:
    for kernel in (Power(3), Log(3, learn_exponent=True), Gaussian(3, learn_exponent=True)):
        kernel(torch.arange(5.0)).sum().backward()
        assert all(p.grad.isfinite().all() for p in kernel.parameters())


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Power(4, strength=[1.0, 2.0]), "strength: got 2 starting values, expected 1 or 4"),
        (lambda: Power(4, exponent=2.5), "exponent: got a start of 2.5, expected numbers from 0.01 to 2"),
        (lambda: Log(4, rate=-1.0), "rate: got a start of -1.0"),
        (lambda: Log(4, strength=float("nan")), "strength: got a start of nan"),
        (lambda: Gaussian(4, floor=0.0), "floor: got 0.0, expected a positive number"),
        (lambda: -1.0 * Power(4), "factor: got a start of -1.0"),
        (lambda: Sum(4, []), "kernels: got none"),
        (lambda: Power(4) + Power(2), "heads: got kernels of 4 and 2 heads"),
    ],
)
def test_what_no_kernel_can_be_is_refused(make, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make()

"""FIRE against the network as the paper writes it, number by number."""

import math

import pytest
import torch

from kerple.positions import FIRE, QueryKeyBlock, Shape, TokenPositions

SHAPE = Shape(24, 3, 64)


def perturbed(**options: float) -> FIRE:
    torch.manual_seed(0)
    fire = FIRE(SHAPE, **options)
    fire.c.data.fill_(0.37)
    fire.threshold_scale.data.fill_(1.1)
    return fire


def added(fire: FIRE, queries: int, keys: int, first: int = 0) -> torch.Tensor:
    """What is added to scores of 0; (1, 3, queries, keys)."""
    q = torch.zeros(1, 3, queries, 8, dtype=torch.float64)
    k = torch.zeros(1, 3, keys, 8, dtype=torch.float64)
    at = TokenPositions.line(keys, first)
    seen = torch.ones(queries, keys, dtype=torch.bool).tril(keys - queries)
    return fire.modify_scores(q @ k.mT, q, k, QueryKeyBlock(at[keys - queries :], at, seen))


@pytest.mark.parametrize("first", [0, 200])  # below the threshold the distance alone counts, above it m does too
def test_fire_is_a_double_loop_in_fp64(first: int) -> None:
    fire = perturbed(threshold=100.0).double()
    where = first + torch.arange(30)
    got = added(fire, 10, 30, first)

    def psi(x: float) -> float:
        return math.log(fire.c.item() * x + 1)

    for i, m in enumerate(where[20:].tolist()):
        for j, n in enumerate(where.tolist()):
            if n > m:
                continue
            x = psi(m - n) / psi(max(fire.threshold_scale.item() * 100.0, m))
            expected = fire.mlp(torch.tensor([x], dtype=torch.float64))
            torch.testing.assert_close(got[0, :, i, j], expected)


def test_gradients_are_those_of_the_network_as_written() -> None:
    fire = perturbed(threshold=12.0).double()
    where = torch.arange(40)
    out = torch.randn(3, 40, 40, dtype=torch.float64).tril()
    names = [name for name, _ in fire.named_parameters()]
    got = torch.autograd.grad((added(fire, 40, 40)[0] * out).sum(), fire.parameters())

    distance = (where[:, None] - where).clamp(min=0)
    reach = torch.maximum(fire.threshold_scale * 12.0, where)
    x = torch.log(fire.c * distance + 1) / torch.log(fire.c * reach + 1)[:, None]
    plain = fire.mlp(x[..., None]).movedim(-1, 0)  # (H, T, T)
    expected = torch.autograd.grad((plain * out).sum(), fire.parameters())

    for name, a, b in zip(names, got, expected, strict=True):
        torch.testing.assert_close(a, b, msg=lambda m, name=name: f"{name}: {m}")


def test_dead_and_flat_units_are_pieces_too() -> None:
    fire = perturbed(threshold=12.0).double()
    first = fire.mlp[0]
    first.weight.data[:4] = 0.0  # constants, on or off
    first.bias.data[:4] = torch.tensor([1.0, -1.0, 0.0, 2.0])
    first.weight.data[4:6], first.bias.data[4:6] = 0.5, -0.25  # two knots in one place
    x = torch.linspace(0, 1, 501, dtype=torch.float64)
    slope, intercept, knots = fire._pieces()
    piece = torch.bucketize(x, knots)

    torch.testing.assert_close(slope[:, piece] * x + intercept[:, piece], fire.mlp(x[:, None]).T)


def test_ranges() -> None:
    fire = FIRE(SHAPE, threshold=100.0)
    fire.c.data.fill_(-1.0)
    fire.threshold_scale.data.fill_(-1.0)
    fire.constrain_()

    assert fire.c.item() == pytest.approx(1e-3)
    assert fire.threshold_scale.item() * fire.threshold == pytest.approx(1.0)

"""FIRE against the network as the paper writes it, number by number."""

import pytest
import torch

from kerple.positions import FIRE, QueryKeyBlock, Shape, TokenPositions

SHAPE = Shape(24, 3, 64)


def perturbed(threshold: float) -> FIRE:
    torch.manual_seed(0)
    fire = FIRE(SHAPE, threshold=threshold).double()
    fire.c.data.fill_(0.37)
    fire.threshold_scale.data.fill_(1.1)
    return fire


@pytest.mark.parametrize("offset", [0, 200])  # below the threshold the distance alone counts, above it m does too
def test_fire_and_its_gradients_are_those_of_a_double_loop_in_fp64(offset: int) -> None:
    fire, at = perturbed(100.0), TokenPositions.line(30, offset)
    seen = torch.ones(10, 30, dtype=torch.bool).tril(20)
    scores = torch.zeros(1, 3, 10, 30, dtype=torch.float64)
    bias = fire.modify_scores(scores, scores, scores, QueryKeyBlock(at[20:], at, seen))[0]

    def psi(x: int | torch.Tensor) -> torch.Tensor:
        return torch.log(fire.c * x + 1)

    expected = torch.zeros_like(bias)
    for i, m in enumerate(range(offset + 20, offset + 30)):
        for j, n in enumerate(range(offset, m + 1)):
            x = psi(m - n) / psi(torch.clamp(fire.threshold_scale * 100.0, min=m))
            expected[:, i, j] = fire.mlp(x)
    torch.testing.assert_close(bias * seen, expected)
    grad = torch.randn_like(bias) * seen
    ours, theirs = (torch.autograd.grad(x, list(fire.parameters()), grad) for x in (bias, expected))
    for (name, _), a, b in zip(fire.named_parameters(), ours, theirs, strict=True):
        torch.testing.assert_close(a, b, msg=lambda message, name=name: f"{name}: {message}")


def test_dead_and_flat_units_are_pieces_too() -> None:
    fire = perturbed(12.0)
    first = fire.mlp[0]
    first.weight.data[:4] = 0.0  # constants, on or off
    first.bias.data[:4] = torch.tensor([1.0, -1.0, 0.0, 2.0])
    first.weight.data[4:6], first.bias.data[4:6] = 0.5, -0.25  # two knots in one place
    x = torch.linspace(0, 1, 501, dtype=torch.float64)
    slope, intercept, knots = fire._pieces()
    piece = torch.bucketize(x, knots)
    torch.testing.assert_close(slope[:, piece] * x + intercept[:, piece], fire.mlp(x[:, None]).T)

"""Sinusoid and learned table."""

import math

import pytest
import torch

from kerple.base.errors import UserError
from kerple.positions import Learned, Shape, Sinusoidal, TokenPositions

SHAPE = Shape(12, 2, 10)


def test_the_sinusoid_is_the_papers() -> None:
    positions = torch.tensor([0, 1, 7, 511, 40_000])
    at = TokenPositions(torch.arange(5), positions, contiguous=False)
    waves = Sinusoidal(SHAPE).embed(torch.zeros(1, 5, 12), at)[0]
    for row, t in zip(waves, positions.tolist(), strict=True):
        for i in range(6):
            angle = t / 10000 ** (2 * i / 12)
            assert row[2 * i].item() == pytest.approx(math.sin(angle), abs=1e-6)
            assert row[2 * i + 1].item() == pytest.approx(math.cos(angle), abs=1e-6)
    x = torch.randn(1, 5, 12)
    torch.testing.assert_close(Sinusoidal(SHAPE).embed(x, at) - x, waves[None])
    torch.testing.assert_close(Sinusoidal(SHAPE, scaled=True).embed(x, at) - x * 12**0.5, waves[None])
    assert Sinusoidal(SHAPE).embed(x.bfloat16(), at).dtype == torch.bfloat16


def test_past_the_table_is_an_error_the_last_row_or_a_squeezed_input() -> None:
    def embedded(learned: Learned, *positions: int) -> torch.Tensor:
        at = TokenPositions(torch.arange(len(positions)), torch.tensor(positions), False)
        return learned.embed(torch.zeros(1, len(positions), 12), at)[0].detach()

    learned = {beyond: Learned(SHAPE, beyond) for beyond in ("error", "clamp", "interpolate")}
    with pytest.raises(UserError, match=r"got 10, but Learned has 10 rows.*beyond: clamp or beyond: interpolate"):
        embedded(learned["error"], 9, 10)
    assert [position.max_length for position in learned.values()] == [10, None, None]
    rows = learned["clamp"].table.detach()
    torch.testing.assert_close(embedded(learned["clamp"], 8, 9, 10, 900), rows[[8, 9, 9, 9]])
    rows, squeezed = learned["interpolate"].table.detach(), embedded(learned["interpolate"], *range(19))
    torch.testing.assert_close(squeezed[::2], rows)  # position 18 is row 9, so every position is half a row
    torch.testing.assert_close(squeezed[1::2], (rows[1:] + rows[:-1]) / 2)

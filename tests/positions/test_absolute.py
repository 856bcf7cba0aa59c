"""Sinusoid and learned table."""

import math

import pytest
import torch

from kerple.model import Transformer
from kerple.positions import Learned, Shape, Sinusoidal, TokenPositions

SHAPE = Shape(12, 2, 10)


def test_the_sinusoid_is_the_papers() -> None:
    positions = torch.tensor([0, 1, 7, 511, 40_000])
    got = Sinusoidal(SHAPE).embed(torch.zeros(1, 5, 12), TokenPositions(torch.arange(5), positions, contiguous=False))[
        0
    ]

    for row, t in zip(got, positions.tolist(), strict=True):
        for i in range(6):
            angle = t / 10000 ** (2 * i / 12)
            assert row[2 * i].item() == pytest.approx(math.sin(angle), abs=1e-6)
            assert row[2 * i + 1].item() == pytest.approx(math.cos(angle), abs=1e-6)


def test_it_is_added_to_the_embeddings_in_their_dtype() -> None:
    x = torch.randn(2, 3, 12)
    where = TokenPositions.line(3)
    added = Sinusoidal(SHAPE).embed(x, where)

    torch.testing.assert_close(added - x, Sinusoidal(SHAPE).embed(torch.zeros(2, 3, 12), where))
    torch.testing.assert_close(Sinusoidal(SHAPE, scaled=True).embed(x, where) - added, x * (12**0.5 - 1))
    assert Sinusoidal(SHAPE).embed(x.bfloat16(), where).dtype == torch.bfloat16


def table(beyond: str) -> tuple[Learned, torch.Tensor]:
    learned = Learned(SHAPE, beyond=beyond)
    return learned, learned.table.detach()


def test_only_the_first_layer_has_a_table() -> None:
    network = Transformer(SHAPE, 3, 20, Learned, per_layer=True)
    assert len(network.positions) == 3
    assert [name for name, _ in network.positions.named_parameters()] == ["0.table"]
    network(torch.randint(20, (1, 10))).sum().backward()
    assert all(p.grad is not None for p in network.parameters())


def embedded(learned: Learned, *positions: int) -> torch.Tensor:
    return learned.embed(
        torch.zeros(1, len(positions), 12), TokenPositions(torch.arange(len(positions)), torch.tensor(positions), False)
    )[0].detach()


def test_past_the_table_an_error_says_what_the_policies_are() -> None:
    learned, _ = table("error")

    with pytest.raises(ValueError, match=r"got 10, but Learned has 10 rows.*beyond: clamp or beyond: interpolate"):
        embedded(learned, 9, 10)
    assert learned.max_length == 10
    assert table("clamp")[0].max_length is None


def test_clamp_repeats_the_last_row() -> None:
    learned, rows = table("clamp")

    torch.testing.assert_close(embedded(learned, 8, 9, 10, 900), rows[[8, 9, 9, 9]])


def test_interpolate_squeezes_a_long_input_into_the_table() -> None:
    learned, rows = table("interpolate")
    got = embedded(learned, *range(19))  # 18 -> 9, so every position is half a row

    torch.testing.assert_close(got[::2], rows)
    torch.testing.assert_close(got[1::2], (rows[1:] + rows[:-1]) / 2)

"""RandomizedPositions: what it draws, when, and that any strategy sees the draw through every hook."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from kerple.attention.reference import attend_reference
from kerple.model.transformer import Transformer
from kerple.positions import Learned, Position, RandomizedPositions, RoPE, Shape, build, names

SHAPE = Shape(32, 4, 12)


def wrapped(name: str = "RoPE", **options: int) -> RandomizedPositions:
    torch.manual_seed(0)
    return RandomizedPositions(SHAPE, lambda s: build(name, dim=s.dim, heads=s.heads, length=s.length), **options)


def test_draws_are_ordered_distinct_and_within_reach() -> None:
    position = wrapped(reach=40)
    seen = set()
    for _ in range(200):
        drawn = position.drawn.tolist()
        assert len(drawn) == 12
        assert drawn == sorted(set(drawn))
        assert 0 <= drawn[0] <= drawn[-1] < 40
        seen.update(drawn)
        position.constrain_()
    assert seen == set(range(40))


def test_every_position_is_as_likely_as_any_other() -> None:
    position = wrapped(reach=24)
    counts = torch.zeros(24)
    for _ in range(1000):
        counts[position.drawn] += 1
        position.constrain_()

    # each is in half of the draws: mean 500, standard deviation 16
    assert (counts - 500).abs().max() < 5 * 16


def test_the_draw_depends_on_seed_and_step_alone() -> None:
    def draws(seed: int) -> list[list[int]]:
        torch.manual_seed(torch.initial_seed() + 1)
        position = RandomizedPositions(SHAPE, seed=seed)
        out = []
        for _ in range(3):
            out.append(position.drawn.tolist())
            torch.rand(7)
            position.constrain_()
        return out

    assert draws(1) == draws(1)
    assert draws(1) != draws(2)
    assert len({tuple(d) for d in draws(1)}) == 3


def test_it_resumes_from_the_checkpoint() -> None:
    position = wrapped()
    for _ in range(5):
        position.constrain_()
    saved = {name: tensor.clone() for name, tensor in position.state_dict().items()}
    resumed = wrapped()
    resumed.load_state_dict(saved)

    assert resumed.drawn.tolist() == position.drawn.tolist()
    position.constrain_()
    resumed.constrain_()
    assert resumed.drawn.tolist() == position.drawn.tolist()


def test_in_evaluation_it_is_the_wrapped_strategy() -> None:
    q, k = torch.randn(2, 1, 4, 12, 8)
    where = torch.arange(12)
    position = wrapped().eval()

    for got, expected in zip(position.rotate(q, k, where), RoPE(SHAPE).rotate(q, k, where), strict=True):
        torch.testing.assert_close(got, expected)
    assert not wrapped("ALiBi").eval().uses("scores")
    torch.testing.assert_close(wrapped("ALiBi").eval().bias(9), build("ALiBi", dim=32, heads=4, length=12).bias(9))


def attention(position: Position, q: Tensor, k: Tensor, v: Tensor, where: Tensor, table_rows: Tensor) -> Tensor:
    """Attention as the model does it, distances of a table read at ``table_rows`` (T, T) of it."""
    q, k = position.rotate(q, k, where)
    content = position.content(torch.ones(1, 12, 32).cumsum(1) / 12)

    def scores(q: Tensor, k: Tensor, rows: slice, columns: slice) -> Tensor:
        total = torch.zeros(1, 4, 12, 12)
        bias, weight = position.bias(1000), position.weight(1000)
        if bias is not None:
            total = total + bias[:, table_rows]
        if weight is not None:
            total = total + q @ k.mT * 8**-0.5 * (weight[:, table_rows] - 1)
        if position.uses("scores"):
            total = total + position.scores(q, k, where[rows], where[columns], content)
        return total

    def values(p: Tensor, rows: slice, columns: slice) -> Tensor:
        return position.values(p, where[rows], where[columns])

    return attend_reference(q, k, v, scores=scores, values=values if position.uses("values") else None)


@pytest.mark.parametrize("name", [name for name in names() if name not in ("RandomizedPositions",)])
def test_in_training_every_strategy_stands_where_was_drawn(name: str) -> None:
    position = wrapped(name, reach=60).train()
    inner = position.position
    torch.manual_seed(1)
    q, k, v = torch.randn(3, 1, 4, 12, 8)
    rows, drawn = torch.arange(12), position.drawn
    distance = (drawn[:, None] - drawn).clamp(min=0)

    got = attention(position, q, k, v, rows, torch.zeros(12, 12, dtype=torch.int64))
    expected = attention(inner, q, k, v, drawn, distance)
    torch.testing.assert_close(got, expected, atol=1e-5, rtol=1e-4)

    x = torch.randn(1, 12, 32)
    torch.testing.assert_close(position.embed(x, rows), inner.embed(x, drawn))
    assert position.bias(5) is None
    assert position.weight(5) is None


def test_a_network_trains_with_it_and_steps_move_the_draw(tiny_network: Callable[..., Transformer]) -> None:
    network = tiny_network("RandomizedPositions").train()
    tokens = torch.randint(0, 50, (1, 20))
    first, step = network(tokens), int(network.positions[0].step)
    torch.testing.assert_close(network(tokens), first)
    network.constrain_()

    assert not torch.allclose(network(tokens), first, atol=1e-4)
    assert int(network.positions[0].step) == step + 1


def test_a_learned_table_has_a_row_for_every_position_within_reach() -> None:
    position = RandomizedPositions(SHAPE, Learned, reach=50)

    assert position.position.table.shape == (50, 32)
    assert position.max_length == 50
    with pytest.raises(ValueError, match="reach: got 11, expected at least the training length 12"):
        RandomizedPositions(SHAPE, reach=11)


def test_inputs_longer_than_the_training_length_keep_their_order() -> None:
    position = wrapped(reach=60).train()
    places = position._places(torch.arange(100))

    assert (places.diff() > 0).all()
    assert places[:12].tolist() == position.drawn.tolist()

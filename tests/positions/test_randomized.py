"""Random positions: what is drawn, when, and that any strategy sees the draw through every hook."""

from collections.abc import Callable
from itertools import pairwise

import pytest
import torch

from kerple.model.transformer import Transformer
from kerple.positions import Coupled, Layers, RandomizedPositions, Shape, SSMax, Temperature, TokenPositions, strategies
from kerple.positions.wrapper import Drawing
from kerple.testing.subject import move

SHAPE = Shape(32, 4, 12)


def positions(position: RandomizedPositions, length: int) -> list[int]:
    at = position.remap_positions(TokenPositions.line(length, offset=7), torch.zeros(1, length)).positions.tolist()
    assert len(at) == length
    assert at == sorted(set(at))
    return at


def test_draws_are_ordered_distinct_and_of_the_whole_range() -> None:
    position, counts = RandomizedPositions(SHAPE, max_positions=40), torch.zeros(40)
    for _ in range(400):
        counts[position.drawn] += 1
        assert set(positions(position, 5)) < set(positions(position, 12)) == set(position.drawn.tolist())
        position.constrain_()
    # every position is as likely as any other: 12 of 40 are drawn, mean 120, standard deviation 9
    assert (counts - 120).abs().max() < 5 * 9


@pytest.mark.parametrize("length", [5, 12, 30])
def test_in_evaluation_positions_are_drawn_too_and_stay(length: int) -> None:
    """In section 3 of the paper positions of a test are drawn as those of training are."""
    position = RandomizedPositions(SHAPE, max_positions=400).eval()
    drawn = positions(position, length)
    assert length < drawn[-1] < 400
    assert max(b - a for a, b in pairwise(drawn)) > 1
    position.constrain_()
    assert positions(position, length) == drawn
    assert positions(RandomizedPositions(SHAPE, max_positions=400).eval(), length) == drawn
    assert positions(RandomizedPositions(SHAPE, max_positions=400, seed=1).eval(), length) != drawn


@pytest.mark.parametrize(("strategy", "buffer"), [(RandomizedPositions, "drawn"), (Coupled, "share")])
def test_draws_are_a_function_of_the_seed_and_the_steps_taken(strategy: type[Drawing], buffer: str) -> None:
    def draws(position: Drawing) -> list[object]:
        values = []
        for _ in range(5):
            values.append(getattr(position, buffer).tolist())
            torch.rand(7)  # other random numbers do not matter
            position.constrain_()
        return values

    position = strategy(SHAPE)
    before = draws(position)
    assert before == draws(strategy(SHAPE)) != draws(strategy(SHAPE, seed=1))
    assert all(a != b for a, b in pairwise(before))
    resumed = strategy(SHAPE)
    resumed.load_state_dict(position.state_dict())
    assert draws(resumed) == draws(position)


@pytest.mark.parametrize("name", ["FoX", "FIRE", "KerpleLog", "Learned", "RoPE"])
def test_in_training_a_strategy_stands_where_was_drawn(name: str, tiny_network: Callable[..., Transformer]) -> None:
    """The draw reaches every hook: with it, logits are those of explicit distances, read one pair at a time."""
    network = tiny_network("RandomizedPositions", length=12, position=strategies()[name], max_positions=60).train()
    tokens, wrapped = torch.randint(0, 50, (1, 12)), list(network.positions)
    logits = network(tokens)
    for i, position in enumerate(wrapped):
        network.positions[i] = position.position
    in_line = network(tokens)
    torch.testing.assert_close(move(network, wrapped[0].drawn.sort().values)(tokens), logits, atol=1e-5, rtol=1e-4)
    assert torch.allclose(logits, in_line, atol=1e-3) == (name == "FoX")  # it knows no positions


def test_windows_and_counts_of_keys_are_not_of_its_reach() -> None:
    shape = Shape(32, 4, 12, layers=4)
    assert RandomizedPositions(shape, Layers).window == 12
    assert RandomizedPositions(shape, Temperature).position.every == 12
    weights, plain = RandomizedPositions(shape, SSMax).position, SSMax(shape)
    torch.testing.assert_close(dict(weights.state_dict()), dict(plain.state_dict()))

"""RandomizedPositions: what it draws, when, and that any strategy sees the draw through every hook."""

from collections.abc import Callable
from dataclasses import replace
from itertools import pairwise

import pytest
import torch
from torch import Tensor

from kerple.base.errors import UserError
from kerple.model.transformer import Transformer
from kerple.positions import (
    Layers,
    Position,
    RandomizedPositions,
    Shape,
    SSMax,
    Temperature,
    TokenPositions,
    strategies,
)
from kerple.positions.base import FLAGS
from kerple.positions.wrapper import Wrapper

SHAPE = Shape(32, 4, 12)


def wrapped(name: str = "RoPE", **options: int) -> RandomizedPositions:
    torch.manual_seed(0)
    return RandomizedPositions(SHAPE, strategies()[name], **options)


def places(position: RandomizedPositions, length: int) -> list[int]:
    return position.remap_positions(TokenPositions.line(length, offset=7), torch.zeros(1, length)).positions.tolist()


@pytest.mark.parametrize("length", [5, 12])
def test_draws_are_ordered_distinct_and_of_the_whole_range(length: int) -> None:
    position, seen, counts = wrapped(reach=40), set(), torch.zeros(40)
    for _ in range(400):
        counts[position.drawn] += 1
        drawn = places(position, length)
        assert len(drawn) == length
        assert drawn == sorted(set(drawn))
        assert 0 <= drawn[0] <= drawn[-1] < 40
        seen.update(drawn)
        position.constrain_()
    assert seen == set(range(40))
    # every position is as likely as any other: 12 of 40 are drawn, mean 120, standard deviation 9
    assert (counts - 120).abs().max() < 5 * 9


@pytest.mark.parametrize("length", [5, 12, 30])
def test_in_evaluation_positions_are_drawn_too_and_stay(length: int) -> None:
    """In section 3 of the paper positions of a test are drawn as those of training are."""
    position = wrapped(reach=400).eval()
    drawn = places(position, length)
    assert len(drawn) == length
    assert drawn == sorted(set(drawn))
    assert length < drawn[-1] < 400
    assert max(b - a for a, b in pairwise(drawn)) > 1
    position.constrain_()
    assert places(position, length) == drawn
    assert places(wrapped(reach=400).eval(), length) == drawn
    assert places(wrapped(reach=400, seed=1).eval(), length) != drawn


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


class Apart(Wrapper):
    """Every position where it is told to be."""

    def __init__(self, position: Position, where: Tensor) -> None:
        super().__init__(position)
        self.where = where

    def remap_positions(self, at: TokenPositions, tokens: Tensor) -> TokenPositions:
        return replace(at, positions=self.where[at.rows], contiguous=False)


@pytest.mark.parametrize("name", ["FoX", "FIRE", "KerpleLog", "Learned", "RoPE", "TransformerXL"])
def test_in_training_a_strategy_stands_where_was_drawn(name: str, tiny_network: Callable[..., Transformer]) -> None:
    """The draw reaches every hook: with it, logits are those of explicit distances, read one pair at a time."""
    options = {"position": strategies()[name], "reach": 60}
    network = tiny_network("RandomizedPositions", length=12, **options).train()
    tokens, drawn = torch.randint(0, 50, (1, 12)), network.positions[0].drawn.sort().values
    got = network(tokens)
    for i, position in enumerate(network.positions):
        network.positions[i] = Apart(position.position, drawn)
    expected = network(tokens)
    network.eval()
    for i, position in enumerate(network.positions):
        network.positions[i] = position.position
    plain = network(tokens)

    torch.testing.assert_close(got, expected, atol=1e-5, rtol=1e-4)
    if name == "FoX":  # it knows no positions
        torch.testing.assert_close(got, plain, atol=1e-5, rtol=1e-4)
    else:
        assert (got - plain).abs().max() > 1e-3


def test_an_input_longer_than_its_reach_is_refused(tiny_network: Callable[..., Transformer]) -> None:
    network = tiny_network("RandomizedPositions", reach=40)
    network(torch.randint(0, 50, (1, 40)))
    with pytest.raises(UserError, match="RandomizedPositions ends at 39"):
        network(torch.randint(0, 50, (1, 41)))


def test_windows_and_counts_of_keys_are_not_of_its_reach() -> None:
    shape = Shape(32, 4, 12, layers=4)
    assert RandomizedPositions(shape, Layers).window == 12
    assert RandomizedPositions(shape, Temperature).position.every == 12
    weights, plain = RandomizedPositions(shape, SSMax).position, SSMax(shape)
    torch.testing.assert_close(dict(weights.state_dict()), dict(plain.state_dict()))


def test_a_wrapper_has_the_flags_of_what_it_wraps() -> None:
    inner = strategies()["NoPE"](SHAPE)
    flags = {
        "shift_invariant": None, "prefix_consistent": False, "per_layer": True, "differs": True,
        "window": 3, "max_length": 9,
    }  # fmt: skip
    assert flags.keys() == set(FLAGS)
    for flag, value in flags.items():
        setattr(inner, flag, value)
    outer = Apart(inner, torch.arange(3))
    assert {flag: getattr(outer, flag) for flag in FLAGS} == flags

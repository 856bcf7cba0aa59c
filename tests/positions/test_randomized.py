"""RandomizedPositions: what it draws, when, and that any strategy sees the draw through every hook."""

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from kerple.model.transformer import Transformer
from kerple.positions import ALiBi, At, Learned, Position, RandomizedPositions, Shape, names, strategies
from kerple.positions.wrapper import Wrapper

SHAPE = Shape(32, 4, 12)


def wrapped(name: str = "RoPE", **options: int) -> RandomizedPositions:
    torch.manual_seed(0)
    return RandomizedPositions(SHAPE, strategies()[name], **options)


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


def test_in_evaluation_it_is_the_wrapped_strategy(tiny_network: Callable[..., Transformer]) -> None:
    tokens = torch.randint(0, 50, (1, 20))
    wrapping, plain = tiny_network("RandomizedPositions", position=ALiBi), tiny_network("ALiBi")
    plain.load_state_dict(wrapping.state_dict(), strict=False)

    torch.testing.assert_close(wrapping(tokens), plain(tokens))


class Apart(Wrapper):
    """Every position where it is told to be."""

    def __init__(self, position: Position, where: Tensor) -> None:
        super().__init__(position)
        self.where = where

    def relocate(self, at: At, tokens: Tensor) -> At:
        return replace(at, positions=self.where[at.rows], contiguous=False)


@pytest.mark.parametrize("name", [name for name in names() if name not in ("RandomizedPositions", "Layers")])
def test_in_training_every_strategy_stands_where_was_drawn(name: str, tiny_network: Callable[..., Transformer]) -> None:
    """The draw reaches every hook: with it, logits are those of explicit distances, read one pair at a time."""
    options = {"position": strategies()[name], "reach": 60}
    network = tiny_network("RandomizedPositions", length=12, **options).train()
    tokens, drawn = torch.randint(0, 50, (1, 12)), network.positions[0].drawn
    got = network(tokens)
    for i, position in enumerate(network.positions):
        network.positions[i] = Apart(position.position, drawn)
    told = network(tokens)
    network.eval()
    for i, position in enumerate(network.positions):
        network.positions[i] = position.position
    plain = network(tokens)

    torch.testing.assert_close(got, told, atol=1e-5, rtol=1e-4)
    if name in (
        "NoPE",
        "CoPE",
        "FoX",
        "PaTH",
        "Sink",
        "SSMax",
        "StickBreaking",
        "Temperature",
    ):  # they know no positions
        torch.testing.assert_close(got, plain, atol=1e-5, rtol=1e-4)
    else:
        assert (got - plain).abs().max() > 1e-3


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
    places = position.relocate(At.line(100), torch.zeros(1, 100)).positions

    assert (places.diff() > 0).all()
    assert places[:12].tolist() == position.drawn.tolist()

"""What no strategy can have: an error of one line with the option, what was given, and what is expected."""

from collections.abc import Callable
from functools import partial

import pytest
import torch

from kerple import positions
from kerple.base.errors import UserError
from kerple.model import Transformer
from kerple.positions import ALiBi, KerpleLog, Layers, PaTH, PoPE, RandomizedPositions, Shape, Together, strategies
from kerple.positions.combination import OF_ONE_WIDTH

SHAPE = Shape(24, 3, 12, layers=4)
Build = Callable[[Shape], positions.Position]


def together(*parts: Build) -> Build:
    return partial(Together, parts=parts)


@pytest.mark.parametrize(
    ("strategy", "message"),
    [
        (partial(positions.CoPE, rows=1), "CoPE: rows: got 1, expected 2 or more"),
        # DAPE reads biases alone, so that it would see beyond the window
        (partial(positions.DAPE, over=partial(Layers, near=ALiBi, far=KerpleLog, window=8)), "DAPE: over: got Layers"),
        (partial(Layers, near=positions.Sinusoidal), "Layers: near: got Sinusoidal, expected a strategy that works in"),
        (partial(RandomizedPositions, max_positions=11), "RandomizedPositions: max_positions: got 11"),
        (partial(positions.RoPE, scaling="pi"), "RoPE: factor: got None, expected a number of 1 or more beside"),
        (together(partial(RandomizedPositions, position=PaTH), KerpleLog), "got KerpleLog beside PaTH"),
        (together(positions.FoX, PaTH), "got FoX beside PaTH"),
        *((together(PoPE, other), f"got {other.__name__} beside PoPE") for other in OF_ONE_WIDTH),
        (lambda _: Shape(32, 5, 16), "heads: got 5, which does not divide dim 32"),
        (lambda _: positions.build("Alibi", dim=32, heads=4, length=16), "got 'Alibi', expected one of ALiBi, .*XPos"),
    ],
)
def test_an_option_out_of_range_is_refused(strategy: Build, message: str) -> None:
    with pytest.raises(UserError, match=message):
        strategy(SHAPE)


def test_every_strategy_that_is_not_refused_beside_pope_works_with_its_wide_heads() -> None:
    for name in positions.names():
        if strategies()[name] not in OF_ONE_WIDTH and name != "RandomizedPositions":
            network = Transformer(Shape(32, 4, 24), 1, 50, together(PoPE, strategies()[name]), per_layer=True)
            assert network(torch.randint(50, (1, 9))).isfinite().all(), name


@pytest.mark.parametrize("window", [3, None])
def test_each_fourth_layer_has_the_far_strategy_and_no_window(window: int | None) -> None:
    network = Transformer(Shape(16, 2, 8), 8, 20, partial(Layers, near=ALiBi, far=KerpleLog, window=window))
    layers = [(type(p.position), p.window) for p in network.positions]
    assert layers == 2 * [*3 * [(ALiBi, window or 8)], (KerpleLog, None)]  # 8 is the training length


def test_one_strategy_for_all_layers_is_refused_where_they_differ() -> None:
    with pytest.raises(UserError, match=r"per_layer: got false, but \w+ has different strategies in different layers"):
        Transformer(Shape(16, 2, 8), 4, 20, together(positions.SSMax, Layers), per_layer=False)

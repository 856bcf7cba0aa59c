"""Layers that differ: which of them has which strategy, and what is refused."""

from functools import partial

import pytest

from kerple.base.errors import UserError
from kerple.model import Transformer
from kerple.positions import ALiBi, KerpleLog, Layers, NoPE, Shape, SSMax, Together

SHAPE = Shape(16, 2, 8)


def test_each_fourth_layer_has_the_far_strategy_and_no_window() -> None:
    network = Transformer(SHAPE, 8, 20, partial(Layers, near=ALiBi, far=KerpleLog, window=3))
    found = [(type(p.position), p.window) for p in network.positions]
    assert found == 2 * [*3 * [(ALiBi, 3)], (KerpleLog, None)]


def test_the_training_length_is_the_window_where_none_is_given() -> None:
    assert [p.window for p in Transformer(SHAPE, 4, 20, Layers).positions] == [8, 8, 8, None]


@pytest.mark.parametrize("strategy", [Layers, partial(Together, parts=[SSMax, Layers])])
def test_one_strategy_for_all_layers_is_refused_where_they_differ(strategy: object) -> None:
    with pytest.raises(UserError, match=r"per_layer: got false, but \w+ has different strategies in different layers"):
        Transformer(SHAPE, 4, 20, strategy, per_layer=False)
    assert len(Transformer(SHAPE, 4, 20, strategy, per_layer=True).positions) == 4
    assert len(Transformer(SHAPE, 4, 20, NoPE, per_layer=False).positions) == 1

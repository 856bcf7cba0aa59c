"""Options that no strategy can have: one line with the option, what was given, and what is expected."""

import math
from collections.abc import Callable
from functools import partial

import pytest

from kerple.base.errors import UserError
from kerple.positions import (
    DAPE,
    FIRE,
    T5,
    ALiBi,
    CoPE,
    KerpleLog,
    Layers,
    NoPE,
    PaTH,
    PoPE,
    Position,
    RandomizedPositions,
    RoPE,
    Shape,
    Shaw,
    Sink,
    Sinusoidal,
    SSMax,
    Temperature,
    Together,
    TransformerXL,
    XPos,
)

SHAPE, ODD = Shape(24, 3, 12, layers=4), Shape(9, 3, 12)


@pytest.mark.parametrize(
    ("strategy", "message"),
    [
        (partial(CoPE, rows=1), "CoPE: rows: got 1, expected 2 or more"),
        (partial(DAPE, hidden=0), "DAPE: hidden: got 0, expected a positive width"),
        (partial(DAPE, over=NoPE), "DAPE: over: got NoPE, expected a strategy that is a bias by distance"),
        # DAPE reads biases alone, so that it would see beyond the window
        (partial(DAPE, over=partial(Layers, near=ALiBi, far=KerpleLog, window=8)), "DAPE: over: got Layers"),
        (partial(FIRE, threshold=0), "FIRE: threshold: got 0, expected 1 token or more"),
        (partial(Layers, every=3), "Layers: every: got 3, expected a divisor of the 4 layers"),
        (partial(Layers, window=0), "Layers: window: got 0, expected at least 1 key"),
        (partial(Layers, near=Sinusoidal), "Layers: near: got Sinusoidal, expected a strategy that works in attention"),
        (partial(PaTH, rank=0), "PaTH: rank: got 0, expected a positive number"),
        (partial(PoPE, base=math.nan), "PoPE: base: got nan"),
        (partial(PoPE, phase=1.0), "phase: got a start of 1"),
        (
            partial(RandomizedPositions, reach=11),
            "RandomizedPositions: reach: got 11, expected at least",
        ),
        (partial(RoPE, share=0.1), "RoPE: share: got 0.1, which is 1 of a head's 8 dimensions"),
        (partial(RoPE, base=1.0), "RoPE: base: got 1.0, expected a number above 1"),
        (partial(RoPE, scaling="pi"), "RoPE: factor: got None, expected a number of 1 or more beside scaling pi"),
        (partial(RoPE, scaling="yarn", factor=0.5), "RoPE: factor: got 0.5"),
        (partial(RoPE, scaling="ntk", factor=2.0, share=0.25), "RoPE: scaling: got ntk, expected .* 4 or more turned"),
        (partial(RoPE, slow=5.0, fast=2.0), "RoPE: slow, fast: got 5.0, 2.0"),
        (partial(Shaw, clip=-1), "Shaw: clip: got -1"),
        (partial(Sink, start=math.inf), "Sink: start: got inf, expected a finite logit"),
        (partial(Sinusoidal, base=1), "Sinusoidal: base: got 1"),
        (partial(SSMax, start=0.0), "SSMax: start: got 0.0"),
        (partial(T5, max_distance=16), "T5: max_distance: got 16, expected more than the 16 distances"),
        (partial(Temperature, every=0), "Temperature: every: got 0"),
        (partial(Together, parts=[]), "Together: parts: got none"),
        (partial(XPos, decay=0), "XPos: decay: got 0"),
    ],
)
def test_an_option_out_of_range_is_refused(strategy: Callable[[Shape], Position], message: str) -> None:
    with pytest.raises(UserError, match=message) as error:
        strategy(SHAPE)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("strategy", [Sinusoidal, TransformerXL, XPos])
def test_an_odd_width_is_refused(strategy: type[Position]) -> None:
    with pytest.raises(UserError, match=rf"{strategy.__name__}: .* expected an even"):
        strategy(ODD)

"""SSMax, Llama 4's temperature, sinks and stick-breaking against loops in fp64, gradients too."""

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from kerple.base.errors import UserError
from kerple.positions import (
    FoX,
    KerpleLog,
    Position,
    QueryKeyBlock,
    Shape,
    Sink,
    SSMax,
    StickBreaking,
    Temperature,
    Together,
    TokenPositions,
)
from tests.positions.attended import HEAD_DIM, SHAPE, ours_and_loops, softmax


def ssmax(position: SSMax, h: int, m: int, n: int, visible: int) -> tuple[Any, Any]:
    return position.scale[h] * math.log(visible), 0


def temperature(position: Temperature, h: int, m: int, n: int, visible: int) -> tuple[Any, Any]:
    return 1 + 0.1 * math.log(1 + math.floor((m + 1) / SHAPE.length)), 0


def together(position: Together, h: int, m: int, n: int, visible: int) -> tuple[Any, Any]:
    scale, kerple, _ = position.parts
    return scale.scale[h] * math.log(visible), -kerple.r1[h] * (1 + kerple.r2[h] * (m - n)).log()


# a strategy, and the factor and the summand of a score
CASES: dict[str, tuple[Callable[[Shape], Position], Callable[..., tuple[Any, Any]]]] = {
    "SSMax": (SSMax, ssmax),
    "Temperature": (Temperature, temperature),
    "Sink": (Sink, lambda *_: (1, 0)),
    "off by one": (lambda shape: Sink(shape, learnable=False), lambda *_: (1, 0)),
    "Together": (lambda shape: Together(shape, (SSMax, KerpleLog, Sink)), together),
}


@pytest.mark.parametrize(("window", "offset"), [(None, 0), (7, 1000)])
@pytest.mark.parametrize("name", CASES)
def test_it_is_a_loop(name: str, window: int | None, offset: int, monkeypatch: pytest.MonkeyPatch) -> None:
    build, change = CASES[name]
    position = build(SHAPE).double()
    for parameter in position.parameters():
        torch.nn.init.uniform_(parameter, 0.2, 1.5)
    sinks = [part.logits for part in position.modules() if isinstance(part, Sink)]

    def score(q: Tensor, k: Tensor, x: Tensor, b: int, h: int, m: int, n: int) -> Tensor:
        factor, summand = change(position, h, m, n, m + 1 if window is None else min(window, m + 1))
        return q[b, h, m] @ k[b, h, n] / math.sqrt(HEAD_DIM) * factor + summand

    def beside_a_sink(scores: Tensor, h: int) -> Tensor:
        return scores.exp() / (scores.exp().sum() + sinks[0][h].exp())

    ours_and_loops(position, score, monkeypatch, window, offset, beside_a_sink if sinks else softmax)


def plain_score(q: Tensor, k: Tensor, x: Tensor, b: int, h: int, m: int, n: int) -> Tensor:
    return q[b, h, m] @ k[b, h, n] / math.sqrt(HEAD_DIM)


@pytest.mark.parametrize("rest", [False, True])
@pytest.mark.parametrize("window", [None, 7])
def test_stick_breaking_is_a_loop(window: int | None, rest: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(scores: Tensor, h: int) -> Tensor:
        left, weights = torch.ones((), dtype=torch.float64), []
        for score in scores[:-1].flip(0):  # the nearest key first; a query does not see itself
            weights.append(left * score.sigmoid())
            left = left * (1 - score.sigmoid())
        return torch.stack([*weights[::-1], left if rest else torch.zeros_like(left)])

    ours_and_loops(StickBreaking(SHAPE, rest), plain_score, monkeypatch, window, probabilities=broken)


def test_a_stick_of_many_keys_is_broken_in_full_precision() -> None:
    """What 3,000 keys leave of the stick is e^-2,000: near keys do not notice in fp32."""
    at, scores = TokenPositions.line(3000), torch.randn(1, 1, 5, 3000)
    block = QueryKeyBlock(at[-5:], at, torch.ones(5, 3000, dtype=torch.bool).tril(2995))
    in_fp32, in_fp64 = (
        StickBreaking(Shape(8, 1, 16)).modify_scores(s, s, s, block).p for s in (scores, scores.double())
    )
    torch.testing.assert_close(in_fp32.double(), in_fp64, atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize(
    ("parts", "message"),
    [
        ((StickBreaking, FoX), "got one that modifies scores after one that gives weights"),
        ((StickBreaking, Sink), "got a sink and a strategy that gives weights"),
    ],
)
def test_what_cannot_be_together_with_stick_breaking_is_said(parts: tuple, message: str) -> None:
    at, scores = TokenPositions.line(4), torch.zeros(1, 2, 4, 4)
    position = Together(SHAPE, parts)
    state = position.token_state(torch.zeros(1, 4, SHAPE.dim), at, None)
    with pytest.raises(UserError, match=message):
        position.modify_scores(scores, scores, scores, QueryKeyBlock(at, at, scores[0, 0] == 0, state))

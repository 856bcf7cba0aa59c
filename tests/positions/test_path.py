"""PaTH against a product of reflections, one matrix after the other."""

from functools import cache, partial

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from kerple.base.errors import UserError
from kerple.positions import (
    FoX,
    KerpleLog,
    KerpleWeight1,
    PaTH,
    RandomizedPositions,
    Together,
    TokenPositions,
    path,
)
from tests.positions.attended import HEAD_DIM, HEADS, LENGTH, SHAPE, ours_and_loops, random


@cache
def reflection(position: PaTH, x: Tensor, b: int, h: int, t: int, reach: int) -> Tensor:
    """The matrix of a token, whose convolution sees ``reach`` tokens, itself among them."""
    part = slice(h * HEAD_DIM, (h + 1) * HEAD_DIM)
    w = position.up.weight[part] @ position.down.weight @ x[b, t]
    if position.taps is not None:
        lags = [i for i in range(reach) if t - i >= 0]
        raw = [position.up.weight[part] @ position.down.weight @ x[b, t - i] for i in lags]
        w = F.silu(sum(r * position.taps[part, -1 - i] for r, i in zip(raw, lags, strict=True)))
    w = w / w.norm()
    beta = 2 * torch.sigmoid(position.gate.weight[h] @ x[b, t] + position.gate.bias[h])
    return torch.eye(HEAD_DIM, dtype=torch.float64) - beta * torch.outer(w, w)


def product_of_reflections(
    position: PaTH, q: Tensor, k: Tensor, x: Tensor, b: int, h: int, m: int, n: int, reach: int
) -> Tensor:
    carried = q[b, h, m]
    for t in range(m, n, -1):  # H_m first, H_{n+1} last
        carried = reflection(position, x, b, h, t, reach) @ carried
    return k[b, h, n] @ carried / HEAD_DIM**0.5


@pytest.mark.parametrize("convolution", [1, 3])
@pytest.mark.parametrize("window", [None, 1, 2, 5])
def test_path_is_a_product_of_reflections(
    window: int | None, convolution: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(path, "KEYS", 2)  # several blocks of keys before a block of queries
    torch.manual_seed(0)
    position = PaTH(SHAPE, rank=3, convolution=convolution).double()
    reach = convolution if window is None else min(convolution, window)

    def score(q: Tensor, k: Tensor, x: Tensor, b: int, h: int, m: int, n: int) -> Tensor:
        return product_of_reflections(position, q, k, x, b, h, m, n, reach)

    ours_and_loops(position, score, monkeypatch, window)


def test_beside_forget_gates_each_remembers_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    position = Together(SHAPE, [partial(PaTH, rank=3), FoX]).double()
    path_, fox = position.parts

    def score(q: Tensor, k: Tensor, x: Tensor, b: int, h: int, m: int, n: int) -> Tensor:
        gates = F.logsigmoid(x[b] @ fox.gates.weight[h] + fox.gates.bias[h])
        return product_of_reflections(path_, q, k, x, b, h, m, n, 1) + gates[n + 1 : m + 1].sum()

    ours_and_loops(position, score, monkeypatch)


@pytest.mark.parametrize("pieces", [[1] * LENGTH, [4, 7, 3], [LENGTH - 1, 1]])
def test_the_convolution_goes_on_where_the_cache_ends(pieces: list[int]) -> None:
    torch.manual_seed(0)
    position, x, at = PaTH(SHAPE, convolution=4).double(), random(2, LENGTH, SHAPE.dim), TokenPositions.line(LENGTH)
    whole, past = position.token_state(x, at, None), None
    for stop, size in zip(torch.tensor(pieces).cumsum(0).tolist(), pieces, strict=True):
        new = position.token_state(x[:, stop - size : stop], at[stop - size : stop], past)
        past = new if past is None else torch.cat([past, new], 2)

    assert whole.shape == (2, HEADS, LENGTH, 2 * HEAD_DIM + 1)
    torch.testing.assert_close(past, whole, atol=1e-14, rtol=1e-14)


RandomizedPaTH = partial(RandomizedPositions, position=PaTH)


@pytest.mark.parametrize(
    ("parts", "message"),
    [
        ((KerpleLog, PaTH), "got KerpleLog, whose bias PaTH's scores would not have; leave one of them out"),
        ((PaTH, KerpleLog), "got KerpleLog, whose bias"),
        ((KerpleWeight1, PaTH), "got KerpleWeight1, whose weight"),
        ((RandomizedPaTH, KerpleLog), "got KerpleLog, whose bias"),
        ((FoX, PaTH), "got FoX, whose modify_scores PaTH's scores would not have; put PaTH before it"),
        ((PaTH, PaTH), "got PaTH, whose modify_scores"),
    ],
)
def test_together_refuses_what_path_would_drop(parts: tuple, message: str) -> None:
    with pytest.raises(UserError, match=message):
        Together(SHAPE, parts)

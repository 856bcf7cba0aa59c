"""DAPE and its convolutions against loops over pairs, keys and heads; the operators of its network."""

from functools import cache, partial

import pytest
import torch
from torch import Tensor
from torch.library import opcheck
from torch.nn import functional as F

from kerple.positions import DAPE, ALiBi, DAPEv2, KerpleLog, pair_network
from tests.positions.attended import HEADS, SHAPE, ours_and_loops

WINDOWS = [None, 1, 6]


def raw(position: DAPE, q: Tensor, k: Tensor, b: int, m: int, n: int) -> Tensor:
    """The scores of all heads and their biases, (2H,)."""
    s = torch.stack([q[b, h, m] @ k[b, h, n] / q.shape[-1] ** 0.5 for h in range(HEADS)])
    distance = torch.tensor([float(m - n)], dtype=torch.float64)
    return torch.cat([s, position.over.bias(distance)[:, 0]])


@pytest.mark.parametrize("window", WINDOWS)
@pytest.mark.parametrize("over", [KerpleLog, ALiBi])
def test_dape_is_a_loop_over_pairs(window: int | None, over: type, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pair_network, "HIDDEN", 60)  # several pieces of pairs
    position = DAPE(SHAPE, over, hidden=5).double()

    raw_scores = cache(partial(raw, position))

    def score(q: Tensor, k: Tensor, x: Tensor, b: int, h: int, m: int, n: int) -> Tensor:
        both = raw_scores(q, k, b, m, n)
        hidden = F.leaky_relu(position.into.weight @ both + position.into.bias)
        return both[h] + both[HEADS + h] + position.out.weight[h] @ hidden

    ours_and_loops(position, score, monkeypatch, window, offset=3)


@pytest.mark.parametrize("window", WINDOWS)
def test_dape_v2_is_two_convolutions_along_what_a_query_sees(
    window: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    position = DAPEv2(SHAPE, hidden=5).double()
    into = position.into.weight.unflatten(-1, (3, 2 * HEADS))  # (hidden, taps, 2H)
    out = position.out.weight.unflatten(-1, (3, 5))  # (H, taps, hidden)

    raw_scores = cache(partial(raw, position))

    def score(q: Tensor, k: Tensor, x: Tensor, b: int, h: int, m: int, n: int) -> Tensor:
        first = 0 if window is None else max(0, m - window + 1)
        both = {i: raw_scores(q, k, b, m, i) for i in range(max(first, n - 2), min(m, n + 2) + 1)}
        hidden = {}
        for i in range(max(first, n - 1), min(m, n + 1) + 1):
            near = [into[:, t] @ both[i + t - 1] for t in range(3) if first <= i + t - 1 <= m]
            hidden[i] = F.leaky_relu(torch.stack(near).sum(0) + position.into.bias)
        added = [out[h, t] @ hidden[n + t - 1] for t in range(3) if n + t - 1 in hidden]
        return both[n][h] + both[n][HEADS + h] + torch.stack(added).sum()

    ours_and_loops(position, score, monkeypatch, window)


@pytest.mark.parametrize("shared", [True, False])
def test_the_operators_keep_torch_s_contract(shared: bool) -> None:
    """s, b, into, bias, out of 3 sequences, 2 heads, 23 pairs and 5 hidden numbers; a batch may share b."""
    sizes = [(3, 2, 23), (2, 23) if shared else (3, 2, 23), (5, 4), (5,), (2, 5)]
    inputs = [torch.randn(size, requires_grad=True) for size in sizes]
    opcheck(torch.ops.kerple.pair_network.default, tuple(inputs))
    opcheck(torch.ops.kerple.pair_network_backward.default, (torch.randn(3, 2, 23), *(x.detach() for x in inputs)))

"""PaTH against a product of reflections, one matrix after the other."""

from functools import cache, partial

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from kerple.positions import FoX, PaTH, Together, path
from tests.positions.attended import HEAD_DIM, SHAPE, ours_and_loops


@cache
def reflection(position: PaTH, x: Tensor, b: int, h: int, t: int) -> Tensor:
    """The matrix of a token."""
    part = slice(h * HEAD_DIM, (h + 1) * HEAD_DIM)
    w = position.up.weight[part] @ position.down.weight @ x[b, t]
    w = w / w.norm()
    beta = 2 * torch.sigmoid(position.gate.weight[h] @ x[b, t] + position.gate.bias[h])
    return torch.eye(HEAD_DIM, dtype=torch.float64) - beta * torch.outer(w, w)


def product_of_reflections(position: PaTH, q: Tensor, k: Tensor, x: Tensor, b: int, h: int, m: int, n: int) -> Tensor:
    carried = q[b, h, m]
    for t in range(m, n, -1):  # H_m first, H_{n+1} last
        carried = reflection(position, x, b, h, t) @ carried
    return k[b, h, n] @ carried / HEAD_DIM**0.5


@pytest.mark.parametrize("window", [None, 1, 5])
def test_path_is_a_product_of_reflections(window: int | None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(path, "KEYS", 2)  # several blocks of keys before a block of queries
    torch.manual_seed(0)
    position = PaTH(SHAPE, rank=3).double()
    ours_and_loops(position, partial(product_of_reflections, position), monkeypatch, window)


def test_beside_forget_gates_each_remembers_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    position = Together(SHAPE, [partial(PaTH, rank=3), FoX]).double()
    path_, fox = position.parts

    def score(q: Tensor, k: Tensor, x: Tensor, b: int, h: int, m: int, n: int) -> Tensor:
        gates = F.logsigmoid(x[b] @ fox.gates.weight[h] + fox.gates.bias[h])
        return product_of_reflections(path_, q, k, x, b, h, m, n) + gates[n + 1 : m + 1].sum()

    ours_and_loops(position, score, monkeypatch)

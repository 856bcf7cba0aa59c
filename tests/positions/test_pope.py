"""PoPE against its formula, term by term."""

import math

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from kerple.positions import PoPE
from tests.positions.attended import HEAD_DIM, HEADS, SHAPE, ours_and_loops


@pytest.mark.parametrize(("window", "offset"), [(None, 0), (None, 700), (5, 3)])
def test_pope_is_a_sum_of_cosines(window: int | None, offset: int, monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    position = PoPE(SHAPE, base=500.0, phase=None).double()
    assert position.phase.min() >= -2 * math.pi
    assert position.phase.max() <= 0

    def score(q: Tensor, k: Tensor, x: Tensor, b: int, h: int, m: int, n: int) -> Tensor:
        frequencies = torch.tensor([500.0 ** (-c / HEAD_DIM) for c in range(HEAD_DIM)], dtype=torch.float64)
        angles = (m - n) * frequencies + position.phase.view(HEADS, HEAD_DIM)[h]
        return (F.softplus(q[b, h, m]) * F.softplus(k[b, h, n]) * angles.cos()).sum() / HEAD_DIM**0.5

    ours_and_loops(position, score, monkeypatch, window, offset)

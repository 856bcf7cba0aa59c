"""PoPE against its formula, term by term."""

import math

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from kerple.base.errors import UserError
from kerple.model import Transformer
from kerple.positions import (
    CoPE,
    PaTH,
    PoPE,
    Position,
    RoPE,
    Shape,
    Shaw,
    Together,
    TransformerXL,
    XPos,
    names,
    strategies,
)
from tests.positions.attended import HEAD_DIM, HEADS, SHAPE, ours_and_loops

# RandomizedPositions wraps RoPE
REFUSED = {"CoPE", "PaTH", "PoPE", "RandomizedPositions", "RoPE", "Shaw", "TransformerXL", "XPos"}


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


@pytest.mark.parametrize("other", [CoPE, PaTH, PoPE, RoPE, Shaw, TransformerXL, XPos])
def test_what_expects_heads_of_the_usual_width_is_refused_beside_it(other: type[Position]) -> None:
    for parts in ([PoPE, other], [other, PoPE]):
        with pytest.raises(UserError, match=rf"Together: parts: got {other.__name__} beside PoPE"):
            Together(SHAPE, parts)


@pytest.mark.parametrize("other", [name for name in names() if name not in REFUSED])
def test_all_others_may_be_together_with_it(other: str) -> None:
    torch.manual_seed(0)
    shape = Shape(32, 4, 24)
    parts = [PoPE, strategies()[other]]
    network = Transformer(shape, 1, 50, lambda shape: Together(shape, parts), per_layer=True)
    assert network(torch.randint(50, (1, 9))).isfinite().all()

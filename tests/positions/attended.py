"""One layer of attention in fp64 under a strategy, and the loop that any oracle of scores is put into."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

import kerple.attention.blocks
from kerple.model.architecture import Architecture
from kerple.model.self_attention import SelfAttention, prepare_context
from kerple.positions import Position, Shape, TokenPositions

HEADS, HEAD_DIM, LENGTH = 2, 6, 14
SHAPE = Shape(HEADS * HEAD_DIM, HEADS, 8)
Score = Callable[[Tensor, Tensor, Tensor, int, int, int, int], Tensor]
"""(q, k, x, b, h, m, n) to the score of query m and key n, differentiable."""


def softmax(scores: Tensor, head: int) -> Tensor:
    return scores.softmax(0)


def ours_and_loops(
    position: Position,
    score: Score,
    monkeypatch: pytest.MonkeyPatch,
    window: int | None = None,
    offset: int = 0,
    probabilities: Callable[[Tensor, int], Tensor] = softmax,
) -> None:
    """Hold output and all gradients of the strategy, in small blocks, against explicit loops over a score function.

    Args:
        position: The strategy in fp64.
        score: What the paper says a score is.
        monkeypatch: Makes the blocks small, so that there are several, and has them computed again.
        window: Number of keys that are seen.
        offset: Offset of the positions.
        probabilities: Function from the scores of the keys that a query sees, (n,), and the head to probabilities (n,).
    """
    monkeypatch.setattr(kerple.attention.blocks, "QUERIES_AT_ONCE", 5)
    monkeypatch.setattr(kerple.attention.blocks, "LARGEST_STORED", 0)  # hooks are called again on the way back
    torch.manual_seed(0)
    attention = SelfAttention(SHAPE, Architecture(bias=False)).double()
    torch.nn.init.normal_(attention.qkv.weight, std=0.4)
    attention.out = torch.nn.Identity()
    x = torch.randn(2, LENGTH, SHAPE.dim, dtype=torch.float64, requires_grad=True)

    q, k, v = attention.split(attention.qkv(x))
    rows = []
    for b in range(2):
        for h in range(HEADS):
            for m in range(LENGTH):
                first = 0 if window is None else max(0, m - window + 1)
                s = torch.stack([score(q, k, x, b, h, m, n) for n in range(first, m + 1)])
                rows.append(probabilities(s, h) @ v[b, h, first : m + 1])
    expected = torch.stack(rows).view(2, HEADS, LENGTH, HEAD_DIM).transpose(1, 2).flatten(2)
    leaves, grad = [x, attention.qkv.weight, *position.parameters()], torch.randn_like(expected)
    expected_gradients = torch.autograd.grad(expected, leaves, grad, materialize_grads=True)

    tokens = torch.zeros(2, LENGTH, dtype=torch.int64)
    for option in ("auto", "blocks"):
        context = prepare_context(position, TokenPositions.line(LENGTH, offset), tokens, window, option)
        out = attention(x, position, context)
        torch.testing.assert_close(out, expected, atol=1e-12, rtol=1e-12)
        gradients = torch.autograd.grad(out, leaves, grad, materialize_grads=True)
        for ours, theirs in zip(gradients, expected_gradients, strict=True):
            torch.testing.assert_close(ours, theirs, atol=1e-11, rtol=1e-11)

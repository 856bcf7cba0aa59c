"""One layer of attention in fp64 under a strategy, and the loop that any oracle of scores is put into."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

import kerple.attention.blocks
from kerple.model.architecture import Architecture
from kerple.model.self_attention import SelfAttention, modifiers_of, prepare_context
from kerple.positions import Position, Shape, TokenPositions

HEADS, HEAD_DIM, LENGTH = 2, 6, 14
SHAPE = Shape(HEADS * HEAD_DIM, HEADS, 8)
Score = Callable[[Tensor, Tensor, Tensor, int, int, int, int], Tensor]
"""(q, k, x, b, h, m, n) to the score of query m and key n, differentiable."""


def random(*size: int, seed: int = 0) -> Tensor:
    return torch.randn(*size, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def ours_and_loops(
    position: Position, score: Score, monkeypatch: pytest.MonkeyPatch, window: int | None = None, offset: int = 0
) -> None:
    """Hold output and all gradients of the strategy, in small blocks, against explicit loops over a score function.

    Args:
        position: In fp64.
        score: What the paper says a score is.
        monkeypatch: Makes the blocks small, so that there are several, and has them computed again.
        window: Keys that are seen.
        offset: Of the positions.
    """
    monkeypatch.setattr(kerple.attention.blocks, "QUERIES_AT_ONCE", 5)
    monkeypatch.setattr(kerple.attention.blocks, "LARGEST_STORED", 0)  # hooks are called again on the way back
    torch.manual_seed(0)
    attention = SelfAttention(SHAPE, Architecture(bias=False)).double()
    torch.nn.init.normal_(attention.qkv.weight, std=0.4)
    attention.out = torch.nn.Identity()
    x = random(2, LENGTH, SHAPE.dim).requires_grad_()
    tokens = torch.zeros(2, LENGTH, dtype=torch.int64)
    context = prepare_context(position, TokenPositions.line(LENGTH, offset), tokens, window)
    got = attention(x, position, context)

    q, k, v = attention.split(attention.qkv(x))
    rows = []
    for b in range(2):
        for h in range(HEADS):
            for m in range(LENGTH):
                first = 0 if window is None else max(0, m - window + 1)
                s = torch.stack([score(q, k, x, b, h, m, n) for n in range(first, m + 1)])
                rows.append(s.softmax(0) @ v[b, h, first : m + 1])
    expected = torch.stack(rows).view(2, HEADS, LENGTH, HEAD_DIM).transpose(1, 2).flatten(2)
    torch.testing.assert_close(got, expected, atol=1e-12, rtol=1e-12)

    wanted = [x, attention.qkv.weight, *position.parameters()]
    towards = random(*got.shape, seed=1)
    for a, e in zip(
        torch.autograd.grad((got * towards).sum(), wanted, retain_graph=True, materialize_grads=True),
        torch.autograd.grad((expected * towards).sum(), wanted, materialize_grads=True),
        strict=True,
    ):
        torch.testing.assert_close(a, e, atol=1e-11, rtol=1e-11)


def attended(
    attention: Callable[..., Tensor],
    position: Position,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    x: Tensor,
    window: int | None = None,
    offset: int = 0,
) -> Tensor:
    """Attention with a strategy, without the network around it.

    Args:
        attention: `kerple.attention.attend`, or a function with the same arguments.
        position: The strategy.
        q: Queries (B, H, T, δ) before `Position.transform_qk`.
        k: Keys (B, G, T, δ) before `Position.transform_qk`.
        v: Values (B, G, T, δ).
        x: Input of `Position.token_state`, (B, T, D).
        window: Number of keys that a query sees; None for all.
        offset: Added to every position.
    """
    context = prepare_context(
        position, TokenPositions.line(q.shape[2], offset), x.new_zeros(x.shape[:2], dtype=torch.int64), window
    )
    state = position.token_state(x, context.at, None)
    q, k = position.transform_qk(q, k, state, context.at)
    return attention(q, k, v, modifiers_of(position, context, q, v, state))

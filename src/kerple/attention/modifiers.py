"""`Modifiers`: what a strategy changes in attention, the argument that all implementations share."""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from kerple.positions.token_positions import AttentionWeights

Modified = Tensor | tuple[Tensor, Tensor] | AttentionWeights
ModifyScores = Callable[[Tensor, Tensor, Tensor, slice, slice, Tensor], Modified]
AddToOutput = Callable[[Tensor, Tensor, slice, slice, Tensor], Tensor]


@dataclass(frozen=True)
class Modifiers:
    """What a strategy changes in attention; by default nothing.

    Args:
        scale: What q·k is multiplied by; 1/√δ if None.
        table: (H, >= Tk), added to the scaled score at distance d. Never becomes a T × T tensor; its gradient neither.
        weight: (H, >= Tk), multiplies the scaled score at distance d, before the table is added.
        window: Only keys at distance d < window are seen; time and memory are then O(T · window).
        keep_first: Number of first keys that every later query sees beside its window.
        sink: (H,) or (B, H, Tq), one more logit in the softmax, without a value.
        modify_scores: Function ``f(s, q, k, rows, columns, seen)`` that is called for each block of queries, in the
            backward pass again. Its arguments are the scores s (B, H, rows, columns), with weight and table worked in;
            the queries and the keys that they may see, each key repeated for the query heads it serves; the slices of
            their row indices; and which keys each query sees, bool (rows, columns). It returns new scores, or those and
            a sink (B, H, rows), or `kerple.positions.AttentionWeights`, beside which there can be no ``sink``.
        add_to_output: Function ``f(p, v, rows, columns, seen)`` of the probabilities (B, H, rows, columns) of a block
            and the values of its keys. It returns what is added to the output, (B, H, rows, δ').
        neighbor_window: If given, the first halves of queries and keys are multiplied at distances below it, the second
            halves from it on.
    """

    scale: float | None = None
    table: Tensor | None = None
    weight: Tensor | None = None
    window: int | None = None
    keep_first: int = 0
    sink: Tensor | None = None
    modify_scores: ModifyScores | None = None
    add_to_output: AddToOutput | None = None
    neighbor_window: int | None = None


UNMODIFIED = Modifiers()


def visible_keys(rows: slice, columns: slice, modifiers: Modifiers, device: torch.device) -> Tensor:
    """Return which keys each query sees, bool (rows, columns): those up to itself, within the window or kept."""
    queries = torch.arange(rows.start, rows.stop, device=device)
    keys = torch.arange(columns.start, columns.stop, device=device)
    distance = queries[:, None] - keys
    if modifiers.window is None:
        return distance >= 0
    return (distance >= 0) & ((distance < modifiers.window) | (keys < modifiers.keep_first))


def scores(
    q: Tensor, k: Tensor, modifiers: Modifiers, rows: slice, columns: slice, product: Callable[[Tensor, Tensor], Tensor]
) -> Tensor:
    """Products of queries (B, H, rows, δ) and keys (B, H, columns, δ), of their halves if there are two views."""
    if modifiers.neighbor_window is None:
        return product(q, k)  # (B, H, rows, columns)
    near, far = map(product, q.chunk(2, -1), k.chunk(2, -1))
    pairs = torch.ones(near.shape[-2:], dtype=torch.bool, device=q.device)
    return torch.where(pairs.tril(rows.start - columns.start - modifiers.neighbor_window), far, near)


def sink_of_queries(sink: Tensor) -> Tensor:
    """Return a sink (H,) or (B, H, Tq) in a shape that broadcasts with (B, H, Tq)."""
    return sink if sink.ndim == 3 else sink[:, None]


def for_query_heads(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    """Repeat keys and values (B, G, Tk, δ) for the query heads that they serve; (B, H, Tk, δ)."""
    repeats = q.shape[1] // k.shape[1]
    return k.repeat_interleave(repeats, 1), v.repeat_interleave(repeats, 1)

"""`AttentionSpec`: what a strategy changes in attention, the argument that all implementations share."""

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from kerple.positions.token_positions import AttentionWeights

Modified = Tensor | tuple[Tensor, Tensor] | AttentionWeights
ModifyScores = Callable[[Tensor, Tensor, Tensor, slice, slice, Tensor], Modified]
AddToOutput = Callable[[Tensor, Tensor, slice, slice, Tensor], Tensor]


@dataclass(frozen=True)
class AttentionSpec:
    """What a strategy changes in attention; by default nothing.

    Args:
        scale: What q·k is multiplied by; 1/√δ if None.
        table: (H, >= Tk), added to the scaled score at distance d. Never becomes a T × T tensor; its gradient neither.
        weight: (H, >= Tk), multiplies the scaled score at distance d, before the table is added.
        window: Only keys at distance d < window are seen; time and memory are then O(T · window).
        first: Number of first keys that every query sees in addition to its window.
        sink: (H,) or (B, H, Tq), one more logit in the softmax, without a value.
        modify_scores: Function ``f(s, q, k, rows, columns, seen)`` that is called for each block of queries, in the
            backward pass again. Its arguments are the scores s (B, H, rows, columns), with weight and table worked in;
            the queries and the keys that they may see, each key repeated for the query heads it serves; the slices of
            their row indices; and which keys each query sees, bool (rows, columns). It returns new scores, or those and
            a sink (B, H, rows), or `kerple.positions.AttentionWeights`, beside which there can be no ``sink``.
        add_to_output: Function ``f(p, v, rows, columns, seen)`` of the probabilities (B, H, rows, columns) of a block
            and the values of its keys. It returns what is added to the output, (B, H, rows, δ').
        more_keys: Scores (B, H, Tq, F) of further keys, -inf where they are hidden, and their values (B, H, F, δ'), for
            the same softmax. There is no ``modify_scores`` or ``add_to_output`` with them.
        neighbor_window: If given, the first halves of queries and keys are multiplied at distances below it, the second
            halves from it on.
    """

    scale: float | None = None
    table: Tensor | None = None
    weight: Tensor | None = None
    window: int | None = None  # not a `Visibility`, which torch.compile cannot make
    first: int = 0
    sink: Tensor | None = None
    modify_scores: ModifyScores | None = None
    add_to_output: AddToOutput | None = None
    more_keys: tuple[Tensor, Tensor] | None = None
    neighbor_window: int | None = None

    def of_queries(self, queries: slice) -> "AttentionSpec":
        """Return the part that belongs to a block of queries."""
        sink = self.sink[:, :, queries] if self.sink is not None and self.sink.ndim == 3 else self.sink
        more_keys = None if self.more_keys is None else (self.more_keys[0][:, :, queries], self.more_keys[1])
        return replace(self, sink=sink, more_keys=more_keys)


UNMODIFIED = AttentionSpec()


def visible_keys(rows: slice, columns: slice, spec: AttentionSpec, device: torch.device) -> Tensor:
    """Return which keys each query sees, bool (rows, columns): those up to itself, within the window or kept."""
    queries = torch.arange(rows.start, rows.stop, device=device)
    keys = torch.arange(columns.start, columns.stop, device=device)
    distance = queries[:, None] - keys
    if spec.window is None:
        return distance >= 0
    return (distance >= 0) & ((distance < spec.window) | (keys < spec.first))


def scores(
    q: Tensor,
    k: Tensor,
    spec: AttentionSpec,
    rows: slice,
    columns: slice,
    product: Callable[[Tensor, Tensor], Tensor],
) -> Tensor:
    """Products of queries (B, H, rows, δ) and keys (B, H, columns, δ), of their halves if there are two views."""
    if spec.neighbor_window is None:
        return product(q, k)  # (B, H, rows, columns)
    near, far = map(product, q.chunk(2, -1), k.chunk(2, -1))
    pairs = torch.ones(near.shape[-2:], dtype=torch.bool, device=q.device)
    return torch.where(pairs.tril(rows.start - columns.start - spec.neighbor_window), far, near)


def sink_of_queries(sink: Tensor) -> Tensor:
    """Return a sink (H,) or (B, H, Tq) in a shape that broadcasts with (B, H, Tq)."""
    return sink if sink.ndim == 3 else sink[:, None]


def for_query_heads(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    """Repeat keys and values (B, G, Tk, δ) for the query heads that they serve; (B, H, Tk, δ)."""
    repeats = q.shape[1] // k.shape[1]
    return k.repeat_interleave(repeats, 1), v.repeat_interleave(repeats, 1)

"""`AttentionSpec`: the modifications of attention by a strategy, an argument of all implementations."""

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
    """Modifications of attention by a strategy; none by default.

    Args:
        scale: Factor of q·k; 1/√δ if None.
        table: Attention bias (H, >= Tk), added to the scaled score at distance d. Fused implementations expand neither
            the table nor its gradient to T × T.
        weight: (H, >= Tk), multiplies the scaled score at distance d, before the table is added.
        window: Only keys at distance d < window are seen; None for all. Time and memory are O(T · window).
        first: Number of first keys that every query sees in addition to its window.
        sink: (H,) or (B, H, Tq), an additional logit in the softmax, without a value.
        modify_scores: Function ``f(s, q, k, rows, columns, seen)`` that is called for each block of queries, and again
            in the backward pass. Its arguments are the scores s (B, H, rows, columns) after weight and table; the
            queries; the keys, repeated for the query heads; the slices of their row indices; and which keys each query
            sees, bool (rows, columns). It returns new scores, or new scores and a sink (B, H, rows), or
            `kerple.positions.AttentionWeights`. The last excludes a ``sink``.
        add_to_output: Function ``f(p, v, rows, columns, seen)`` of the probabilities (B, H, rows, columns) of a block
            and the values of its keys. It returns a term that is added to the output, (B, H, rows, δ').
        more_keys: Scores (B, H, Tq, F) of additional keys, -inf for hidden keys, and their values (B, H, F, δ'). They
            join the same softmax, and exclude ``modify_scores`` and ``add_to_output``.
        neighbor_window: If given, scores are products of the first halves of queries and keys at distances below it,
            and of the second halves at other distances.
    """

    scale: float | None = None
    table: Tensor | None = None
    weight: Tensor | None = None
    window: int | None = None  # not a `Visibility`, which torch.compile cannot construct
    first: int = 0
    sink: Tensor | None = None
    modify_scores: ModifyScores | None = None
    add_to_output: AddToOutput | None = None
    more_keys: tuple[Tensor, Tensor] | None = None
    neighbor_window: int | None = None

    def select_queries(self, queries: slice) -> "AttentionSpec":
        """Return the specification for a block of queries."""
        sink = self.sink[:, :, queries] if self.sink is not None and self.sink.ndim == 3 else self.sink
        more_keys = None if self.more_keys is None else (self.more_keys[0][:, :, queries], self.more_keys[1])
        return replace(self, sink=sink, more_keys=more_keys)


UNMODIFIED = AttentionSpec()


def query_blocks(queries: int, length: int, block: int, window: int | None) -> list[tuple[slice, slice]]:
    """Return, for each block of queries, its rows and the rows of the keys that at least one of its queries sees.

    The queries are the last of ``length`` rows.
    """
    starts = range(length - queries, length, block)
    rows = [slice(start, min(length, start + block)) for start in starts]
    return [(r, slice(0 if window is None else max(0, r.start - window + 1), r.stop)) for r in rows]


def visible_keys(rows: slice, columns: slice, spec: AttentionSpec, device: torch.device) -> Tensor:
    """Return which keys each query sees, bool (rows, columns): past keys in its window or among the first keys."""
    queries = torch.arange(rows.start, rows.stop, device=device)
    keys = torch.arange(columns.start, columns.stop, device=device)
    distance = queries[:, None] - keys
    if spec.window is None:
        return distance >= 0
    return (distance >= 0) & ((distance < spec.window) | (keys < spec.first))


def scores(
    q: Tensor, k: Tensor, spec: AttentionSpec, rows: slice, columns: slice, product: Callable[[Tensor, Tensor], Tensor]
) -> Tensor:
    """Return the products (B, H, rows, columns) of queries (B, H, rows, δ) and keys (B, H, columns, δ).

    With a ``neighbor_window`` they are products of the first halves for near keys, and of the second halves for others.
    """
    if spec.neighbor_window is None:
        return product(q, k)  # (B, H, rows, columns)
    near, far = map(product, q.chunk(2, -1), k.chunk(2, -1))
    all_pairs = torch.ones(near.shape[-2:], dtype=torch.bool, device=q.device)
    return torch.where(all_pairs.tril(rows.start - columns.start - spec.neighbor_window), far, near)


def sink_of_queries(sink: Tensor) -> Tensor:
    """Return a sink (H,) or (B, H, Tq) in a shape that broadcasts with (B, H, Tq)."""
    return sink if sink.ndim == 3 else sink[:, None]


def repeat_for_query_heads(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    """Repeat keys and values (B, G, Tk, δ) for all query heads; (B, H, Tk, δ)."""
    repeats = q.shape[1] // k.shape[1]
    return k.repeat_interleave(repeats, 1), v.repeat_interleave(repeats, 1)

"""`AttentionSpec`, the modifications of attention by a strategy, and functions that several implementations use.

Letters in shapes: B is the batch size. H is the number of query heads, and G the number of key heads, a divisor of H.
Tq and Tk are the numbers of queries and keys. δ is the head dimension of queries and keys, and δ' that of values. The
*row* of a token is its index among the Tk keys; the queries have the last Tq rows. d = m - n is the distance from a
query in row m to a key in row n.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from kerple.positions.token_positions import ModifiedScores, QueryKeyBlock, TokenPositions, value_bias_term

ModifyScores = Callable[[Tensor, Tensor, Tensor, QueryKeyBlock], ModifiedScores]
AddToOutput = Callable[[Tensor, Tensor, QueryKeyBlock], Tensor]


@dataclass(frozen=True)
class AttentionSpec:
    """Modifications of attention by a strategy; none by default.

    Args:
        scale: Factor of q·k; 1/√(last dimension of q) if None.
        table: Attention bias of each head at distance d = 0, 1, …, (H, >= Tk). It is added to the scaled scores. Fused
            implementations expand neither the table nor its gradient to Tq × Tk.
        score_scale: Factor of the scaled scores at distance d = 0, 1, …, (H, >= Tk), applied before ``table`` is added.
        key_bias: Bias of each key, (B, H, Tk) fp32 or fp64. The bias of a key minus that of the query's own key is
            added to the score.
        query_bias: Features (B, H, Tq, r) and curves (r, extent + 1); see `kerple.positions.Position.query_bias`.
        value_bias: Vectors (extent + 1, δ') that are added to the values; see `kerple.positions.Position.value_bias`.
        window: Queries see only keys at distance d < window; None for all.
        first_keys: Number of first keys that every later query sees in addition to its window. It has no effect if
            ``window`` is None. With ``first_key``, these are the first keys that the query sees without the window.
        first_key: Row of the first key that each query sees, (B, Tq) int64; None if it is the first row. A query always
            sees its own key. Rows must not decrease from one query to the next, as in consecutive documents. A padding
            token before an input is hidden from later queries if each padding token is a document.
        sink: Additional logit in the softmax that belongs to no key and no value vector, (H,) or (B, H, Tq).
        modify_scores: Function ``f(s, q, k, block)`` that changes the scores of a `kerple.positions.QueryKeyBlock`. It
            may be called again in the backward pass. ``s`` are the scores (B, H, queries, keys) after ``score_scale``
            and all biases, which may be overwritten. ``q`` are the queries, and ``k`` the keys, repeated for all query
            heads. The result is new scores, or new scores and a sink (B, H, queries), or
            `kerple.positions.AttentionWeights`, which replace the softmax and cannot be combined with ``sink``.
        add_to_output: Function ``f(p, v, block)`` that returns a term (B, H, queries, δ'), which is added to the output
            of a block of queries. ``p`` are the probabilities (B, H, queries, keys), and ``v`` the values of these
            keys, both fp32 or fp64.
        keys: Positions of the Tk keys, for the blocks of ``query_bias``, ``value_bias``, ``modify_scores`` and
            ``add_to_output``.
        state: `Position.token_state` of the Tk keys, (B, H, Tk, c), for the same blocks; None if there is none.
        more_keys: Scores (B, H, Tq, F) and values (B, H, F, δ') of F additional keys. The score of a hidden key is
            -inf. The scores join the softmax after ``modify_scores``. Additional keys cannot be combined with
            ``add_to_output`` or with `kerple.positions.AttentionWeights`.
        neighbor_window: Scores at distances below this number are products of the first halves of queries and keys.
            Scores at other distances are products of the second halves. None if queries and keys are not divided.
    """

    scale: float | None = None
    table: Tensor | None = None
    score_scale: Tensor | None = None
    key_bias: Tensor | None = None
    query_bias: tuple[Tensor, Tensor] | None = None
    value_bias: Tensor | None = None
    window: int | None = None
    first_keys: int = 0
    first_key: Tensor | None = None
    sink: Tensor | None = None
    modify_scores: ModifyScores | None = None
    add_to_output: AddToOutput | None = None
    keys: TokenPositions | None = None
    state: Tensor | None = None
    more_keys: tuple[Tensor, Tensor] | None = None
    neighbor_window: int | None = None

    @property
    def extent(self) -> int:
        """Smallest distance from which on `query_bias` and `value_bias` are constant; 0 if there are none."""
        curves = [] if self.query_bias is None else [self.query_bias[1].shape[1]]
        return max([1, *curves, *([] if self.value_bias is None else [len(self.value_bias)])]) - 1

    def scale_of(self, q: Tensor) -> float:
        """Return the factor of q·k."""
        return q.shape[-1] ** -0.5 if self.scale is None else self.scale

    def block(self, rows: slice, columns: slice, seen: Tensor) -> QueryKeyBlock:
        """Return the block of the queries in ``rows`` and the keys in ``columns``, of which ``seen`` are visible."""
        assert self.keys is not None, "this modification needs the positions of the keys"
        state = None if self.state is None else self.state[:, :, columns]
        return QueryKeyBlock(self.keys[rows], self.keys[columns], seen, state)

    def select_queries(self, queries: slice) -> "AttentionSpec":
        """Return the specification for a block of queries, with the values that belong to only these queries."""
        sink = self.sink[:, :, queries] if self.sink is not None and self.sink.ndim == 3 else self.sink
        more_keys = None if self.more_keys is None else (self.more_keys[0][:, :, queries], self.more_keys[1])
        first_key = None if self.first_key is None else self.first_key[:, queries]
        query_bias = None if self.query_bias is None else (self.query_bias[0][:, :, queries], self.query_bias[1])
        return replace(self, sink=sink, more_keys=more_keys, first_key=first_key, query_bias=query_bias)


UNMODIFIED = AttentionSpec()


def query_blocks(queries: int, length: int, block: int, window: int | None) -> list[tuple[slice, slice]]:
    """Return, for each block of queries, its rows and the rows of the keys that at least one of its queries sees.

    Args:
        queries: Number of queries. They have the last rows.
        length: Number of keys.
        block: Largest number of queries in a block.
        window: Queries see only keys at distance < window; None for all.
    """
    rows = [slice(start, min(length, start + block)) for start in range(length - queries, length, block)]
    return [(r, slice(0 if window is None else max(0, r.start - window + 1), r.stop)) for r in rows]


def visible_keys(rows: slice, columns: slice, spec: AttentionSpec, device: torch.device) -> Tensor:
    """Return which keys each query sees, bool (queries, keys), or (B, 1, queries, keys) with ``spec.first_key``.

    A query sees its own and earlier keys from ``spec.first_key`` on, if they are in its window or among the
    ``spec.first_keys`` first of these keys. ``spec.first_key`` has only the queries in ``rows``.
    """
    queries = torch.arange(rows.start, rows.stop, device=device)
    keys = torch.arange(columns.start, columns.stop, device=device)
    distance = queries[:, None] - keys
    first_key = 0 if spec.first_key is None else spec.first_key[:, None, :, None]
    seen = distance >= 0
    if spec.window is not None:
        seen = seen & ((distance < spec.window) | (keys < first_key + spec.first_keys))
    return seen if spec.first_key is None else seen & (keys >= first_key)


def scores(
    q: Tensor, k: Tensor, spec: AttentionSpec, rows: slice, columns: slice, product: Callable[[Tensor, Tensor], Tensor]
) -> Tensor:
    """Return the products (B, H, queries, keys) of queries (B, H, queries, δ) and keys (B, H, keys, δ).

    Args:
        q: Queries.
        k: Keys, repeated for all query heads.
        spec: If ``neighbor_window`` is set, it determines which pairs use the first halves of q and k.
        rows: Rows of the queries.
        columns: Rows of the keys.
        product: Function that multiplies queries and keys: whole vectors, or halves with ``neighbor_window``.
    """
    if spec.neighbor_window is None:
        return product(q, k)
    near, far = map(product, q.chunk(2, -1), k.chunk(2, -1))
    all_pairs = torch.ones(near.shape[-2:], dtype=torch.bool, device=q.device)
    return torch.where(all_pairs.tril(rows.start - columns.start - spec.neighbor_window), far, near)


def add_output_terms(
    out: Tensor, p: Tensor, v: Tensor, spec: AttentionSpec, rows: slice, columns: slice, seen: Tensor
) -> Tensor:
    """Add the terms of ``spec.value_bias`` and ``spec.add_to_output`` to the output of a block, in its dtype.

    ``p`` are the probabilities (B, H, queries, keys), without those of additional keys, and ``v`` the values. The terms
    are computed in the dtype of ``p``.
    """
    if spec.value_bias is not None:
        out = (out + value_bias_term(p, spec.value_bias, spec.block(rows, columns, seen))).to(out.dtype)
    if spec.add_to_output is not None:
        out = (out + spec.add_to_output(p, v.to(p.dtype), spec.block(rows, columns, seen))).to(out.dtype)
    return out


def sink_of_queries(sink: Tensor) -> Tensor:
    """Return a sink (H,) as (H, 1), and a sink (B, H, Tq) unchanged; both broadcast with (B, H, Tq)."""
    return sink if sink.ndim == 3 else sink[:, None]


def repeat_for_query_heads(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    """Repeat keys (B, G, Tk, δ) and values (B, G, Tk, δ') for all H heads of ``q``; (B, H, Tk, δ), (B, H, Tk, δ')."""
    repeats = q.shape[1] // k.shape[1]
    return k.repeat_interleave(repeats, 1), v.repeat_interleave(repeats, 1)


def merge(near: Tensor, near_lse: Tensor, far: Tensor, far_lse: Tensor) -> tuple[Tensor, Tensor]:
    """Merge attention to two sets of keys by the log-sum-exps of their scores.

    Each set has a factor of its own. One minus a factor near 1 would have an error of 6e-8, which is much compared with
    the probability of a few near keys among 100,000, whose values do not cancel as those of the far keys do.

    Args:
        near: Output for the first keys, (B, H, Tq, δ).
        near_lse: Log-sum-exp of their scores, (B, H, Tq) fp32 or fp64.
        far: Output for the other keys.
        far_lse: Log-sum-exp of their scores.

    Returns:
        Output and log-sum-exp for all keys, in the dtype of the log-sum-exps.
    """
    difference = (far_lse - near_lse)[..., None]
    return torch.sigmoid(-difference) * near + torch.sigmoid(difference) * far, torch.logaddexp(near_lse, far_lse)

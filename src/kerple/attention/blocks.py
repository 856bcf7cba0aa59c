"""Attention in blocks of queries, for what no fused kernel takes: weights by distance, scores that tokens decide.

A block of queries meets the keys it may see, so a tensor of scores is (B, H, block, T) at most. In training, a call of
more than `KEPT` scores computes every block again in the backward pass instead of keeping it: for one extra forward,
memory stays O(block · T).
"""

import math
from functools import partial

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from kerple.attention.reference import Mix, Values, for_query_heads
from kerple.positions.products import precise, product
from kerple.positions.token_positions import AttentionWeights, table_block

QUERIES_AT_ONCE = 128  # queries
KEPT = 2**22  # scores of a call: the tensors of so many, of 16 MiB each, are kept for the backward pass


def attend_blocks(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    scale: float | None = None,
    table: Tensor | None = None,
    weight: Tensor | None = None,
    window: int | None = None,
    sink: Tensor | None = None,
    mix: Mix | None = None,
    values: Values | None = None,
    block: int | None = None,
) -> Tensor:
    """Causal attention with everything `kerple.attention.attend` can add to it; same arguments, any device.

    Scores and softmax are fp32 (fp64 for fp64 input); probabilities are cast to the dtype of ``v`` before they meet it.
    ``block`` queries are taken at once, `QUERIES_AT_ONCE` if None. Time is O(Tq · min(Tk, window + block)).
    """
    k, v = for_query_heads(q, k, v)
    first, length, block = k.shape[2] - q.shape[2], k.shape[2], block or QUERIES_AT_ONCE
    starts = range(first, length, block)
    recompute = len(starts) > 1 and torch.is_grad_enabled() and q.shape[:3].numel() * length > KEPT
    out = []
    # the largest block first: no freed block of scores is large enough for the next, so memory would exceed T × T
    for start in reversed(starts):
        rows = slice(start, min(length, start + block))
        columns = slice(0 if window is None else max(0, start - window + 1), rows.stop)
        here = slice(rows.start - first, rows.stop - first)
        run = partial(attend_block, rows=rows, columns=columns, window=window, scale=scale, mix=mix, values=values)
        own = sink[:, :, here] if sink is not None and sink.ndim == 3 else sink
        tensors = (q[:, :, here], k[:, :, columns], v[:, :, columns], table, weight, own)
        out.append(checkpoint(run, *tensors, use_reentrant=False) if recompute else run(*tensors))
    return torch.cat(out[::-1], 2)


def attend_block(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    table: Tensor | None,
    weight: Tensor | None,
    sink: Tensor | None,
    rows: slice,
    columns: slice,
    window: int | None,
    scale: float | None,
    mix: Mix | None,
    values: Values | None,
) -> Tensor:
    """One block: q (B, H, rows, δ) against k and v (B, H, columns, δ); (B, H, rows, δ)."""
    queries, keys = q.shape[2], k.shape[2]
    distance = torch.arange(rows.start, rows.stop, device=q.device)[:, None] - torch.arange(
        columns.start, columns.stop, device=q.device
    )
    seen = distance >= 0 if window is None else (distance >= 0) & (distance < window)
    s = _products(q, k, q.shape[-1] ** -0.5 if scale is None else scale)  # (B, H, rows, columns)
    if weight is not None:
        s = s * table_block(weight, queries, keys)
    if table is not None:
        s = s + table_block(table, queries, keys)
    if mix is not None:
        mixed = mix(s, q, k, rows, columns, seen)
        if isinstance(mixed, AttentionWeights):
            return _output(mixed.p, v, rows, columns, seen, values)
        s, more = mixed if isinstance(mixed, tuple) else (mixed, None)
        if more is not None:
            sink = more if sink is None else torch.logaddexp(more, sink if sink.ndim == 3 else sink[:, None])
    s = s.masked_fill(~seen, -math.inf)
    if sink is None:
        p = s.softmax(-1)
    else:
        p = (s - torch.logaddexp(s.logsumexp(-1), sink if sink.ndim == 3 else sink[:, None])[..., None]).exp()
    return _output(p, v, rows, columns, seen, values)


def _output(p: Tensor, v: Tensor, rows: slice, columns: slice, seen: Tensor, values: Values | None) -> Tensor:
    p = p.to(v.dtype)
    with torch.autocast(v.device.type, enabled=False):
        out = torch.matmul(p, v)  # (B, H, rows, δ)
    return out if values is None else (out + values(p, v, rows, columns, seen)).to(out.dtype)


def _products(q: Tensor, k: Tensor, scale: float) -> Tensor:
    if k.dtype.itemsize > 2:
        return product(precise(q) * scale, k.mT)  # times the rows, not times all pairs
    with torch.autocast(q.device.type, enabled=False):  # TF32, where it is on, rounds no number of 16 bits
        return torch.matmul(q.float(), k.float().mT).mul_(scale)

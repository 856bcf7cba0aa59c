"""Attention in blocks of queries, for what no fused kernel takes: weights by distance, scores from content.

A block of queries meets the keys it may see, so a tensor of scores is (B, H, block, T) at most. In training every block
is computed again in the backward pass instead of being kept: memory stays O(block · T), for one extra forward.
"""

import math
from functools import partial

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from kerple.attention.distances import DistanceBlock
from kerple.attention.reference import Scores, Values

BLOCK = 128  # queries


def attend_blocks(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    table: Tensor | None = None,
    weight: Tensor | None = None,
    window: int | None = None,
    scores: Scores | None = None,
    values: Values | None = None,
    block: int = BLOCK,
) -> Tensor:
    """Causal attention with everything `kerple.attention.attend` can add to it; same arguments, any device.

    Scores and softmax are fp32 (fp64 for fp64 input); probabilities are cast to the dtype of ``v`` before they meet it.
    Time is O(Tq · min(Tk, window + block)).
    """
    first, length = k.shape[2] - q.shape[2], k.shape[2]
    starts = range(first, length, block)
    recompute = len(starts) > 1 and torch.is_grad_enabled()
    out = []
    for start in reversed(starts):  # largest first: growing ones fit in no hole of the heap, which then passes T × T
        rows = slice(start, min(length, start + block))
        columns = slice(0 if window is None else max(0, start - window + 1), rows.stop)
        run = partial(attend_block, rows=rows, columns=columns, window=window, scores=scores, values=values)
        tensors = (q[:, :, rows.start - first : rows.stop - first], k[:, :, columns], v[:, :, columns], table, weight)
        out.append(checkpoint(run, *tensors, use_reentrant=False) if recompute else run(*tensors))
    return torch.cat(out[::-1], 2)


def attend_block(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    table: Tensor | None,
    weight: Tensor | None,
    rows: slice,
    columns: slice,
    window: int | None,
    scores: Scores | None,
    values: Values | None,
) -> Tensor:
    """One block: q (B, H, rows, δ) against k and v (B, H, columns, δ); (B, H, rows, δ)."""
    precise = torch.promote_types(q.dtype, torch.float32)
    with torch.autocast(q.device.type, enabled=False):
        s = torch.matmul(q.to(precise), k.to(precise).mT) * q.shape[-1] ** -0.5  # (B, H, rows, columns)
        if weight is not None:
            s = s * DistanceBlock.apply(weight, rows, columns, 0.0)
        if table is not None:
            s = s + DistanceBlock.apply(table, rows, columns, 0.0)
    if scores is not None:
        s = s + scores(q, k, rows, columns)
    distance = torch.arange(rows.start, rows.stop, device=q.device)[:, None] - torch.arange(
        columns.start, columns.stop, device=q.device
    )
    hidden = distance < 0 if window is None else (distance < 0) | (distance >= window)
    p = s.masked_fill(hidden, -math.inf).softmax(-1).to(v.dtype)
    with torch.autocast(q.device.type, enabled=False):
        out = torch.matmul(p, v)  # (B, H, rows, δ)
    return out if values is None else out + values(p, rows, columns).to(out.dtype)

"""Attention in blocks of queries, for what no fused kernel takes: weights by distance, scores that tokens decide.

A block of queries meets the keys it may see, so a tensor of scores is (B, H, block, T) at most. In training, a call of
more than `LARGEST_STORED` scores computes every block again in the backward pass instead of storing it: for one extra
forward, memory stays O(block · T).
"""

import math

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from kerple.attention.spec import UNMODIFIED, AttentionSpec, for_query_heads, scores, sink_of_queries, visible_keys
from kerple.positions.products import precise, product
from kerple.positions.token_positions import AttentionWeights, table_block

QUERIES_AT_ONCE = 128  # queries
LARGEST_STORED = 2**22  # scores of a call; up to this number, 16 MiB in fp32, are stored for the backward pass


def attend_blocks(
    q: Tensor, k: Tensor, v: Tensor, spec: AttentionSpec = UNMODIFIED, block: int | None = None
) -> Tensor:
    """Causal attention with everything in `AttentionSpec`, on any device; see `kerple.attention.attend`.

    Scores and softmax are fp32 (fp64 for fp64 input); probabilities are cast to the dtype of ``v`` before they meet it.
    ``block`` queries are taken at once, `QUERIES_AT_ONCE` if None. Time is O(Tq · min(Tk, window + block)).
    """
    k, v = for_query_heads(q, k, v)
    first, length, block = k.shape[2] - q.shape[2], k.shape[2], block or QUERIES_AT_ONCE
    window = None if spec.first else spec.window
    starts = range(first, length, block)
    recompute = len(starts) > 1 and torch.is_grad_enabled() and q.shape[:3].numel() * length > LARGEST_STORED
    out = []
    # the largest block first, so that each block of scores fits into the memory that the one before it has freed
    for start in reversed(starts):
        rows = slice(start, min(length, start + block))
        columns = slice(0 if window is None else max(0, start - window + 1), rows.stop)
        queries = slice(rows.start - first, rows.stop - first)
        block_spec = spec.of_queries(queries)
        arguments = (q[:, :, queries], k[:, :, columns], v[:, :, columns], block_spec, rows, columns)
        out.append(checkpoint(attend_block, *arguments, use_reentrant=False) if recompute else attend_block(*arguments))
    return torch.cat(out[::-1], 2)


def attend_block(q: Tensor, k: Tensor, v: Tensor, spec: AttentionSpec, rows: slice, columns: slice) -> Tensor:
    """One block: q (B, H, rows, δ) against k and v (B, H, columns, δ); (B, H, rows, δ)."""
    queries, keys = q.shape[2], k.shape[2]
    seen = visible_keys(rows, columns, spec, q.device)
    scale = q.shape[-1] ** -0.5 if spec.scale is None else spec.scale
    s = scores(q, k, spec, rows, columns, lambda a, b: _products(a, b, scale))  # (B, H, rows, columns)
    if spec.weight is not None:
        s = s * table_block(spec.weight, queries, keys)
    if spec.table is not None:
        s = s + table_block(spec.table, queries, keys)
    sink, p = spec.sink, None
    if spec.modify_scores is not None:
        modified = spec.modify_scores(s, q, k, rows, columns, seen)
        if isinstance(modified, AttentionWeights):
            p = modified.p
        elif isinstance(modified, tuple):
            s, more = modified
            sink = more if sink is None else torch.logaddexp(more, sink_of_queries(sink))
        else:
            s = modified
    if p is None:
        s = s.masked_fill(~seen, -math.inf)
        if spec.more_keys is not None:
            s, v = torch.cat([spec.more_keys[0], s], -1), torch.cat([spec.more_keys[1].to(v.dtype), v], 2)
        if sink is None:
            p = s.softmax(-1)
        else:
            p = (s - torch.logaddexp(s.logsumexp(-1), sink_of_queries(sink))[..., None]).exp()
    p = p.to(v.dtype)
    with torch.autocast(v.device.type, enabled=False):
        out = torch.matmul(p, v)  # (B, H, rows, δ)
    if spec.add_to_output is None:
        return out
    return (out + spec.add_to_output(p, v, rows, columns, seen)).to(out.dtype)


def _products(q: Tensor, k: Tensor, scale: float) -> Tensor:
    if k.dtype.itemsize > 2:
        return product(precise(q) * scale, k.mT)  # fewer multiplications than scaling all pairs
    with torch.autocast(q.device.type, enabled=False):  # TF32, where it is on, rounds no number of 16 bits
        return torch.matmul(q.float(), k.float().mT).mul_(scale)

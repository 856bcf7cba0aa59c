"""Attention in blocks of queries, for modifications that no fused kernel supports, such as replaced scores.

The scores of a block of queries are one tensor (batch, heads, `QUERIES_AT_ONCE`, keys). In training, a call with more
than `LARGEST_STORED` scores does not store them, but computes each block again in the backward pass.
"""

import math
from typing import Any

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from kerple.attention.spec import (
    AttentionSpec,
    add_output_terms,
    query_blocks,
    repeat_for_query_heads,
    scores,
    sink_of_queries,
    visible_keys,
)
from kerple.base.errors import require
from kerple.positions.fp32_matmul import precise, product
from kerple.positions.token_positions import AttentionWeights, add_key_bias, add_query_bias, table_block

QUERIES_AT_ONCE = 128
LARGEST_STORED = 2**22  # largest number of scores of a call (16 MiB in fp32) that is stored for the backward pass


def attend_blocks(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    spec: AttentionSpec,
    queries_at_once: int | None = None,
    largest_stored: int | None = None,
) -> Tensor:
    """Causal attention with all modifications of `AttentionSpec`, on any device.

    Arguments and result are those of `kerple.attention.attend`, but arguments are not checked. A block has at most
    ``queries_at_once`` queries; None is `QUERIES_AT_ONCE`. At most ``largest_stored`` scores are stored in training;
    None is `LARGEST_STORED`. Scores, softmax and their gradients are fp32 (fp64 for fp64 input). Probabilities are
    rounded to the dtype of ``v``. A query is compared with all keys up to the end of its block. With a window and
    without ``spec.first_keys``, these are at most as many keys as window and block have together.
    """
    k, v = repeat_for_query_heads(q, k, v)
    length, first_query = k.shape[2], k.shape[2] - q.shape[2]
    window = None if spec.first_keys else spec.window
    blocks = query_blocks(q.shape[2], length, queries_at_once or QUERIES_AT_ONCE, window)
    widest = max(columns.stop - columns.start for _, columns in blocks)
    largest_stored = LARGEST_STORED if largest_stored is None else largest_stored
    several = len(blocks) > 1 and torch.is_grad_enabled()
    recompute = several and q.shape[:3].numel() * widest > largest_stored
    if several:  # autograd adds the gradients of the blocks in the dtype of these tensors
        k, v = precise(k), precise(v)
    out = []
    # the block with the most keys comes first, so that each later block fits into memory that was freed before it
    for rows, columns in reversed(blocks):
        queries = slice(rows.start - first_query, rows.stop - first_query)
        block_spec = spec.select_queries(queries)
        arguments = (q[:, :, queries], k[:, :, columns], v[:, :, columns], block_spec, rows, columns)
        out.append(checkpoint(attend_block, *arguments, use_reentrant=False) if recompute else attend_block(*arguments))
    return torch.cat(out[::-1], 2)


def attend_block(q: Tensor, k: Tensor, v: Tensor, spec: AttentionSpec, rows: slice, columns: slice) -> Tensor:
    """Return the output (B, H, queries, δ') of one block.

    Args:
        q: Queries (B, H, queries, δ).
        k: Keys (B, H, keys, δ) in the dtype of q, or in a wider one.
        v: Values (B, H, keys, δ') in the dtype of k.
        spec: Modifications for these queries.
        rows: Indices of these queries among all Tk tokens.
        columns: Indices of these keys among all Tk tokens.
    """
    k, v = k.to(q.dtype), v.to(q.dtype)  # here, so that a checkpoint stores no copies
    seen = visible_keys(rows, columns, spec, q.device)
    p = block_probabilities(q, k, spec, rows, columns, seen)
    values = v if spec.more_keys is None else torch.cat([spec.more_keys[1].to(v.dtype), v], 2)
    with torch.autocast(v.device.type, enabled=False):
        out = _WeightedSum.apply(p, values)
    return add_output_terms(out, p, v, spec, rows, columns, seen)  # (B, H, queries, δ')


def block_probabilities(q: Tensor, k: Tensor, spec: AttentionSpec, rows: slice, columns: slice, seen: Tensor) -> Tensor:
    """Return the probabilities of F additional keys and of the keys of a block, (B, H, queries, F + keys)."""
    queries, keys, scale = q.shape[2], k.shape[2], spec.scale_of(q)
    s = scores(q, k, spec, rows, columns, lambda a, b: _products(a, b, scale))  # (B, H, queries, keys)
    if spec.score_scale is not None:
        s = s * table_block(spec.score_scale, queries, keys)
    if spec.table is not None:
        s = s + table_block(spec.table, queries, keys)
    if spec.key_bias is not None:
        s = add_key_bias(s, spec.key_bias[:, :, columns])
    if spec.query_bias is not None:
        s = add_query_bias(s, *spec.query_bias, spec.block(rows, columns, seen))
    sink = spec.sink
    if spec.modify_scores is not None:
        modified = spec.modify_scores(s, q, k, spec.block(rows, columns, seen))
        if isinstance(modified, AttentionWeights):
            given = "a sink and a strategy that replaces the softmax, such as StickBreaking"
            require(sink is None, "model", given, "one of them")
            return modified.p
        s, new_sink = modified if isinstance(modified, tuple) else (modified, None)
        if new_sink is not None:
            sink = new_sink if sink is None else torch.logaddexp(new_sink, sink_of_queries(sink))
    s = s.masked_fill(~seen, -math.inf)
    if spec.more_keys is not None:
        s = torch.cat([spec.more_keys[0], s], -1)
    if sink is None:
        return s.softmax(-1)
    return (s - torch.logaddexp(s.logsumexp(-1), sink_of_queries(sink))[..., None]).exp()


def _products(q: Tensor, k: Tensor, scale: float | None = None) -> Tensor:
    """Return the products (…, queries, keys) times ``scale``, in fp32 or fp64. None is 1."""
    if k.dtype.itemsize > 2:  # scaling q takes fewer multiplications than scaling the scores
        return product(q if scale is None else precise(q) * scale, k.mT)
    # 16-bit numbers do not need `product`: TF32 represents them exactly, and this context switches autocast off
    with torch.autocast(q.device.type, enabled=False):
        s = torch.matmul(q.float(), k.float().mT)
        return s if scale is None else s.mul_(scale)


class _WeightedSum(torch.autograd.Function):
    """Product of probabilities, rounded to the dtype of the values, and values.

    The gradient of the probabilities is neither rounded nor computed in TF32, because the softmax subtracts its mean
    from it. The difference may be much smaller than the mean.
    """

    @staticmethod
    def forward(ctx: Any, p: Tensor, values: Tensor) -> Tensor:
        ctx.save_for_backward(p, values)
        return torch.matmul(p.to(values.dtype), values)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor]:
        p, values = ctx.saved_tensors
        with torch.autocast(grad.device.type, enabled=False):
            return _products(grad, values), torch.matmul(p.to(values.dtype).mT, grad)

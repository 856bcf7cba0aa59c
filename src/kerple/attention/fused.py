"""Fused attention: calls of kernels that do not store the scores of all queries and keys."""

from collections.abc import Callable
from dataclasses import replace
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor

from kerple.attention.cpu import table_attention
from kerple.attention.cpu_backward import key_bias_terms
from kerple.attention.query_block_attention import attend_blocks
from kerple.attention.spec import (
    AttentionSpec,
    merge,
    query_blocks,
    repeat_for_query_heads,
    sink_of_queries,
    visible_keys,
)
from kerple.positions.fp32_matmul import precise, product

NEAR_QUERIES = 64  # largest number of queries in a block of explicit attention to near keys

Kernel = Callable[[Tensor, Tensor, Tensor, AttentionSpec], tuple[Tensor, Tensor]]
"""Function that returns the output and the log-sum-exp of the scores, with the table and the window of a specification.

Its arguments and the output are those of `kerple.attention.attend`. The log-sum-exp is (B, H, Tq) fp32 or fp64."""


def attend_sdpa(q: Tensor, k: Tensor, v: Tensor, spec: AttentionSpec) -> Tensor:
    """Causal attention without modifications; arguments and result are those of `kerple.attention.attend`."""
    if k.shape[1] < q.shape[1] and q.device.type == "cuda" and q.dtype == torch.float32:
        # torch's fused kernels for G < H need 16-bit input; for fp32 torch would store T × T scores
        k, v = repeat_for_query_heads(q, k, v)
    causal, grouped = q.shape[2] > 1, k.shape[1] < q.shape[1]
    values = pad_to_width(v, q.shape[3])
    with torch.autocast(q.device.type, enabled=False):  # `attend` has cast all arguments; fp32 would become bf16 again
        out = F.scaled_dot_product_attention(q, k, values, is_causal=causal, scale=spec.scale_of(q), enable_gqa=grouped)
    return out[..., : v.shape[3]]


def attend_fused(kernel: Kernel, q: Tensor, k: Tensor, v: Tensor, spec: AttentionSpec) -> Tensor:
    """Attention with all modifications that ``kernel`` or a function below supports; see `kerple.attention.attend`."""
    if spec.query_bias is not None or spec.value_bias is not None:
        return attend_near(kernel, q, k, v, spec)
    out, lse = (kernel if spec.neighbor_window is None else partial(attend_halves, kernel))(q, k, v, spec)
    if spec.sink is None:
        return out
    key_probability = torch.sigmoid(lse - sink_of_queries(spec.sink))[..., None]  # sum over keys, (B, H, Tq, 1)
    return (out * key_probability).to(out.dtype)


def attend_near(kernel: Kernel, q: Tensor, k: Tensor, v: Tensor, spec: AttentionSpec) -> Tensor:
    """Explicit attention to keys at distances below ``spec.extent``, and attention by ``kernel`` to farther keys.

    All farther keys of a query have the same bias. Explicit attention gets their log-sum-exp as a sink, and an
    additional value of 1, so that it also returns the sum of its probabilities.
    """
    far, far_lse = attend_far(kernel, q, k, v, spec, spec.extent)
    if spec.query_bias is not None:
        features, curves = spec.query_bias
        far_lse = far_lse + product(features, curves[:, -1:])[..., 0]
    if spec.value_bias is not None:
        far = far + spec.value_bias[-1]
    sink = far_lse if spec.sink is None else torch.logaddexp(far_lse, sink_of_queries(spec.sink))
    vectors = None if spec.value_bias is None else F.pad(spec.value_bias, (0, 1))
    near_spec = replace(spec, window=spec.extent, sink=sink, value_bias=vectors)
    near = attend_blocks(precise(q), precise(k), F.pad(precise(v), (0, 1), value=1.0), near_spec, NEAR_QUERIES)
    out, probability = near.split([v.shape[3], 1], -1)
    rest = 1 - probability  # probability of far keys and of a sink
    return out + far * (rest if spec.sink is None else rest * torch.exp(far_lse - sink)[..., None])


def attend_far(
    kernel: Kernel, q: Tensor, k: Tensor, v: Tensor, spec: AttentionSpec, distance: int
) -> tuple[Tensor, Tensor]:
    """Attention to the keys at ``distance`` or more, which must be less than the number of keys and than the window.

    Returns:
        The output (B, H, Tq, δ') in the dtype of q, and the log-sum-exp (B, H, Tq), -inf for queries without such keys.
    """
    keys = k.shape[2] - distance
    queries = min(q.shape[2], keys)  # only the last queries see such keys
    table, score_scale = (None if x is None else x[:, distance:] for x in (spec.table, spec.score_scale))
    window = None if spec.window is None else spec.window - distance
    first_key = hidden = None
    if spec.first_key is not None:
        first_key, last = spec.first_key[:, -queries:], torch.arange(keys - queries, keys, device=q.device)
        hidden, first_key = first_key > last, first_key.minimum(last)
    # attention is causal after the last ``distance`` keys are removed: query m sees the keys up to m - ``distance``
    far_spec = replace(spec, table=table, score_scale=score_scale, window=window, first_key=first_key)
    out, lse = kernel(q[:, :, -queries:], k[:, :, :keys], v[:, :, :keys], far_spec)
    lse = lse if hidden is None else lse.masked_fill(hidden[:, None], -torch.inf)
    missing = q.shape[2] - queries
    return F.pad(out, (0, 0, missing, 0)), F.pad(lse, (missing, 0), value=-torch.inf)


def attend_halves(kernel: Kernel, q: Tensor, k: Tensor, v: Tensor, spec: AttentionSpec) -> tuple[Tensor, Tensor]:
    """Attention to near keys with the first halves of q and k, and to far keys with the second halves.

    Near keys are the last ``spec.neighbor_window`` keys up to the query, and far keys are all earlier keys. The two
    outputs are merged by their log-sum-exps.

    Returns:
        The output (B, H, Tq, δ') in the dtype of q, and the log-sum-exp (B, H, Tq) over all keys.
    """
    assert spec.neighbor_window is not None
    (near_q, far_q), (near_k, far_k) = q.chunk(2, -1), k.chunk(2, -1)
    near, near_lse = kernel(near_q, near_k, v, replace(spec, window=spec.neighbor_window))
    far, far_lse = attend_far(kernel, far_q, far_k, v, spec, spec.neighbor_window)
    out, lse = merge(near, near_lse, far, far_lse)
    return out.to(near.dtype), lse


def cpu_kernel(q: Tensor, k: Tensor, v: Tensor, spec: AttentionSpec) -> tuple[Tensor, Tensor]:
    """The `Kernel` for the CPU: `kerple.attention.cpu.table_attention`, or `attend_one`."""
    if q.shape[2] == 1 and spec.score_scale is None and not torch.is_grad_enabled():
        return attend_one(q, k, v, spec)
    k, values = repeat_for_query_heads(q, k, pad_to_width(v, q.shape[3]))
    dtype = torch.promote_types(q.dtype, torch.float32)
    if spec.table is None:
        # rows with the stride 0, which `expand` would not give a single head
        table = q.new_zeros(k.shape[2], dtype=dtype).as_strided((q.shape[1], k.shape[2]), (0, 1))
    else:  # to the kernels, rows with the stride 0 mean that there is no table
        table = spec.table.contiguous()
    arguments = spec.window, spec.scale_of(q), spec.first_key, spec.key_bias, spec.score_scale
    out, lse = table_attention(q, k, values, table, *arguments)
    return out[..., : v.shape[3]], lse


def attend_one(q: Tensor, k: Tensor, v: Tensor, spec: AttentionSpec) -> tuple[Tensor, Tensor]:
    """The `Kernel` for one query without gradients, as in generation.

    The heads that share a key head become rows of torch's kernel, so that keys and values are not copied for each head.
    """
    rows = q.unflatten(1, (k.shape[1], -1))[:, :, :, 0]  # (B, G, H / G, δ)
    [(row, seen)] = query_blocks(1, k.shape[2], 1, spec.window)
    k, values = k[:, :, seen], pad_to_width(v[:, :, seen], q.shape[3])
    length, dtype = k.shape[2], torch.promote_types(q.dtype, torch.float32)
    bias = q.new_zeros(1, 1, length, dtype=dtype) if spec.table is None else spec.table[None, :, :length].flip(-1)
    if spec.key_bias is not None:
        bias = bias + key_bias_terms(spec.key_bias[..., -1:], spec.key_bias[..., seen], True, dtype)[0][:, :, 0]
    if spec.first_key is not None:
        bias = bias.masked_fill(~visible_keys(row, seen, spec, q.device)[:, :, 0], -torch.inf)
    bias = bias.expand(*q.shape[:2], -1).unflatten(1, rows.shape[1:3])
    attention = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu  # needs consecutive numbers in each row
    inputs = (x if x.stride(-1) == 1 else x.contiguous() for x in (rows, k, values))
    out, lse = attention(*inputs, 0.0, False, attn_mask=bias, scale=spec.scale_of(q))
    return out[..., : v.shape[3]].flatten(1, 2)[:, :, None], lse.flatten(1, 2)[..., None]


def gpu_kernel(q: Tensor, k: Tensor, v: Tensor, spec: AttentionSpec) -> tuple[Tensor, Tensor]:
    """The `Kernel` for GPUs: FlexAttention, with `kerple.attention.cuda`."""
    from kerple.attention.cuda import attend_flex  # imported here, because this import is slow

    modifications = spec.sink, spec.neighbor_window, spec.query_bias, spec.value_bias
    differentiable_lse = any(x is not None for x in modifications)
    return attend_flex(q, k, v, spec.table, spec.window, spec.scale_of(q), differentiable_lse, spec.first_key)


def pad_to_width(v: Tensor, width: int) -> Tensor:
    """Append zeros to values (…, δ') up to ``width`` >= δ', because torch's kernels need the width of the queries."""
    return F.pad(v, (0, width - v.shape[3])) if v.shape[3] < width else v

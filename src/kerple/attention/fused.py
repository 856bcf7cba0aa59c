"""Fused attention: calls of kernels that do not store the scores of all queries and keys."""

from collections.abc import Callable
from dataclasses import replace
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor

from kerple.attention.cpu import table_attention
from kerple.attention.spec import AttentionSpec, repeat_for_query_heads, sink_of_queries

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
    out = F.scaled_dot_product_attention(q, k, values, is_causal=causal, scale=spec.scale_of(q), enable_gqa=grouped)
    return out[..., : v.shape[3]]


def attend_fused(kernel: Kernel, q: Tensor, k: Tensor, v: Tensor, spec: AttentionSpec) -> Tensor:
    """Attention with a table, a window, a sink and halves by ``kernel``; see `kerple.attention.attend`."""
    out, lse = (kernel if spec.neighbor_window is None else partial(attend_halves, kernel))(q, k, v, spec)
    if spec.sink is None:
        return out
    key_probability = torch.sigmoid(lse - sink_of_queries(spec.sink))[..., None]  # sum over keys, (B, H, Tq, 1)
    return (out * key_probability).to(out.dtype)


def attend_halves(kernel: Kernel, q: Tensor, k: Tensor, v: Tensor, spec: AttentionSpec) -> tuple[Tensor, Tensor]:
    """Attention to near keys with the first halves of q and k, and to far keys with the second halves.

    Near keys are the last ``spec.neighbor_window`` keys up to the query, and far keys are all earlier keys. The two
    outputs are merged by their log-sum-exps. Attention to far keys is also causal: query m sees the keys up to
    m - ``neighbor_window``.

    Returns:
        The output (B, H, Tq, δ') in the dtype of q, and the log-sum-exp (B, H, Tq) over all keys.
    """
    neighbors = spec.neighbor_window
    assert neighbors is not None
    (near_q, far_q), (near_k, far_k) = q.chunk(2, -1), k.chunk(2, -1)
    near, near_lse = kernel(near_q, near_k, v, replace(spec, window=neighbors))
    keys = k.shape[2] - neighbors
    queries = min(q.shape[2], keys)  # only the last queries see far keys
    far_spec = replace(
        spec,
        table=None if spec.table is None else spec.table[:, neighbors:],
        window=None if spec.window is None else spec.window - neighbors,
    )
    far, far_lse = kernel(far_q[:, :, -queries:], far_k[:, :, :keys], v[:, :, :keys], far_spec)
    far = F.pad(far, (0, 0, q.shape[2] - queries, 0))
    far_lse = F.pad(far_lse, (q.shape[2] - queries, 0), value=-torch.inf)
    fraction = torch.sigmoid(far_lse - near_lse)[..., None]  # probability of all far keys, (B, H, Tq, 1)
    out = torch.lerp(near.to(fraction.dtype), far.to(fraction.dtype), fraction)
    return out.to(near.dtype), torch.logaddexp(near_lse, far_lse)


def cpu_kernel(q: Tensor, k: Tensor, v: Tensor, spec: AttentionSpec) -> tuple[Tensor, Tensor]:
    """The `Kernel` for the CPU: `kerple.attention.cpu.table_attention`."""
    k, values = repeat_for_query_heads(q, k, pad_to_width(v, q.shape[3]))
    dtype = torch.promote_types(q.dtype, torch.float32)
    table = q.new_zeros(1, k.shape[2], dtype=dtype).expand(q.shape[1], -1) if spec.table is None else spec.table
    out, lse = table_attention(q, k, values, table, spec.window, spec.scale_of(q), spec.first_key)
    return out[..., : v.shape[3]], lse


def gpu_kernel(q: Tensor, k: Tensor, v: Tensor, spec: AttentionSpec) -> tuple[Tensor, Tensor]:
    """The `Kernel` for GPUs: FlexAttention, with `kerple.attention.cuda`."""
    from kerple.attention.cuda import attend_flex  # imported here, because this import is slow

    differentiable_lse = spec.sink is not None or spec.neighbor_window is not None
    return attend_flex(q, k, v, spec.table, spec.window, spec.scale_of(q), differentiable_lse, spec.first_key)


def pad_to_width(v: Tensor, width: int) -> Tensor:
    """Append zeros to values (…, δ') up to ``width`` >= δ', because torch's kernels need the width of the queries."""
    return F.pad(v, (0, width - v.shape[3])) if v.shape[3] < width else v

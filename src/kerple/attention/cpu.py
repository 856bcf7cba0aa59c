"""Causal attention on the CPU with a table of biases by distance, (H, T), without a T × T tensor.

The forward pass calls torch's fused kernel once per block of queries. Query m and key n have the distance d = m - n. If
the order of the queries is reversed, the distance is constant along the anti-diagonals of the mask (a Hankel matrix).
The mask is then a view with strides (1, 1) of a vector, without a copy. The backward pass computes the scores again,
tile by tile (`kerple.attention.cpu_backward`).
"""

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from kerple.attention.cpu_backward import TiledBackward, bias_line, slices
from kerple.attention.cpu_documents import TOGETHER, attend_documents, document_gradients
from kerple.attention.cpu_forward import TiledForward, attend_key_bias, hankel_view
from kerple.attention.spec import AttentionSpec, query_blocks


@torch.library.custom_op("kerple::table_attention", mutates_args=(), device_types="cpu")
def table_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    table: Tensor,
    window: int | None,
    scale: float,
    first_key: Tensor | None = None,
    key_bias: Tensor | None = None,
    score_scale: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Causal attention with an attention bias by distance.

    Args:
        q: Queries (B, H, Tq, δ): batch, heads, queries, head dimension. They belong to the last Tq of the Tk keys.
        k: Keys (B, H, Tk, δ) in the dtype of q.
        v: Values (B, H, Tk, δ) in the dtype of q.
        table: Attention bias of each head at distance d = 0, 1, …, (H, >= Tk), fp32 (fp64 for fp64 queries).
        window: Queries see only keys at distance < window; None for all.
        scale: Factor of q·k.
        first_key: Row of the first key that each query sees, (B, Tq) int64; None for the first row. See
            `AttentionSpec.first_key`.
        key_bias: Bias of each key, (B, H, Tk) fp32 or fp64; see `AttentionSpec.key_bias`.
        score_scale: Factor of the scaled scores at distance d = 0, 1, …, (H, >= Tk), in the dtype of the table.

    Returns:
        The output (B, H, Tq, δ) in the dtype of q, and the log-sum-exp of the scores, (B, H, Tq), in the dtype of the
        table. Both are differentiable.
    """
    # the kernel reads wrong memory, without an error, if the entries of a row are not contiguous
    q, k, v = (x if x.stride(-1) == 1 else x.contiguous() for x in (q, k, v))
    spec = AttentionSpec(scale=scale, score_scale=score_scale, key_bias=key_bias, window=window, first_key=first_key)
    only_key_bias = not table.stride(0) and window is None and first_key is None and score_scale is None
    if key_bias is not None and only_key_bias:
        return attend_key_bias(q, k, v, table, scale, key_bias)
    if key_bias is not None or score_scale is not None:
        return TiledForward(q, k, v, table, spec).run()
    if first_key is not None:
        return attend_documents(q, k, v, table, window, scale, first_key)
    batch, heads, queries, dim = q.shape
    length = k.shape[2]
    # 768 or more queries are divided into larger tiles, which are faster. A larger block also computes more scores of
    # hidden keys. This costs more time than the larger tiles save if the input or the window is short.
    block = 768 if queries >= 2048 and (window is None or window >= 4096) else 256
    line = bias_line(table, length, block, window)
    out, lse = q.new_empty(batch, heads, queries, dim), table.new_empty(batch, heads, queries)
    for rows, columns in query_blocks(queries, length, block, window):
        indices = slice(rows.start - length + queries, rows.stop - length + queries)
        mask = hankel_view(line, length, rows, columns).expand(batch, -1, -1, -1)
        block_out, block_lse = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
            q[:, :, indices].flip(2), k[:, :, columns], v[:, :, columns], 0.0, False, attn_mask=mask, scale=scale
        )
        out[:, :, indices] = block_out.flip(2)
        lse[:, :, indices] = block_lse.flip(2)
    return out, lse


@torch.library.custom_op("kerple::table_attention_backward", mutates_args=(), device_types="cpu")
def table_attention_backward(
    tensors: Sequence[Tensor],
    grad: Tensor,
    grad_lse: Tensor,
    window: int | None,
    scale: float,
    learned: bool,
    first_key: Tensor | None = None,
    key_bias: Tensor | None = None,
    score_scale: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Return the gradients of q, k, v, the table, the key bias and the score scale, each in the dtype of its tensor.

    The arguments are those of `table_attention` and `TiledBackward`. With ``first_key`` it processes the sequences of
    long inputs one by one, because each has other documents. Without gradients of the table and the log-sum-exp,
    torch's kernel is faster.
    """
    q, k, v, table, out, lse = tensors
    plain = key_bias is None and score_scale is None
    spec = AttentionSpec(scale=scale, score_scale=score_scale, key_bias=key_bias, window=window, first_key=first_key)
    if first_key is None or (k.shape[2] <= TOGETHER and learned):
        return TiledBackward(tensors, grad, grad_lse, spec, learned).run()
    if plain and not learned and not grad_lse.any():
        q, k, v, grad = (x if x.stride(-1) == 1 else x.contiguous() for x in (q, k, v, grad))
        dq, dk, dv = document_gradients([q, k, v, table, out, lse], grad, window, scale, first_key)
        return dq, dk, dv, torch.zeros_like(table), table.new_empty(0), table.new_empty(0)
    gradients = list[tuple[Tensor, ...]]()
    for b in slices(0, len(q), 1):
        spec_b = replace(spec, first_key=first_key[b], key_bias=None if key_bias is None else key_bias[b])
        tensors_b = [q[b], k[b], v[b], table, out[b], lse[b]]
        gradients.append(TiledBackward(tensors_b, grad[b], grad_lse[b], spec_b, learned).run())
    dqs, dks, dvs, dtables, dbiases, dscales = zip(*gradients, strict=True)
    dtable, dscale = (torch.stack(x).sum(0) for x in (dtables, dscales))
    return torch.cat(dqs), torch.cat(dks), torch.cat(dvs), dtable, torch.cat(dbiases), dscale


@table_attention.register_fake
def _(q, k, v, table, window, scale, first_key=None, key_bias=None, score_scale=None):
    return q.new_empty(q.shape), table.new_empty(q.shape[:3])


@table_attention_backward.register_fake
def _(tensors, grad, grad_lse, window, scale, learned, first_key=None, key_bias=None, score_scale=None):
    tensors = [*tensors[:4], *(tensors[3].new_empty(0) if x is None else x for x in (key_bias, score_scale))]
    return tuple(torch.empty_like(x, memory_format=torch.contiguous_format) for x in tensors)


def _save(ctx, inputs, output) -> None:
    *tensors, ctx.window, ctx.scale, first_key, key_bias, score_scale = inputs
    ctx.save_for_backward(*tensors, *output, first_key, key_bias, score_scale)


def _backward(ctx, grad: Tensor, grad_lse: Tensor):
    *tensors, first_key, key_bias, score_scale = ctx.saved_tensors
    arguments = ctx.window, ctx.scale, ctx.needs_input_grad[3], first_key, key_bias, score_scale
    *gradients, dbias, dscale = table_attention_backward(tensors, grad, grad_lse, *arguments)
    learned = (None if x is None else dx for x, dx in ((key_bias, dbias), (score_scale, dscale)))
    return *gradients, None, None, None, *learned


table_attention.register_autograd(_backward, setup_context=_save)

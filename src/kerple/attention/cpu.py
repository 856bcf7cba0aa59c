"""Causal attention on the CPU with a table of biases by distance, (H, T), without a T × T tensor.

The forward pass calls torch's fused kernel once per block of queries. Query m and key n have the distance d = m - n. If
the order of the queries is reversed, the distance is constant along the anti-diagonals of the mask (a Hankel matrix).
The mask is then a view with strides (1, 1) of a vector, without a copy. The backward pass computes the scores again,
tile by tile (`kerple.attention.cpu_backward`).
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from kerple.attention.cpu_backward import TiledBackward, bias_line
from kerple.attention.cpu_documents import TOGETHER, attend_documents, document_gradients
from kerple.attention.spec import query_blocks


def forward_block(queries: int, window: int | None) -> int:
    """Return the number of queries per call of the fused kernel: 768 for long inputs and windows, and 256 for others.

    The kernel divides 768 or more queries into larger tiles, which are faster. A larger block also computes more scores
    of hidden keys. This costs more time than the larger tiles save if the input or the window is short.
    """
    return 768 if queries >= 2048 and (window is None or window >= 4096) else 256


@torch.library.custom_op("kerple::table_attention", mutates_args=(), device_types="cpu")
def table_attention(
    q: Tensor, k: Tensor, v: Tensor, table: Tensor, window: int | None, scale: float, first_key: Tensor | None = None
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

    Returns:
        The output (B, H, Tq, δ) in the dtype of q, and the log-sum-exp of the scores, (B, H, Tq), in the dtype of the
        table. Both are differentiable.
    """
    # the kernel reads wrong memory, without an error, if the entries of a row are not contiguous
    q, k, v = (x if x.stride(-1) == 1 else x.contiguous() for x in (q, k, v))
    if first_key is not None:
        return attend_documents(q, k, v, table, window, scale, first_key)
    batch, heads, queries, dim = q.shape
    length = k.shape[2]
    block = forward_block(queries, window)
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


def hankel_view(line: Tensor, length: int, rows: slice, columns: slice) -> Tensor:
    """Return the biases of a block, (H, queries, keys), as a view of ``line``.

    Args:
        line: Result of `kerple.attention.cpu_backward.bias_line`.
        length: Number of keys.
        rows: Indices of the queries of the block. The first row of the result belongs to the *last* of them.
        columns: Indices of the keys of the block.
    """
    height, width = rows.stop - rows.start, columns.stop - columns.start
    return line.narrow(1, length - rows.stop + columns.start, height + width - 1).unfold(1, width, 1)


@torch.library.custom_op("kerple::table_attention_backward", mutates_args=(), device_types="cpu")
def table_attention_backward(
    tensors: Sequence[Tensor],
    grad: Tensor,
    grad_lse: Tensor,
    window: int | None,
    scale: float,
    learned: bool,
    first_key: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return the gradients of q, k, v and the table, each in the dtype of its tensor.

    The arguments are those of `TiledBackward`. With ``first_key`` it processes the sequences of long inputs one by one,
    because each has other documents. Without gradients of the table and the log-sum-exp, torch's kernel is faster.
    """
    q, k, v, table, out, lse = tensors
    if first_key is None or (k.shape[2] <= TOGETHER and learned):
        return TiledBackward(tensors, grad, grad_lse, window, scale, learned, first_key).run()
    if not learned and not grad_lse.any():
        q, k, v, grad = (x if x.stride(-1) == 1 else x.contiguous() for x in (q, k, v, grad))
        dq, dk, dv = document_gradients([q, k, v, table, out, lse], grad, window, scale, first_key)
        return dq, dk, dv, torch.zeros_like(table)
    gradients = list[tuple[Tensor, ...]]()
    for b in range(len(q)):
        q_b, k_b, v_b, out_b, lse_b, *others = (x[b : b + 1] for x in (q, k, v, out, lse, grad, grad_lse, first_key))
        sequence = [q_b, k_b, v_b, table, out_b, lse_b]
        gradients.append(TiledBackward(sequence, others[0], others[1], window, scale, learned, others[2]).run())
    dqs, dks, dvs, dtables = zip(*gradients, strict=True)
    return torch.cat(dqs), torch.cat(dks), torch.cat(dvs), torch.stack(dtables).sum(0)


@table_attention.register_fake
def _(q, k, v, table, window, scale, first_key=None):
    return q.new_empty(q.shape), table.new_empty(q.shape[:3])


@table_attention_backward.register_fake
def _(tensors, grad, grad_lse, window, scale, learned, first_key=None):
    q, k, v, table, *_ = tensors
    return q.new_empty(q.shape), k.new_empty(k.shape), v.new_empty(v.shape), torch.empty_like(table)


def _save(ctx, inputs, output) -> None:
    *tensors, ctx.window, ctx.scale, first_key = inputs
    ctx.save_for_backward(*tensors, *output, first_key)


def _backward(ctx, grad: Tensor, grad_lse: Tensor):
    *tensors, first_key = ctx.saved_tensors
    options = ctx.window, ctx.scale, ctx.needs_input_grad[3], first_key
    return *table_attention_backward(tensors, grad, grad_lse, *options), None, None, None


table_attention.register_autograd(_backward, setup_context=_save)

"""Causal attention on the CPU with a table of biases by distance, (H, T), without a T × T tensor.

The forward pass calls torch's fused kernel for each block of queries. The queries of a block are in reversed order, so
that the mask is a strided view of a vector made from the table (`hankel`). The backward pass computes the scores
again, tile by tile (`cpu_backward`).
"""

import torch
from torch import Tensor

from kerple.attention.cpu_backward import TiledBackward
from kerple.attention.hankel import hankel_line, hankel_view
from kerple.attention.spec import query_blocks


def forward_block(queries: int, window: int | None) -> int:
    """Return the number of queries per call of the fused kernel.

    Larger blocks are faster in the kernel, but compute more scores that the causal mask hides. They are worth it for
    long inputs without a short window.
    """
    return 768 if queries >= 2048 and (window is None or window >= 4096) else 256


@torch.library.custom_op("kerple::table_attention", mutates_args=(), device_types="cpu")
def table_attention(
    q: Tensor, k: Tensor, v: Tensor, table: Tensor, window: int | None, learned: bool, scale: float
) -> tuple[Tensor, Tensor]:
    """Forward pass of causal attention with an attention bias by distance.

    Args:
        q: (B, H, Tq, δ), the last Tq of the Tk rows.
        k: (B, H, Tk, δ) in the dtype of q.
        v: (B, H, Tk, δ) in the dtype of q.
        table: (H, >= Tk), fp32 (fp64 for fp64 queries).
        window: Only keys at distance < window are seen; None for all.
        learned: Whether the table needs a gradient.
        scale: Factor of q·k.

    Returns:
        The output (B, H, Tq, δ) in the dtype of q, and the log-sum-exp (B, H, Tq) in the dtype of the table. Both are
        differentiable.
    """
    batch, heads, queries, dim = q.shape
    length = k.shape[2]
    block = forward_block(queries, window)
    line = hankel_line(table, length, block, window)
    q, k, v = (x if x.stride(-1) == 1 else x.contiguous() for x in (q, k, v))  # the kernel does not check strides
    out = q.new_empty(batch, heads, queries, dim)
    lse = table.new_empty(batch, heads, queries)
    for rows, columns in query_blocks(queries, length, block, window):
        indices = slice(rows.start - length + queries, rows.stop - length + queries)
        mask = hankel_view(line, length, rows, columns).expand(batch, -1, -1, -1)
        block_out, block_lse = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
            q[:, :, indices].flip(2), k[:, :, columns], v[:, :, columns], 0.0, False, attn_mask=mask, scale=scale
        )
        out[:, :, indices] = block_out.flip(2)
        lse[:, :, indices] = (block_lse if block_lse.shape[1] == heads else block_lse.transpose(1, 2)).flip(2)
    return out, lse


@torch.library.custom_op("kerple::table_attention_backward", mutates_args=(), device_types="cpu")
def table_attention_backward(
    grad: Tensor,
    grad_lse: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    table: Tensor,
    out: Tensor,
    lse: Tensor,
    window: int | None,
    learned: bool,
    scale: float,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return the gradients of q, k, v and the table, each in the dtype of its tensor; see `TiledBackward`."""
    return TiledBackward((q, k, v, table, out, lse), grad, grad_lse, window, learned, scale).run()


@table_attention.register_fake
def _(q, k, v, table, window, learned, scale):
    return q.new_empty(q.shape), table.new_empty(q.shape[:3])


@table_attention_backward.register_fake
def _(grad, grad_lse, q, k, v, table, out, lse, window, learned, scale):
    return q.new_empty(q.shape), k.new_empty(k.shape), v.new_empty(v.shape), torch.empty_like(table)


def _save(ctx, inputs, output) -> None:
    *tensors, ctx.window, ctx.learned, ctx.scale = inputs
    ctx.save_for_backward(*tensors, *output)


def _backward(ctx, grad: Tensor, grad_lse: Tensor):
    grads = table_attention_backward(grad, grad_lse, *ctx.saved_tensors, ctx.window, ctx.learned, ctx.scale)
    return *grads, None, None, None


table_attention.register_autograd(_backward, setup_context=_save)

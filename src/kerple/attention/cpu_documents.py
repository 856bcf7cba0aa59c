"""Attention within documents on the CPU: torch's fused kernel, with documents, biases and window as its mask.

A block of queries is attended to the keys from the first one that its first query sees. Few keys of other documents are
therefore read. The sequences of a batch have different documents, and are attended one by one, except in short inputs.
Arguments are those of `kerple.attention.cpu.table_attention`, whose forward and backward passes call these functions.
"""

from collections.abc import Iterator

import torch
from torch import Tensor

from kerple.attention.cpu_backward import bias_line, slices, toeplitz
from kerple.attention.spec import query_blocks

TOGETHER = 256  # largest number of keys for which all sequences of a batch are attended together
QUERIES_AT_ONCE = 128


def document_blocks(
    q: Tensor, k: Tensor, table: Tensor, window: int | None, first_key: Tensor
) -> Iterator[tuple[slice, slice, slice, Tensor]]:
    """Yield the sequences, the indices of queries, the rows of keys and the mask of each block.

    The mask (sequences, H or 1, queries, keys) has the biases of visible keys, and -inf for other keys.
    """
    queries, length = q.shape[2], k.shape[2]
    # a table whose rows are views of one row, such as zeros, needs one mask for all heads
    line = bias_line(table if table.stride(0) else table[:1], length, QUERIES_AT_ONCE, window)
    for rows, columns in query_blocks(queries, length, QUERIES_AT_ONCE, window):
        indices = slice(rows.start - length + queries, rows.stop - length + queries)
        for part in slices(0, len(q), len(q) if length <= TOGETHER else 1):
            first = first_key[part, indices]
            keys = slice(max(columns.start, int(first[:, 0].min())), columns.stop)
            biases = toeplitz(line, length - rows.stop + keys.start, rows.stop - rows.start, keys.stop - keys.start)
            hidden = torch.arange(keys.start, keys.stop) < first[:, None, :, None]
            # faster than masked_fill, which first copies the biases of each sequence
            yield part, indices, keys, torch.where(hidden, -torch.inf, biases)


def attend_documents(
    q: Tensor, k: Tensor, v: Tensor, table: Tensor, window: int | None, scale: float, first_key: Tensor
) -> tuple[Tensor, Tensor]:
    """Return the output (B, H, Tq, δ), and the log-sum-exp of the scores, (B, H, Tq)."""
    out, lse = q.new_empty(q.shape), table.new_empty(q.shape[:3])
    for part, indices, keys, mask in document_blocks(q, k, table, window, first_key):
        out[part, :, indices], lse[part, :, indices] = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
            q[part, :, indices], k[part, :, keys], v[part, :, keys], 0.0, False, attn_mask=mask, scale=scale
        )
    return out, lse


def document_gradients(
    tensors: list[Tensor], grad: Tensor, window: int | None, scale: float, first_key: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the gradients of q, k and v, given the gradient of the output. Torch's kernel has none of the mask.

    ``tensors`` are q, k, v, the table, the output and the log-sum-exp.
    """
    q, k, v, table, out, lse = tensors
    one_block = q.shape == k.shape and q.shape[2] <= QUERIES_AT_ONCE
    add = Tensor.copy_ if one_block else Tensor.add_
    dq, dk, dv = ((torch.empty if one_block else torch.zeros)(x.shape, dtype=table.dtype) for x in (q, k, v))
    for part, indices, keys, mask in document_blocks(q, k, table, window, first_key):
        dq[part, :, indices], block_dk, block_dv = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward(
            grad[part, :, indices], q[part, :, indices], k[part, :, keys], v[part, :, keys], out[part, :, indices],
            lse[part, :, indices], 0.0, False, attn_mask=mask, scale=scale,
        )  # fmt: skip
        add(dk[part, :, keys], block_dk)
        add(dv[part, :, keys], block_dv)
    return dq.to(q.dtype), dk.to(k.dtype), dv.to(v.dtype)

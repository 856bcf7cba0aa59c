"""Forward pass of attention on the CPU with biases of keys or factors of scores, for `kerple.attention.cpu`.

Torch's fused kernel cannot multiply scores by a factor. With a bias of each key and a table, it would need a mask of
all pairs. `TiledForward` computes such scores tile by tile, with a running maximum (Milakov and Gimelshein 2018, arXiv
1805.02867). With a bias of each key and no table, `attend_key_bias` calls torch's kernel twice per block of queries:
for the keys of the block, and for all earlier keys.

Keys whose bias is so low that they change no result are skipped (as in Lin et al. 2025, arXiv 2504.06949). Letters in
shapes are those of `kerple.attention.cpu_backward`.
"""

import math

import torch
from torch import Tensor

from kerple.attention.cpu_backward import (
    MIN_EXPONENT,
    bias_line,
    choose_tile_shape,
    key_bias_terms,
    negligible_bias,
    slices,
)
from kerple.attention.spec import AttentionSpec, merge

QUERIES_AT_ONCE = 128
MAX_SPREAD = 32  # largest difference of biases in a block of queries; at half of it, fp32 numbers have steps of 1e-6


class TiledForward:
    """Forward pass of one call of `kerple.attention.cpu.table_attention`, which documents the tensors.

    Queries are in reverse order, in which the tables of a tile are views of a line (`hankel_view`). ``spec`` has the
    scale, the window and the tensors that may be None.
    """

    def __init__(self, q: Tensor, k: Tensor, v: Tensor, table: Tensor, spec: AttentionSpec) -> None:
        self.q, self.k, self.v, self.window, self.scale = q, k, v, spec.window, spec.scale_of(q)
        self.first_key, self.key_bias, score_scale = spec.first_key, spec.key_bias, spec.score_scale
        self.length, self.first_query = k.shape[2], k.shape[2] - q.shape[2]
        self.tile_shape = batch, heads, queries, keys = choose_tile_shape(q, self.length, self.window)
        self.line = bias_line(table, self.length, queries, self.window)
        self.has_table = table.stride(0) > 0  # `cpu_kernel` gives rows with the stride 0 if there is none
        self.scale_line = None if score_scale is None else bias_line(score_scale, self.length, queries, None, 0.0)
        self.negligible = negligible_bias(q, k, table, score_scale, self.scale)
        self.buffer = table.new_empty(batch * heads * queries * keys)

    def run(self) -> tuple[Tensor, Tensor]:
        """Return the output (B, H, Tq, δ) in the dtype of q, and the log-sum-exp, (B, H, Tq), in that of the table."""
        out, lse = self.q.new_empty(self.q.shape), self.line.new_empty(self.q.shape[:3])
        for batch in slices(0, len(self.q), self.tile_shape[0]):
            for heads in slices(0, self.q.shape[1], self.tile_shape[1]):
                for rows in slices(self.first_query, self.length, self.tile_shape[2]):
                    index = batch, heads, slice(rows.start - self.first_query, rows.stop - self.first_query)
                    block_out, block_lse = self.attend_queries(batch, heads, rows, self.q[index].flip(2))
                    out[index] = block_out.view_as(out[index]).flip(2)
                    lse[index] = block_lse.view_as(lse[index]).flip(2)
        return out, lse

    def attend_queries(self, batch: slice, heads: slice, rows: slice, q: Tensor) -> tuple[Tensor, Tensor]:
        """Return output (batch · heads, queries, δ) and log-sum-exp (batch · heads, queries, 1) of reversed queries."""
        q = q.flatten(0, 1).to(self.line.dtype) * self.scale
        maximum = q.new_full((*q.shape[:2], 1), -math.inf)
        total, sums = torch.zeros_like(maximum), torch.zeros_like(q)
        first = 0 if self.window is None else max(0, rows.start - self.window + 1)
        # the last tile comes first: it has the own key of every query, and the maximum is then finite
        for stop in range(rows.stop, first, -self.tile_shape[3]):
            keys = slice(max(first, stop - self.tile_shape[3]), stop)
            s = self.scores(batch, heads, rows, keys, q)
            if s is None:
                continue
            largest = torch.maximum(maximum, s.amax(-1, keepdim=True))
            # hidden keys get a probability that changes no sum
            s.sub_(largest).clamp_(min=MIN_EXPONENT).exp_()
            decay = (maximum - largest).exp_()
            total.mul_(decay).add_(s.sum(-1, keepdim=True))
            sums.mul_(decay).baddbmm_(s, self.v[batch, heads, keys].flatten(0, 1).to(s.dtype))
            maximum = largest
        return sums / total, maximum + total.log()

    def scores(self, batch: slice, heads: slice, rows: slice, keys: slice, q: Tensor) -> Tensor | None:
        """Return the scores of a tile, (batch · heads, queries, keys), -inf for hidden keys; None if it is skipped."""
        near = keys.stop > rows.start
        terms: tuple[Tensor, ...] = ()
        if self.key_bias is not None:
            queries_bias, keys_bias = (self.key_bias[batch, heads, x] for x in (rows, keys))
            terms = key_bias_terms(queries_bias.flip(-1), keys_bias, near, q.dtype)
            if not near and float((terms[0].amax((-2, -1)) + terms[1].amax((-2, -1))).amax()) < self.negligible:
                return None
        k = self.k[batch, heads, keys].flatten(0, 1).to(q.dtype)
        s = self.buffer[: len(q) * q.shape[1] * k.shape[1]].view(*q.shape[:2], -1)
        by_head = torch.bmm(q, k.mT, out=s).view(batch.stop - batch.start, -1, *s.shape[1:])
        if self.scale_line is not None:
            by_head.mul_(hankel_view(self.scale_line, self.length, rows, keys)[heads])
        hides = near or (self.window is not None and rows.stop - keys.start > self.window)
        if self.has_table or hides:
            by_head.add_(hankel_view(self.line, self.length, rows, keys)[heads])
        for term in terms:
            by_head.add_(term)
        if self.first_key is not None:
            first = self.first_key[batch, rows.start - self.first_query : rows.stop - self.first_query].flip(1)
            by_head.masked_fill_(torch.arange(keys.start, keys.stop) < first[:, None, :, None], -math.inf)
        return s


def attend_key_bias(
    q: Tensor, k: Tensor, v: Tensor, table: Tensor, scale: float, key_bias: Tensor
) -> tuple[Tensor, Tensor]:
    """Return the output (B, H, Tq, δ), and the log-sum-exp of the scores, (B, H, Tq), with a ``table`` of zeros."""
    kernel = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
    negligible = negligible_bias(q, k, table, None, scale)
    out, lse = q.new_empty(q.shape), table.new_empty(q.shape[:3])
    first_query = k.shape[2] - q.shape[2]
    for rows in slices(first_query, k.shape[2], QUERIES_AT_ONCE):
        block = slice(rows.start - first_query, rows.stop - first_query)
        block_q, own_bias = q[:, :, block], key_bias[..., rows]
        shift = (own_bias - own_bias[..., own_bias.shape[-1] // 2, None]).to(table.dtype)
        exact = float((shift.amax(-1) - shift.amin(-1)).amax()) <= MAX_SPREAD
        mask = shift[:, :, None]
        if not exact:
            shift = torch.zeros_like(shift)
            future = torch.full((shift.shape[-1],) * 2, -math.inf, dtype=shift.dtype).triu(1)
            mask = key_bias_terms(own_bias, own_bias, True, shift.dtype)[0] + future
        block_out, block_lse = kernel(block_q, k[:, :, rows], v[:, :, rows], 0.0, exact, attn_mask=mask, scale=scale)
        block_lse = block_lse - shift
        if rows.start:
            mask, later = key_bias_terms(own_bias, key_bias[..., : rows.start], False, table.dtype)
            hidden = mask < negligible - later.amax(-2, keepdim=True)
            keys = slice(int(hidden.flatten(0, 2).all(0).long().cumprod(0).sum()), rows.start)
            mask = mask.masked_fill_(hidden, -math.inf)[..., keys]
            if keys.start < keys.stop:
                far, far_lse = kernel(block_q, k[:, :, keys], v[:, :, keys], 0.0, False, attn_mask=mask, scale=scale)
                block_out, block_lse = merge(block_out, block_lse, far, far_lse + later[..., 0])
        out[:, :, block], lse[:, :, block] = block_out, block_lse
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

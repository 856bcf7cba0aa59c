"""Backward pass of attention with a table of biases by distance, (H, T), on the CPU, tile by tile.

O is the output, D the sum over each row of dO ∘ O minus the gradient of the log-sum-exp (lse)::

    S = scale·Q·Kᵀ + bias    P = exp(S - lse)
    dV = Pᵀ·dO               dP = dO·Vᵀ           dS = P ∘ (dP - D)
    dQ = scale·dS·K          dK = scale·dSᵀ·Q     dtable[h, d] = sum of dS over the batch and all pairs with m - n = d

Source: Dao et al. 2022, arXiv 2205.14135, appendix B.2, extended by a bias. A tile contains a block of queries, a block
of keys, and as many heads and batch elements as fit the cache. Its scores stay in the cache.
"""

import math

import torch
from torch import Tensor

from kerple.attention.hankel import hankel_line

MIN_EXPONENT = -80  # exp is many times slower close to underflow, and e^-80 changes no sum


class TiledBackward:
    """Gradients of one call of `cpu.table_attention`: `run` returns those of q, k, v and the table.

    Sums have the dtype of the table. The gradients of q, k and v are then cast to the dtype of q.

    Args:
        tensors: q, k, v, table, output and log-sum-exp of the call, with the shapes given there.
        grad: Gradient of the output, (B, H, Tq, δ).
        grad_lse: Gradient of the log-sum-exp, (B, H, Tq).
        window: Only keys at distance < window were seen; None for all.
        learned: Whether the gradient of the table is computed; it is zero if False.
        scale: Factor of q·k.
    """

    def __init__(
        self,
        tensors: tuple[Tensor, ...],
        grad: Tensor,
        grad_lse: Tensor,
        window: int | None,
        learned: bool,
        scale: float,
    ) -> None:
        self.q, self.k, self.v, table, out, lse = tensors
        self.grad, self.window, self.learned, self.scale = grad, window, learned, scale
        self.length = self.k.shape[2]
        self.first = self.length - self.q.shape[2]  # row index of the first query
        self.lse = lse.unsqueeze(-1)  # (B, H, Tq, 1)
        self.delta = (grad.to(table.dtype) * out.to(table.dtype)).sum(-1, keepdim=True) - grad_lse.unsqueeze(-1)  # D
        self.dq, self.dk, self.dv = (x.new_zeros(x.shape, dtype=table.dtype) for x in tensors[:3])
        self.dtable = torch.zeros_like(table)
        self.tile_shape = batch, heads, queries, keys = choose_tile_shape(self.q, self.length, window)
        self.bias_line = hankel_line(table, self.length, queries, window, hidden=0.0)
        # allocated once, because fresh pages of memory cost as much time as the arithmetic
        self.buffers = table.new_empty(2, batch * heads * queries * keys)

    def run(self) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Return the gradients of q, k, v and the table."""
        _, heads_at_once, queries_at_once, keys_at_once = self.tile_shape
        for heads in slices(0, self.q.shape[1], heads_at_once):
            for keys in slices(0, self.length, keys_at_once):
                begin = self.first + max(0, keys.start - self.first) // queries_at_once * queries_at_once
                end = self.length if self.window is None else min(self.length, keys.stop - 1 + self.window)
                for rows in reversed(slices(begin, end, queries_at_once, self.length)):
                    self.add_query_block(heads, rows, slice(keys.start, min(keys.stop, rows.stop)))
        dq, dk, dv = (x.to(self.q.dtype) for x in (self.dq, self.dk, self.dv))
        return dq, dk, dv, self.dtable

    def add_query_block(self, heads: slice, rows: slice, keys: slice) -> None:
        """Add the contribution of a block of queries and a block of keys to all gradients, for the whole batch."""
        height, width = rows.stop - rows.start, keys.stop - keys.start
        bias = toeplitz(self.bias_line[heads], self.length - rows.stop + keys.start, height, width)
        padded = bias.new_zeros(len(bias), height + 1, height + width) if self.learned else None
        for batch in slices(0, self.grad.shape[0], self.tile_shape[0]):
            ds = self.add_tile(batch, heads, rows, keys, bias)
            if padded is not None:
                padded[:, :height, height:].add_(ds.sum(0) if len(ds) > 1 else ds[0])
        if padded is not None:
            add_by_distance(padded, self.dtable[heads], rows.start - keys.start)

    def add_tile(self, batch: slice, heads: slice, rows: slice, keys: slice, bias: Tensor) -> Tensor:
        """Add the contribution of one tile to dQ, dK and dV, and return its dS (B, H, queries, keys)."""
        queries = slice(rows.start - self.first, rows.stop - self.first)
        dq, lse, delta = (x[batch, heads, queries] for x in (self.dq, self.lse, self.delta))
        dk, dv = (x[batch, heads, keys] for x in (self.dk, self.dv))
        # contiguous, because each product would make a copy
        # (B·H, queries, δ) and (B·H, keys, δ)
        q, grad = (x[batch, heads, queries].flatten(0, 1).contiguous() for x in (self.q, self.grad))
        k, v = (x[batch, heads, keys].flatten(0, 1).contiguous() for x in (self.k, self.v))
        by_head = (*dq.shape[:3], k.shape[1])
        p_by_head, ds_by_head = self.buffers[:, : math.prod(by_head)].view(2, *by_head)
        p, ds = p_by_head.flatten(0, 1), ds_by_head.flatten(0, 1)

        torch.sub(bias, lse, out=p_by_head)
        p.baddbmm_(q.to(p.dtype), k.to(p.dtype).mT, alpha=self.scale).clamp_(min=MIN_EXPONENT).exp_()
        self.hide(p, rows.start - keys.start)
        dv.add_(torch.bmm(p.to(q.dtype).mT, grad).view(dv.shape))
        torch.bmm(grad, v.mT, out=ds) if ds.dtype == q.dtype else ds.copy_(torch.bmm(grad, v.mT))  # dP
        ds_by_head.sub_(delta).mul_(p_by_head)
        cast_ds = ds.to(q.dtype)
        dk.add_(torch.bmm(cast_ds.mT, q).view(dk.shape), alpha=self.scale)
        dq.add_(torch.bmm(cast_ds, k).view(dq.shape), alpha=self.scale)
        return ds_by_head

    def hide(self, p: Tensor, first_distance: int) -> None:
        """Set hidden probabilities (B·H, queries, keys) to 0; the first entry has the distance ``first_distance``.

        Zeros after exp are faster than -inf before exp.
        """
        queries, keys = p.shape[1:]
        if first_distance < keys - 1:
            p.tril_(first_distance)
        if self.window is not None and first_distance + queries > self.window:
            p.triu_(first_distance - self.window + 1)


def choose_tile_shape(q: Tensor, length: int, window: int | None) -> tuple[int, int, int, int]:
    """Return the largest number of batch elements, heads, queries and keys in a tile.

    It is the fastest of twenty choices, timed with two threads on cores with 2 MB of cache each.
    """
    batch, heads, queries, _ = q.shape
    scores = (512 if q.dtype.itemsize > 2 or length <= 256 else 1024) * 1024
    queries = min(128, queries)
    keys = min(512, length, length if window is None else max(queries, window))
    heads = max(1, min(heads, scores // (queries * keys)))
    return max(1, min(batch, scores // (queries * keys * heads))), heads, queries, keys


def slices(start: int, stop: int, step: int, limit: int | None = None) -> list[slice]:
    """Return consecutive slices of ``step`` that cover start..stop, the last one cut at ``limit`` (default: stop)."""
    return [slice(i, min(i + step, limit or stop)) for i in range(start, stop, step)]


def toeplitz(line: Tensor, offset: int, height: int, width: int) -> Tensor:
    """Return the matrices ``line[h, offset + height - 1 - row + column]``, (H, height, width).

    Each row is a copy of the same part of ``line``. Reading it at a pitch one shorter shifts each row by one entry.
    """
    heads, pitch = line.shape[0], height + width
    rows = line[:, None, offset : offset + pitch].expand(-1, height, -1).contiguous()
    return rows.as_strided((heads, height, width), (height * pitch, pitch - 1, 1), height - 1)


def add_by_distance(padded: Tensor, total: Tensor, first_distance: int) -> None:
    """Add a tile (H, height, width) to ``total`` (H, T) by distance.

    Entry (row, column) has the distance ``first_distance`` + row - column, and is 0 if that is negative. In ``padded``
    (H, height + 1, height + width) each row of the tile follows ``height`` zeros, and a row of zeros is the last. Read
    at a pitch one longer, diagonals are columns, so that one sum without atomic additions is enough.
    """
    height, pitch = padded.shape[1] - 1, padded.shape[2]
    skewed = padded.flatten(1)[:, : height * (pitch + 1)].unflatten(1, (height, pitch + 1))
    sums = skewed.sum(1)  # at index i the distance first_distance + height - i; index 0 is empty
    largest, smallest = first_distance + height - 1, max(0, first_distance - (pitch - height) + 1)
    total[:, smallest : largest + 1] += sums[:, 1 : largest - smallest + 2].flip(-1)

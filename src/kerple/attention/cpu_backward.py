"""Backward pass of attention with a table of biases by distance, (H, T), on the CPU, tile by tile.

O is the output, D the sum over each row of dO ∘ O minus the gradient of the log-sum-exp (lse)::

    S = scale·Q·Kᵀ + bias    P = exp(S - lse)
    dV = Pᵀ·dO               dP = dO·Vᵀ           dS = P ∘ (dP - D)
    dQ = scale·dS·K          dK = scale·dSᵀ·Q     dtable[h, d] = sum of dS over the batch and all pairs with m - n = d

Source: Dao et al. 2022, arXiv 2205.14135, appendix B.2, extended by a bias. A tile contains a block of queries, a block
of keys, and as many heads and batch elements as fit the cache. Its scores stay in the cache.
"""

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from kerple.attention.hankel import hankel_line

MIN_EXPONENT = -80  # exp is many times slower close to underflow, and e^-80 changes no sum


@dataclass(frozen=True)
class ForwardPass:
    """Inputs and outputs of `cpu.table_attention`, with the shapes given there."""

    q: Tensor
    k: Tensor
    v: Tensor
    table: Tensor
    out: Tensor
    lse: Tensor
    window: int | None
    scale: float


@dataclass(frozen=True)
class TileSizes:
    """Largest number of batch elements, heads, queries and keys in a tile."""

    batch: int
    heads: int
    queries: int
    keys: int

    @classmethod
    def choose(cls, q: Tensor, length: int, window: int | None) -> "TileSizes":
        """Return the fastest of twenty choices, timed with two threads on cores with 2 MB of cache each."""
        batch, heads, queries, _ = q.shape
        scores = (512 if q.dtype.itemsize > 2 or length <= 256 else 1024) * 1024
        queries = min(128, queries)
        keys = min(512, length, length if window is None else max(queries, window))
        heads = max(1, min(heads, scores // (queries * keys)))
        return cls(max(1, min(batch, scores // (queries * keys * heads))), heads, queries, keys)


class TiledBackward:
    """Gradients of one call: `run` returns those of q, k, v in their dtype and of the table in its own.

    Buffers are allocated once per call, because fresh pages of memory cost as much time as the arithmetic.

    Args:
        forward: Inputs and outputs of the forward pass.
        grad: Gradient of the output, (B, H, Tq, δ).
        grad_lse: Gradient of the log-sum-exp, (B, H, Tq).
        learned: Whether the gradient of the table is computed; it is zero if False.
    """

    def __init__(self, forward: ForwardPass, grad: Tensor, grad_lse: Tensor, learned: bool) -> None:
        q, k, v, precise = forward.q, forward.k, forward.v, forward.table.dtype
        (batch, heads, queries, dim), self.length = q.shape, k.shape[2]
        self.forward, self.grad, self.learned = forward, grad, learned
        self.first = self.length - queries  # row index of the first query
        self.sizes = sizes = TileSizes.choose(q, self.length, forward.window)
        self.lse = forward.lse.unsqueeze(-1)  # (B, H, Tq, 1)
        self.delta = row_dots(grad, forward.out, precise).sub_(grad_lse.unsqueeze(-1))  # D, (B, H, Tq, 1)
        self.bias_line = hankel_line(forward.table, self.length, sizes.queries, forward.window, hidden=0.0)

        self.one_key_block = sizes.keys >= self.length  # then one tile contains all keys of a query
        self.dq = q.new_empty(q.shape) if self.one_key_block else q.new_zeros(q.shape, dtype=precise)
        self.dk, self.dv = k.new_empty(k.shape), v.new_empty(v.shape)
        self.dtable = torch.zeros_like(forward.table)

        def buffer(size: int, dtype: torch.dtype = precise) -> Tensor:
            return torch.empty(size, dtype=dtype)

        pairs = sizes.batch * sizes.heads
        scores = pairs * sizes.queries * sizes.keys
        self.p_buffer, self.ds_buffer = buffer(scores), buffer(scores)
        self.cast_buffer = buffer(scores, q.dtype) if q.dtype != precise else None
        self.query_buffer = buffer(pairs * sizes.queries * dim, q.dtype)
        self.key_buffer = buffer(pairs * sizes.keys * dim, q.dtype)
        pitch = sizes.queries + sizes.keys
        self.bias_buffer = buffer(sizes.heads * sizes.queries * pitch)
        self.skew_buffer = buffer(sizes.heads * (sizes.queries + 1) * pitch if learned else 0)
        all_heads_at_once = self.one_key_block and self.cast_buffer is None and sizes.heads == heads
        self.in_place = queries <= sizes.queries or all_heads_at_once  # sums of dK and dV need no buffers
        self.sum_buffers = [buffer(0 if self.in_place else batch * sizes.heads * sizes.keys * dim) for _ in "kv"]

    def run(self) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Return the gradients of q, k, v and the table."""
        for heads in slices(0, self.forward.q.shape[1], self.sizes.heads):
            for keys in slices(0, self.length, self.sizes.keys):
                self.add_key_block(heads, keys)
        return self.dq.to(self.forward.q.dtype), self.dk, self.dv, self.dtable

    def add_key_block(self, heads: slice, keys: slice) -> None:
        """Compute dK and dV of a block of keys, and add its contribution to dQ and to the gradient of the table."""
        dk, dv = self.dk[:, heads, keys], self.dv[:, heads, keys]
        totals = [dk, dv] if self.in_place else [view(x, *dk.shape) for x in self.sum_buffers]
        begin = self.first + max(0, keys.start - self.first) // self.sizes.queries * self.sizes.queries
        window = self.forward.window
        end = self.length if window is None else min(self.length, keys.stop - 1 + window)
        blocks = slices(begin, end, self.sizes.queries, self.length)
        for rows in reversed(blocks):  # the last block of queries sees all these keys and initialises the totals
            seen = slice(keys.start, min(keys.stop, rows.stop))
            self.add_query_block(heads, rows, seen, totals, overwrite=rows is blocks[-1])
        if not blocks:  # no query sees these keys
            totals[0].zero_(), totals[1].zero_()
        if not self.in_place:
            dk.copy_(totals[0]), dv.copy_(totals[1])

    def add_query_block(self, heads: slice, rows: slice, keys: slice, totals: list[Tensor], overwrite: bool) -> None:
        """Add the contribution of a block of queries and a block of keys to all gradients, for the whole batch.

        ``totals`` are the sums for dK and dV, (B, H, keys, δ). With ``overwrite`` they are initialised.
        """
        n_heads, n_queries, n_keys = (x.stop - x.start for x in (heads, rows, keys))
        offset = self.length - rows.stop + keys.start
        bias = toeplitz(self.bias_line[heads], offset, n_queries, n_keys, self.bias_buffer)
        skew = view(self.skew_buffer, n_heads, (n_queries + 1) * (n_queries + n_keys)) if self.learned else None
        for batch in slices(0, self.grad.shape[0], self.sizes.batch):
            ds = self.add_tile(batch, heads, rows, keys, bias, [x[batch, :, :n_keys] for x in totals], overwrite)
            if skew is not None:  # see `add_by_distance`
                total = skew[:, : n_queries * (n_queries + n_keys)].view(n_heads, n_queries, -1)[:, :, n_queries:]
                if batch.start == 0:
                    torch.sum(ds, 0, out=total)
                else:
                    total.add_(ds.sum(0) if ds.shape[0] > 1 else ds[0])
        if skew is not None:
            add_by_distance(skew, self.dtable[heads], n_queries, n_keys, rows.start - keys.start)

    def add_tile(
        self, batch: slice, heads: slice, rows: slice, keys: slice, bias: Tensor, totals: list[Tensor], overwrite: bool
    ) -> Tensor:
        """Add the contribution of one tile to dQ, dK and dV, and return its dS (B, H, queries, keys)."""
        queries = slice(rows.start - self.first, rows.stop - self.first)
        (dk, dv), dq = totals, self.dq[batch, heads, queries]
        lse, delta = self.lse[batch, heads, queries], self.delta[batch, heads, queries]
        q, grad = (x[batch, heads, queries].flatten(0, 1) for x in (self.forward.q, self.grad))  # (B·H, queries, δ)
        k, v = (x[batch, heads, keys].flatten(0, 1) for x in (self.forward.k, self.forward.v))  # (B·H, keys, δ)
        if self.cast_buffer is not None:
            q, grad, k, v = (x.contiguous() for x in (q, grad, k, v))  # else each product makes a copy
        scale, by_head = self.forward.scale, (*lse.shape[:2], q.shape[1], k.shape[1])
        p, ds = view(self.p_buffer, *by_head).flatten(0, 1), view(self.ds_buffer, *by_head).flatten(0, 1)

        # P
        torch.sub(bias, lse, out=p.view(by_head))
        p.baddbmm_(q.to(p.dtype), k.to(p.dtype).mT, alpha=scale).clamp_(min=MIN_EXPONENT).exp_()
        self.hide(p, rows.start - keys.start)
        # dP
        if self.cast_buffer is None:
            torch.bmm(grad, v.mT, out=ds)
        else:
            ds.copy_(torch.bmm(grad, v.mT, out=view(self.cast_buffer, *ds.shape)))
        # dV, dS, dK, dQ
        key_buffer = view(self.key_buffer, *k.shape)
        add_product(dv, self.cast(p).mT, grad, 1.0, key_buffer, overwrite)
        ds.view(by_head).sub_(delta).mul_(p.view(by_head))
        cast_ds = self.cast(ds)
        add_product(dk, cast_ds.mT, q, scale, key_buffer, overwrite)
        product = torch.bmm(cast_ds, k, out=view(self.query_buffer, *q.shape)).view(dq.shape)
        if self.one_key_block:
            torch.mul(product, scale, out=dq)
        else:
            dq.add_(product, alpha=scale)
        return ds.view(by_head)

    def hide(self, p: Tensor, first_distance: int) -> None:
        """Set hidden probabilities (B·H, queries, keys) to 0; the first entry has the distance ``first_distance``.

        Zeros after exp are faster than -inf before exp.
        """
        queries, keys = p.shape[1:]
        window = self.forward.window
        if first_distance < keys - 1:
            p.tril_(first_distance)
        if window is not None and first_distance + queries > window:
            p.triu_(first_distance - window + 1)

    def cast(self, x: Tensor) -> Tensor:
        """Return ``x`` in the dtype of q; the result is valid until the next call."""
        return x if self.cast_buffer is None else view(self.cast_buffer, *x.shape).copy_(x)


def view(buffer: Tensor, *shape: int) -> Tensor:
    """Return the first entries of a flat buffer in the given shape."""
    return buffer[: math.prod(shape)].view(shape)


def slices(start: int, stop: int, step: int, limit: int | None = None) -> list[slice]:
    """Return consecutive slices of ``step`` that cover start..stop, the last one cut at ``limit`` (default: stop)."""
    return [slice(i, min(i + step, limit or stop)) for i in range(start, stop, step)]


def row_dots(a: Tensor, b: Tensor, dtype: torch.dtype) -> Tensor:
    """Return the sum of a ∘ b over the last dimension, which stays as 1.

    The batch is processed in parts, so that temporary tensors are small.
    """
    elements = max(1, 2**18 // a[0].numel())
    parts = zip(a.split(elements), b.split(elements), strict=True)
    return torch.cat([(x.to(dtype) * y.to(dtype)).sum(-1, keepdim=True) for x, y in parts])


def toeplitz(line: Tensor, offset: int, height: int, width: int, buffer: Tensor) -> Tensor:
    """Return the matrices ``line[h, offset + height - 1 - row + column]``, (H, height, width).

    Each row of the buffer is a copy of the same part of ``line``. Reading it at a pitch one shorter shifts each row by
    one entry.
    """
    heads, pitch = line.shape[0], height + width
    rows = view(buffer, heads, height, pitch).copy_(line[:, None, offset : offset + pitch])
    return rows.as_strided((heads, height, width), (height * pitch, pitch - 1, 1), height - 1)


def add_product(total: Tensor, a: Tensor, b: Tensor, scale: float, buffer: Tensor, overwrite: bool) -> None:
    """Add scale · a·b to ``total``, or write it there.

    Args:
        total: (B, H, keys, δ).
        a: (B·H, keys, queries).
        b: (B·H, queries, δ).
        scale: Factor of the product.
        buffer: (B·H, keys, δ).
        overwrite: Whether to initialise ``total`` with the product.
    """
    if total.is_contiguous() and total.dtype == a.dtype and (not overwrite or scale == 1):
        total = total.view(buffer.shape)
        torch.bmm(a, b, out=total) if overwrite else total.baddbmm_(a, b, alpha=scale)
    elif overwrite:
        torch.mul(torch.bmm(a, b, out=buffer).view(total.shape), scale, out=total)
    else:
        total.add_(torch.bmm(a, b, out=buffer).view(total.shape), alpha=scale)


def add_by_distance(skew: Tensor, total: Tensor, height: int, width: int, first_distance: int) -> None:
    """Add a tile (H, height, width) to ``total`` (H, T) by distance.

    Entry (row, column) has the distance ``first_distance`` + row - column, and is 0 if that is negative. In ``skew``
    (H, (height + 1) · (height + width)) each row of the tile follows ``height`` free entries. Read at a pitch one
    longer, diagonals are columns, so that one sum without atomic additions is enough.
    """
    heads, pitch = skew.shape[0], height + width
    rows = skew.view(heads, height + 1, pitch)
    rows[:, :, :height] = 0
    rows[:, height] = 0
    sums = skew[:, : height * (pitch + 1)].view(heads, height, pitch + 1).sum(1)  # distance first + height - index
    largest = first_distance + height - 1  # at index 1; index 0 is empty
    smallest = max(0, first_distance - width + 1)
    total[:, smallest : largest + 1] += sums[:, 1 : largest - smallest + 2].flip(-1)

"""Gradients of attention with a table of biases by distance, (H, T), on the CPU, tile by tile.

A tile is a block of queries against a block of keys, for as many heads and batch elements as fit the cache together;
its scores never leave the cache. Buffers are allocated once per call, because fresh pages of memory cost as much time
as the arithmetic.
"""

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from kerple.attention.hankel import hankel_line

LEAST_EXPONENT = -80  # exp is many times slower close to underflow, and e^-80 changes no sum


@dataclass(frozen=True)
class CpuTiling:
    """Sizes of the tiles: queries and keys of one, and scores of all that are computed at once."""

    queries: int
    keys: int
    scores: int = 512 * 1024

    @classmethod
    def choose(cls, dtype: torch.dtype, length: int) -> "CpuTiling":
        """Return the fastest of twenty that were timed, with two threads on cores with 2 MB of cache each."""
        return cls(128, 512, scores=(512 if dtype.itemsize > 2 or length <= 256 else 1024) * 1024)


def table_gradients(
    grad: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    table: Tensor,
    out: Tensor,
    lse: Tensor,
    window: int | None,
    learned: bool,
    scale: float | None = None,
    grad_lse: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Gradients of q, k, v in their dtype and of the table in its own (zeros unless ``learned``).

    With P = exp(scores - lse) and dS = P ∘ (grad·vᵀ - rowsum(grad ∘ out)): dq = dS·k/√δ, dk = dSᵀ·q/√δ, dv = Pᵀ·grad,
    and the table's gradient at distance d is the sum of dS over the batch and over m - n = d (Dao et al. 2022, arXiv
    2205.14135, appendix B.2, with a bias). A gradient of the log-sum-exp, ``grad_lse`` (B, H, Tq), adds P ∘ grad_lse to
    dS. Shapes as in `cpu.table_attention`.
    """
    (batch, heads, queries, dim), length = q.shape, k.shape[2]
    first, precise, scale = length - queries, table.dtype, dim**-0.5 if scale is None else scale
    low = q.dtype != precise
    tiling = CpuTiling.choose(q.dtype, length)
    high = min(tiling.queries, queries)
    wide = min(tiling.keys, length, length if window is None else max(high, window))
    heads_at_once = max(1, min(heads, tiling.scores // (high * wide)))
    batch_at_once = max(1, min(batch, tiling.scores // (high * wide * heads_at_once)))
    together = heads_at_once * batch_at_once

    def buffer(size: int, dtype: torch.dtype = precise) -> Tensor:
        return torch.empty(size, dtype=dtype)

    p_buffer, ds_buffer = buffer(together * high * wide), buffer(together * high * wide)
    half_buffer = buffer(together * high * wide, q.dtype) if low else None
    rows_buffer, columns_buffer = buffer(together * high * dim, q.dtype), buffer(together * wide * dim, q.dtype)
    bias_buffer = buffer(heads_at_once * high * (high + wide))
    skew_buffer = buffer(heads_at_once * (high + 1) * (high + wide)) if learned else None

    line = hankel_line(table, length, high, window, hidden=0.0)
    lse, delta = lse.unsqueeze(-1), row_dots(grad, out, precise)  # (B, H, Tq, 1)
    if grad_lse is not None:
        delta -= grad_lse.unsqueeze(-1)
    once = wide >= length  # every query meets all its keys in one tile
    dq = q.new_empty(q.shape) if once else q.new_zeros(q.shape, dtype=precise)
    dk, dv, dtable = k.new_empty(k.shape), v.new_empty(v.shape), torch.zeros_like(table)
    in_place = queries <= high or (once and not low and heads_at_once == heads)  # sums need no buffers of their own
    sums = None if in_place else [buffer(batch * heads_at_once * wide * dim) for _ in "kv"]

    for h in slices(0, heads, heads_at_once):
        n_heads = h.stop - h.start
        for j in slices(0, length, wide):
            size = (batch, n_heads, j.stop - j.start, dim)
            tiles = (dk[:, h, j], dv[:, h, j]) if sums is None else (x[: math.prod(size)].view(size) for x in sums)
            dk_tile, dv_tile = tiles
            begin = first + max(0, j.start - first) // high * high
            end = length if window is None else min(length, j.stop - 1 + window)
            later_first = slices(begin, end, high, length)[::-1]  # the last block of queries sees the whole tile
            for i in later_first:
                n, w = i.stop - i.start, min(j.stop, i.stop) - j.start
                above = i.start - j.start  # distance of the tile's first entry
                here, seen = slice(i.start - first, i.stop - first), slice(j.start, j.start + w)
                bias = toeplitz(line[h], length - i.stop + j.start, n, w, bias_buffer)  # (heads, n, w)
                skew = None if skew_buffer is None else skew_buffer[: n_heads * (n + 1) * (n + w)].view(n_heads, -1)
                for b in slices(0, batch, batch_at_once):
                    n_batch = b.stop - b.start
                    g = n_batch * n_heads
                    qt, gt = q[b, h, here].flatten(0, 1), grad[b, h, here].flatten(0, 1)  # (g, n, δ)
                    kt, vt = k[b, h, seen].flatten(0, 1), v[b, h, seen].flatten(0, 1)  # (g, w, δ)
                    p, ds = p_buffer[: g * n * w].view(g, n, w), ds_buffer[: g * n * w].view(g, n, w)
                    p4, ds4 = p.view(n_batch, n_heads, n, w), ds.view(n_batch, n_heads, n, w)
                    if half_buffer is not None:
                        qt, gt, kt, vt = (x.contiguous() for x in (qt, gt, kt, vt))  # or each product would copy them
                        half = half_buffer[: g * n * w].view(g, n, w)
                    torch.sub(bias, lse[b, h, here], out=p4)
                    p.baddbmm_(qt.to(precise), kt.to(precise).mT, alpha=scale).clamp_(min=LEAST_EXPONENT).exp_()
                    # zeros after exp, not -inf before it
                    if above < w - 1:
                        p.tril_(above)
                    if window is not None and above + n > window:
                        p.triu_(above - window + 1)
                    if half_buffer is None:
                        torch.bmm(gt, vt.mT, out=ds)
                        p_in, ds_in = p, ds
                    else:
                        ds.copy_(torch.bmm(gt, vt.mT, out=half))
                        p_in = ds_in = half.copy_(p)
                    columns = columns_buffer[: g * w * dim].view(g, w, dim)
                    add_product(dv_tile[b, :, :w], p_in.mT, gt, 1.0, columns, i is later_first[0])
                    ds4.sub_(delta[b, h, here]).mul_(p4)
                    if half_buffer is not None:
                        ds_in.copy_(ds)
                    add_product(dk_tile[b, :, :w], ds_in.mT, qt, scale, columns, i is later_first[0])
                    x = torch.bmm(ds_in, kt, out=rows_buffer[: g * n * dim].view(g, n, dim)).view(n_batch, -1, n, dim)
                    if once:
                        torch.mul(x, scale, out=dq[b, h, here])
                    else:
                        dq[b, h, here].add_(x, alpha=scale)
                    if skew is not None:
                        into = skew[:, : n * (n + w)].view(n_heads, n, n + w)[:, :, n:]
                        if b.start == 0:
                            torch.sum(ds4, 0, out=into)
                        else:
                            into.add_(ds4.sum(0) if n_batch > 1 else ds4[0])
                if skew is not None:
                    add_by_distance(skew, dtable[h], n, w, above)
            if not later_first:  # keys that no query sees
                dk_tile.zero_(), dv_tile.zero_()
            if sums is not None:
                dk[:, h, j], dv[:, h, j] = dk_tile, dv_tile
    return dq.to(q.dtype), dk, dv, dtable


def slices(start: int, stop: int, step: int, limit: int | None = None) -> list[slice]:
    """Consecutive slices of ``step`` that cover start..stop, the last one cut at ``limit`` (``stop`` if None)."""
    return [slice(i, min(i + step, limit or stop)) for i in range(start, stop, step)]


def row_dots(a: Tensor, b: Tensor, precise: torch.dtype) -> Tensor:
    """Sum a·b over the last dimension, which stays as 1; in parts of the batch, so that temporaries are small."""
    elements = max(1, 2**18 // a[0].numel())
    parts = zip(a.split(elements), b.split(elements), strict=True)
    return torch.cat([(x.to(precise) * y.to(precise)).sum(-1, keepdim=True) for x, y in parts])


def toeplitz(line: Tensor, offset: int, n: int, w: int, buffer: Tensor) -> Tensor:
    """``line[h, offset + n - 1 - r + c]`` as (H, n, w): a row repeated at one pitch and read at a pitch one shorter."""
    heads, pitch = line.shape[0], n + w
    rows = buffer[: heads * n * pitch].view(heads, n, pitch).copy_(line[:, None, offset : offset + pitch])
    return rows.as_strided((heads, n, w), (n * pitch, pitch - 1, 1), n - 1)


def add_product(total: Tensor, a: Tensor, b: Tensor, scale: float, buffer: Tensor, first: bool) -> None:
    """Add scale · a·b, (g, w, n) times (g, n, δ), to ``total`` (B, H, w, δ), or write it there if it is the first."""
    if total.is_contiguous() and total.dtype == a.dtype and (not first or scale == 1):
        total = total.view(buffer.shape)
        torch.bmm(a, b, out=total) if first else total.baddbmm_(a, b, alpha=scale)
    elif first:
        torch.mul(torch.bmm(a, b, out=buffer).view(total.shape), scale, out=total)
    else:
        total.add_(torch.bmm(a, b, out=buffer).view(total.shape), alpha=scale)


def add_by_distance(skew: Tensor, total: Tensor, n: int, w: int, above: int) -> None:
    """Add a tile to ``total`` (H, T) by distance; entry (r, c) has distance ``above`` + r - c.

    The tile lies in ``skew`` (H, n + 1 rows of n + w), n entries to the right. Read at a pitch one longer, diagonals
    are columns: one plain sum, no atomics. Entries of the future are zero.
    """
    heads, pitch = skew.shape[0], n + w
    rows = skew.view(heads, n + 1, pitch)
    rows[:, :, :n] = 0
    rows[:, n] = 0
    x = skew[:, : n * (pitch + 1)].view(heads, n, pitch + 1).sum(1)  # (H, pitch + 1), distance above + n - index
    farthest = above + n - 1  # of index 1; index 0 is empty
    nearest = max(0, above - w + 1)
    total[:, nearest : farthest + 1] += x[:, 1 : farthest - nearest + 2].flip(-1)

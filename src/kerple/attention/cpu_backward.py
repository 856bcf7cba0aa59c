"""Backward pass of attention with a table of biases by distance, (H, T), on the CPU, tile by tile.

O is the output, and lse the log-sum-exp of the scores. D is the sum of each row of dO ∘ O, minus the gradient of lse.
In bf16, O is rounded, as in the source, and with it D, which causes most of the error of dtable::

    S = scale·Q·Kᵀ + bias    P = exp(S - lse)
    dV = Pᵀ·dO               dP = dO·Vᵀ           dS = P ∘ (dP - D)
    dQ = scale·dS·K          dK = scale·dSᵀ·Q     dtable[h, d] = sum of dS over the batch and all pairs with m - n = d

Source: Dao et al. 2022, arXiv 2205.14135, appendix B.2. Its formulas have no bias and no gradient of lse. A tile
contains a block of queries, a block of keys, and as many heads and batch elements as fit the processor's cache.

Letters in shapes: B is the batch size, H the number of heads and δ the head dimension. Tq queries belong to the last Tq
of Tk keys. m is the index of a query, n that of a key, and d = m - n their distance.
"""

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from kerple.attention.spec import AttentionSpec
from kerple.positions.token_positions import shift_rows

# Smaller exponents are clamped. e^-50 changes no sum; products of smaller probabilities and small gradients underflow,
# which takes many times as long.
MIN_EXPONENT = -50


class TiledBackward:
    """Backward pass of one call of `kerple.attention.cpu.table_attention`.

    Gradients are summed in the dtype of the table. Those of q, k and v are then cast to the dtype of q.

    Args:
        tensors: q, k, v, table, output and log-sum-exp of the call, in the shapes that `table_attention` documents.
        grad: Gradient of the output, (B, H, Tq, δ).
        grad_lse: Gradient of the log-sum-exp, (B, H, Tq).
        spec: Scale, window, first keys, biases of keys and score scale of the call.
        learned: Whether the gradient of the table is computed. If False, zeros are returned for it.
    """

    def __init__(
        self, tensors: Sequence[Tensor], grad: Tensor, grad_lse: Tensor, spec: AttentionSpec, learned: bool
    ) -> None:
        self.q, self.k, self.v, table, out, lse = tensors
        self.grad, self.window, self.scale, self.learned = grad, spec.window, spec.scale_of(self.q), learned
        self.first_key, self.key_bias = spec.first_key, spec.key_bias
        first_key, key_bias, score_scale = spec.first_key, spec.key_bias, spec.score_scale
        # for each query, the first key that it sees in at least one sequence
        self.first_keys = [0] * self.q.shape[2] if first_key is None else first_key.amin(0).tolist()
        self.length = self.k.shape[2]
        self.first_query = self.length - self.q.shape[2]  # index of the key to which the first query belongs
        self.lse = lse.unsqueeze(-1)  # (B, H, Tq, 1)
        self.delta = (grad.to(table.dtype) * out.to(table.dtype)).sum(-1, keepdim=True) - grad_lse.unsqueeze(-1)  # D
        self.dq, self.dk, self.dv = (x.new_zeros(x.shape, dtype=table.dtype) for x in tensors[:3])
        self.dtable = torch.zeros_like(table)
        self.negligible = -math.inf
        if key_bias is not None:
            self.negligible = negligible_bias(self.q, self.k, table, score_scale, self.scale)
        # 0 entries without key bias or score scale
        self.dkey_bias = table.new_zeros(0 if key_bias is None else key_bias.shape)
        self.dscale = table.new_zeros(0 if score_scale is None else score_scale.shape)
        self.tile_shape = batch, heads, queries, keys = choose_tile_shape(self.q, self.length, self.window)
        self.unbiased = not table.stride(0)  # `cpu_kernel` gives rows of zeros with the stride 0
        self.bias_line = bias_line(table, self.length, queries, self.window, hidden=0.0)
        self.scale_line = None if score_scale is None else bias_line(score_scale, self.length, queries, None, 0.0)
        # P and dS of a tile, and its scores before they are multiplied by the score scale. They are allocated once,
        # because new pages of memory would cost as much time as the arithmetic
        self.buffers = table.new_empty(2 if score_scale is None else 3, batch * heads * queries * keys)

    def run(self) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
        """Return the gradients of q, k, v, the table, the key bias and the score scale."""
        _, heads_per_tile, queries_per_tile, keys_per_tile = self.tile_shape
        for heads in slices(0, self.q.shape[1], heads_per_tile):
            for keys in slices(0, self.length, keys_per_tile):
                # blocks of queries in which at least one query sees at least one of the keys
                begin = self.first_query + max(0, keys.start - self.first_query) // queries_per_tile * queries_per_tile
                end = self.length if self.window is None else min(self.length, keys.stop - 1 + self.window)
                for rows in reversed(slices(begin, end, queries_per_tile, self.length)):
                    start = max(keys.start, self.first_keys[rows.start - self.first_query])
                    if start < min(keys.stop, rows.stop):
                        self.add_query_block(heads, rows, slice(start, min(keys.stop, rows.stop)))
        dq, dk, dv = (x.to(self.q.dtype) for x in (self.dq, self.dk, self.dv))
        dkey_bias = self.dkey_bias if self.key_bias is None else self.dkey_bias.to(self.key_bias.dtype)
        return dq, dk, dv, self.dtable, dkey_bias, self.dscale

    def add_query_block(self, heads: slice, rows: slice, keys: slice) -> None:
        """Add the contribution of a block of queries and a block of keys to all gradients, for the whole batch."""
        if self.key_bias is not None and keys.stop <= rows.start:
            largest = self.key_bias[:, heads, keys].amax(-1) - self.key_bias[:, heads, rows].amin(-1)
            if float(largest.amax()) < self.negligible:
                return
        height, width = rows.stop - rows.start, keys.stop - keys.start
        offset = self.length - rows.stop + keys.start
        bias = toeplitz(self.bias_line[heads], offset, height, width)
        score_scale = None if self.scale_line is None else toeplitz(self.scale_line[heads], offset, height, width)
        totals = self.dtable if self.learned else None, None if score_scale is None else self.dscale
        padded = [None if x is None else bias.new_zeros(len(bias), height + 1, height + width) for x in totals]
        sums = [None if x is None else x[:, :height, height:] for x in padded]
        for batch in slices(0, self.grad.shape[0], self.tile_shape[0]):
            self.add_tile(batch, heads, rows, keys, bias, score_scale, sums)
        for tile, total in zip(padded, totals, strict=True):
            if tile is not None and total is not None:
                add_by_distance(tile, total[heads], rows.start - keys.start)

    def add_tile(
        self,
        batch: slice,
        heads: slice,
        rows: slice,
        keys: slice,
        bias: Tensor,
        score_scale: Tensor | None,
        sums: list[Tensor | None],
    ) -> None:
        """Add the contribution of one tile to all gradients.

        The gradients of its bias and its score scale, (heads, queries, keys) each, are added to ``sums``.
        """
        queries = slice(rows.start - self.first_query, rows.stop - self.first_query)
        dq, lse, delta = (x[batch, heads, queries] for x in (self.dq, self.lse, self.delta))
        dk, dv = (x[batch, heads, keys] for x in (self.dk, self.dv))
        # contiguous, because each product would copy a strided tensor
        q, grad = (x[batch, heads, queries].flatten(0, 1).contiguous() for x in (self.q, self.grad))
        k, v = (x[batch, heads, keys].flatten(0, 1).contiguous() for x in (self.k, self.v))  # (batch · heads, keys, δ)
        shape = (*dq.shape[:3], k.shape[1])  # (batch, heads, queries, keys)
        p_by_head, ds_by_head, *scores = self.buffers[:, : math.prod(shape)].view(-1, *shape)
        p, ds = p_by_head.flatten(0, 1), ds_by_head.flatten(0, 1)

        if self.key_bias is not None:
            own, others = (self.key_bias[batch, heads, x] for x in (rows, keys))
            key_terms, query_terms = key_bias_terms(own, others, keys.stop > rows.start, lse.dtype)
            lse, bias = lse - query_terms, key_terms if self.unbiased else bias + key_terms
        torch.sub(bias, lse, out=p_by_head)
        if score_scale is None:
            p.baddbmm_(q.to(p.dtype), k.to(p.dtype).mT, alpha=self.scale)
        else:
            torch.bmm(q.to(p.dtype) * self.scale, k.to(p.dtype).mT, out=scores[0].flatten(0, 1))
            p_by_head.addcmul_(scores[0], score_scale)
        p.clamp_(min=MIN_EXPONENT).exp_()
        self.hide(p, rows.start - keys.start)
        if self.first_key is not None:
            hidden = torch.arange(keys.start, keys.stop) < self.first_key[batch, None, queries, None]
            p_by_head.masked_fill_(hidden, 0)  # (batch, 1, queries, keys)
        dv.add_(torch.bmm(p.to(q.dtype).mT, grad).view(dv.shape))
        torch.bmm(grad.to(ds.dtype), v.to(ds.dtype).mT, out=ds)  # dP, not rounded: D is subtracted from it
        ds_by_head.sub_(delta).mul_(p_by_head)
        if self.key_bias is not None:
            self.dkey_bias[batch, heads, keys] += ds_by_head.sum(-2)
            # The bias of the own key is subtracted. Without rounding, these sums are the gradient of lse. In bf16 they
            # are not, because D is computed from the rounded output, and FoX adds the errors of all later queries.
            self.dkey_bias[batch, heads, rows] -= ds_by_head.sum(-1)
        if sums[0] is not None:
            sums[0].add_(ds_by_head.sum(0) if len(ds_by_head) > 1 else ds_by_head[0])
        if score_scale is not None:
            if sums[1] is not None:
                sums[1].add_(scores[0].mul_(ds_by_head).sum(0))
            ds_by_head.mul_(score_scale)
        cast_ds = ds.to(q.dtype)
        dk.add_(torch.bmm(cast_ds.mT, q).view(dk.shape), alpha=self.scale)
        dq.add_(torch.bmm(cast_ds, k).view(dq.shape), alpha=self.scale)

    def hide(self, p: Tensor, first_distance: int) -> None:
        """Set the probabilities ``p`` (batch · heads, queries, keys) of hidden keys to 0.

        The first query and the first key have the distance ``first_distance``. Zeros after exp are faster than -inf
        before exp.
        """
        queries, keys = p.shape[1:]
        if first_distance < keys - 1:
            p.tril_(first_distance)
        if self.window is not None and first_distance + queries > self.window:
            p.triu_(first_distance - self.window + 1)


def choose_tile_shape(q: Tensor, length: int, window: int | None) -> tuple[int, int, int, int]:
    """Return the upper limits of the numbers of batch elements, heads, queries and keys in a tile.

    The constants below were the fastest of twenty choices, timed with two threads on cores with 2 MB of cache each.
    """
    batch, heads, queries, _ = q.shape
    scores = (512 if q.dtype.itemsize > 2 or length <= 256 else 1024) * 1024
    queries = min(128, queries)
    keys = min(512, length, length if window is None else max(queries, window))
    heads = max(1, min(heads, scores // (queries * keys)))
    return max(1, min(batch, scores // (queries * keys * heads))), heads, queries, keys


def key_bias_terms(own: Tensor, others: Tensor, near: bool, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Return two terms whose sum is the bias of each key minus that of the query's own key, without loss of precision.

    Args:
        own: Biases of the queries' own keys, (B, H, queries) fp32 or fp64.
        others: Biases of the keys, (B, H, keys).
        near: Whether some of the keys are keys of these queries. If not, all keys are earlier than the queries.
        dtype: Dtype of the terms.

    Returns:
        A term of each key, (B, H, 1, keys), or of each pair, (B, H, queries, keys), and a term of each query,
        (B, H, queries, 1).
    """
    if near:
        return (others[..., None, :] - own[..., None]).to(dtype), torch.zeros_like(own[..., None], dtype=dtype)
    last = others[..., -1:]  # relative to it, biases of near keys and queries are small, and so are their fp32 errors
    return (others - last).to(dtype)[..., None, :], (last - own).to(dtype)[..., None]


def negligible_bias(q: Tensor, k: Tensor, table: Tensor, score_scale: Tensor | None, scale: float) -> float:
    """Return a bias relative to that of the query's own key; all keys with lower biases together change no result.

    By the Cauchy-Schwarz inequality, no score exceeds the largest norm of a query times that of a key.
    """
    norms = [x.to(table.dtype).square().sum(-1).amax().sqrt() for x in (q, k)]
    largest = scale * float(norms[0] * norms[1]) * (1 if score_scale is None else float(score_scale.abs().amax()))
    table_range = float((table[:, : k.shape[2]].amax(-1) - table[:, 0]).amax())
    return math.log(torch.finfo(table.dtype).eps / k.shape[2]) - 3 - 2 * largest - table_range


def slices(start: int, stop: int, step: int, limit: int | None = None) -> list[slice]:
    """Return consecutive slices of ``step`` entries that cover start to stop; the last may end later, up to ``limit``.

    Without ``limit`` the last slice ends at ``stop``.
    """
    return [slice(i, min(i + step, limit or stop)) for i in range(start, stop, step)]


def bias_line(table: Tensor, length: int, block: int, window: int | None, hidden: float = -math.inf) -> Tensor:
    """Return the biases of each head in the order of the keys, of which matrices of biases are views.

    Args:
        table: Bias of each head at distance d = 0, 1, …, (H, >= length).
        length: Number of keys.
        block: Largest number of queries in a view.
        window: Distances >= window are hidden; None hides none.
        hidden: Value for hidden distances and for future keys.

    Returns:
        Tensor (H, length + block) in the dtype of ``table``: the biases at distances length - 1 to 0, followed by
        ``block`` entries for future keys.
    """
    line = table.new_full((table.shape[0], length + block), hidden)
    seen = length if window is None else min(length, window)
    line[:, length - seen : length] = table[:, :seen].flip(-1)
    return line


def toeplitz(line: Tensor, offset: int, height: int, width: int) -> Tensor:
    """Return the matrices ``line[h, offset + height - 1 - row + column]``, (H, height, width).

    For large tiles this is faster than reversing the rows of `kerple.attention.cpu.hankel_view`.
    """
    return shift_rows(line[:, None, offset : offset + height + width].expand(-1, height, -1).contiguous())[..., :width]


def add_by_distance(padded: Tensor, total: Tensor, first_distance: int) -> None:
    """Add the sum of each diagonal of a tile to ``total`` (H, >= Tk) at the distance of the diagonal.

    Entry (row, column) of the tile (H, height, width) has the distance ``first_distance`` + row - column. Entries at
    negative distances are 0. In ``padded`` (H, height + 1, height + width), each row of the tile follows ``height``
    zeros, and the last row is zero. If the flattened tensor is divided into rows of height + width + 1 entries, each
    diagonal of the tile becomes a column. One sum over rows is then enough, without atomic additions.
    """
    height, columns = padded.shape[1] - 1, padded.shape[2]
    skewed = padded.flatten(1)[:, : height * (columns + 1)].unflatten(1, (height, columns + 1))
    sums = skewed.sum(1)  # entry i is the sum at distance first_distance + height - i; entry 0 is 0
    largest, smallest = first_distance + height - 1, max(0, first_distance - (columns - height) + 1)
    total[:, smallest : largest + 1] += sums[:, 1 : largest - smallest + 2].flip(-1)

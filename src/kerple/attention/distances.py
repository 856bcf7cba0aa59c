"""A (H, T) table of distances read as a block of scores without writing the block down, and summed back.

Queries m in rows and keys n in columns have the distance d = m - n. With the *query order reversed* the distance is
constant along anti-diagonals, so a block is a view with strides (1, 1) of one vector: a Hankel matrix, no memory.
"""

import math

import torch
import torch.nn.functional as F
from torch import Tensor


def hankel_line(table: Tensor, length: int, block: int, window: int | None, hidden: float = -math.inf) -> Tensor:
    """The vector every block of scores is a view of.

    Args:
        table: (H, >= length), entry d belongs to distance d.
        length: Key rows T.
        block: Largest number of queries in a block.
        window: Distances >= window are hidden; None hides none.
        hidden: What stands at hidden distances and in the future.

    Returns:
        (H, length + block) in the dtype of ``table``: distance length - 1 first, 0 at ``length - 1``, then the future.
    """
    line = table.new_full((table.shape[0], length + block), hidden)
    seen = length if window is None else min(length, window)
    line[:, length - seen : length] = table[:, :seen].flip(-1)
    return line


def hankel_view(line: Tensor, length: int, rows: slice, columns: slice) -> Tensor:
    """Block (H, rows, columns) of ``hankel_line``'s vector, no copy; its first row is the *last* query of ``rows``."""
    height, width = rows.stop - rows.start, columns.stop - columns.start
    return line.narrow(1, length - rows.stop + columns.start, height + width - 1).unfold(1, width, 1)


def sum_by_distance(block: Tensor, total: Tensor, rows: slice, columns: slice) -> None:
    """Add the entries of a block (H, rows, columns), first row the *last* query, to ``total`` (H, T) by their distance.

    Padded to a pitch at which its anti-diagonals are columns, a plain sum over rows does it: no atomics, one order.
    Entries in the future must be zero.
    """
    heads, height, width = block.shape
    pitch = height + width - 1
    x = F.pad(block, (0, height)).flatten(1)[:, : height * pitch].view(heads, height, pitch).sum(1)  # (H, pitch)
    farthest = rows.stop - 1 - columns.start  # distance of x[:, 0]; falls by one per entry
    nearest = max(0, farthest - pitch + 1)
    total[:, nearest : farthest + 1] += x[:, : farthest + 1 - nearest].flip(-1)


class DistanceBlock(torch.autograd.Function):
    """``table[h, m - n]`` for a block of queries in natural order, ``hidden`` in the future; (H, rows, columns).

    Differentiable in the table, and deterministic, unlike an index_put with atomics.
    """

    @staticmethod
    def forward(ctx, table: Tensor, rows: slice, columns: slice, hidden: float) -> Tensor:  # type: ignore[override]
        ctx.rows, ctx.columns, ctx.shape = rows, columns, table.shape
        length = rows.stop
        line = hankel_line(table, length, rows.stop - rows.start, None, hidden)
        return hankel_view(line, length, rows, columns).flip(1)

    @staticmethod
    def backward(ctx, grad: Tensor):  # type: ignore[override]
        rows, columns = ctx.rows, ctx.columns
        future = torch.ones(grad.shape[1:], dtype=torch.bool, device=grad.device).triu(rows.start - columns.start + 1)
        total = grad.new_zeros(ctx.shape)
        sum_by_distance(grad.masked_fill(future, 0).flip(1), total, rows, columns)
        return total, None, None, None

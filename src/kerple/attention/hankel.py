"""Matrices of attention biases as strided views of a table of biases by distance, without a copy.

The table (H, T) has one row per head. Query m and key n have the distance d = m - n. If the order of the queries is
reversed, the distance is constant along the anti-diagonals of the matrix. A matrix with this property is called a
Hankel matrix. It is a view with strides (1, 1) of a vector. `kerple.positions.token_positions.table_block` returns
the same matrix with the queries in their usual order.
"""

import math

from torch import Tensor


def hankel_line(table: Tensor, length: int, block: int, window: int | None, hidden: float = -math.inf) -> Tensor:
    """Return a vector for each head. `hankel_view` returns views of these vectors.

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


def hankel_view(line: Tensor, length: int, rows: slice, columns: slice) -> Tensor:
    """Return the biases of a block, (H, queries, keys), as a view of the result of `hankel_line`.

    Args:
        line: Result of `hankel_line`.
        length: Number of keys that `hankel_line` got.
        rows: Indices of the queries of the block. The first row of the result belongs to the *last* of them.
        columns: Indices of the keys of the block.
    """
    height, width = rows.stop - rows.start, columns.stop - columns.start
    return line.narrow(1, length - rows.stop + columns.start, height + width - 1).unfold(1, width, 1)

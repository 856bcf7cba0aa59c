"""Blocks of attention biases as strided (Hankel) views of a table by distance (H, T), without a copy.

Query m and key n have the distance d = m - n. If the *order of the queries is reversed*, the distance is constant along
anti-diagonals. Then a block is a view with strides (1, 1) of one vector, called a Hankel matrix.
`kerple.positions.token_positions.table_block` returns the same block as an explicit tensor.
"""

import math

from torch import Tensor


def hankel_line(table: Tensor, length: int, block: int, window: int | None, hidden: float = -math.inf) -> Tensor:
    """Return the vector of which every block is a view.

    Args:
        table: (H, >= length); entry d is the bias at distance d.
        length: Number of keys T.
        block: Largest number of queries in a block.
        window: Distances >= window are hidden; None hides none.
        hidden: Value at hidden distances and for future keys.

    Returns:
        (H, length + block) in the dtype of ``table``: distances length - 1 to 0, then entries for future keys.
    """
    line = table.new_full((table.shape[0], length + block), hidden)
    seen = length if window is None else min(length, window)
    line[:, length - seen : length] = table[:, :seen].flip(-1)
    return line


def hankel_view(line: Tensor, length: int, rows: slice, columns: slice) -> Tensor:
    """Return a view (H, rows, columns) of the vector of `hankel_line`; its first row is the *last* of ``rows``."""
    height, width = rows.stop - rows.start, columns.stop - columns.start
    return line.narrow(1, length - rows.stop + columns.start, height + width - 1).unfold(1, width, 1)

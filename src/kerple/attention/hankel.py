"""A table of biases by distance (H, T), read as a block of scores by a strided (Hankel) view, without writing it down.

Queries m in rows and keys n in columns have the distance d = m - n. With the *query order reversed* the distance is
constant along anti-diagonals, so a block is a view with strides (1, 1) of one vector: a Hankel matrix, no memory.
`kerple.positions.token_positions.table_block` gives the same block as an explicit tensor.
"""

import math

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

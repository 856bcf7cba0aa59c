"""Figures of exact match: against length, and as a heat map over two sizes."""

from collections.abc import Mapping, Sequence

import numpy as np
from matplotlib.figure import Figure

from kerple.tasks.accuracy import Accuracy

Length = tuple[int, ...]
MOST_TICKS = 12


def against_length(curves: Mapping[str, Mapping[Length, Accuracy]], train_length: int, title: str) -> Figure:
    """Draw exact match against length, a line for each label; the training lengths are shaded.

    Args:
        curves: The accuracy at each ``(length,)``, for each label, such as a strategy.
        train_length: Largest length of training.
        title: Title of the figure.
    """
    figure = Figure(figsize=(6, 4), layout="constrained")
    axes = figure.subplots()
    axes.axvspan(0.5, train_length + 0.5, color="0.92", label="lengths of training")
    for label, curve in curves.items():
        lengths = [key[0] for key in curve]
        axes.plot(lengths, [100 * a.exact_match for a in curve.values()], marker=".", label=label)
    axes.set(xlabel="length of the problem", ylabel="exact match (%)", ylim=(-3, 103), title=title)
    axes.legend(fontsize="small")
    return figure


def heat_map(cells: Mapping[Length, Accuracy], names: Sequence[str], train_length: int, title: str) -> Figure:
    """Draw exact match as a heat map over two sizes; a frame marks the training lengths.

    Each size that was tested has a row or a column. Cells without test problems stay white.

    Args:
        cells: The accuracy at each pair of sizes (row, column).
        names: Names of the two sizes.
        train_length: Largest length of training.
        title: Title of the figure.
    """
    rows, columns = (sorted(set(sizes)) for sizes in zip(*cells, strict=True))
    values = np.full((len(rows), len(columns)), np.nan)
    for (row, column), accuracy in cells.items():
        values[rows.index(row), columns.index(column)] = 100 * accuracy.exact_match
    figure = Figure(figsize=(6, 5), layout="constrained")
    axes = figure.subplots()
    image = axes.imshow(values, origin="lower", vmin=0, vmax=100, cmap="viridis", aspect="auto")
    for axis, sizes in ((axes.xaxis, columns), (axes.yaxis, rows)):
        shown = range(0, len(sizes), -(-len(sizes) // MOST_TICKS))
        axis.set_ticks(shown, [str(sizes[i]) for i in shown])
    top, right = (sum(size <= train_length for size in sizes) - 0.5 for sizes in (rows, columns))
    axes.plot([-0.5, right, right], [top, top, -0.5], color="red", linewidth=1)
    axes.set(xlabel=names[1], ylabel=names[0], title=title)
    figure.colorbar(image, label="exact match (%)")
    return figure

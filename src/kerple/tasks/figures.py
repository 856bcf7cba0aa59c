"""Figures of accuracy: against length, and over two sizes."""

from collections.abc import Mapping, Sequence

import numpy as np
from matplotlib.figure import Figure

from kerple.tasks.accuracy import Accuracy

Length = tuple[int, ...]


def against_length(curves: Mapping[str, Mapping[Length, Accuracy]], train_length: int, title: str) -> Figure:
    """Exact match against length, one line for each label, lengths of training shaded.

    Args:
        curves: For each label, such as a strategy, the accuracy at each ``(length,)``.
        train_length: Longest length of training.
        title: Of the figure.
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
    """Exact match over two sizes; cells without test problems stay white, the lengths of training are framed.

    Args:
        cells: The accuracy at each pair of sizes.
        names: What the two sizes count.
        train_length: Longest length of training.
        title: Of the figure.
    """
    rows, columns = (range(min(sizes), max(sizes) + 1) for sizes in zip(*cells, strict=True))
    values = np.full((len(rows), len(columns)), np.nan)
    for (row, column), accuracy in cells.items():
        values[row - rows[0], column - columns[0]] = 100 * accuracy.exact_match
    figure = Figure(figsize=(6, 5), layout="constrained")
    axes = figure.subplots()
    extent = (columns[0] - 0.5, columns[-1] + 0.5, rows[0] - 0.5, rows[-1] + 0.5)
    image = axes.imshow(values, origin="lower", extent=extent, vmin=0, vmax=100, cmap="viridis", aspect="auto")
    right, top = min(train_length + 0.5, extent[1]), min(train_length + 0.5, extent[3])
    axes.plot([extent[0], right, right], [top, top, extent[2]], color="red", linewidth=1)
    axes.set(xlabel=names[1], ylabel=names[0], title=title)
    figure.colorbar(image, label="exact match (%)")
    return figure

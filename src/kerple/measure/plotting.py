"""Functions for the figures of measurements: figures with empty axes, labels, and heat maps."""

from collections.abc import Sequence
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from torch import Tensor


def panel(width: float, height: float) -> tuple[Figure, Axes]:
    """Return an empty figure of this size in inches, and its axes."""
    figure = Figure(figsize=(width, height), layout="constrained")
    return figure, figure.add_subplot()


def grid(count: int, width: float, height: float) -> tuple[Figure, list[Axes]]:
    """Return an empty figure of ``count`` panels in rows of three, each of this size in inches, and their axes."""
    columns = min(3, count)
    rows = -(-count // columns)
    figure = Figure(figsize=(width * columns, height * rows), layout="constrained")
    return figure, [figure.add_subplot(rows, columns, number + 1) for number in range(count)]


def label_axes(
    axes: Axes, training_length: int | None = None, lengths: Sequence[int] | None = None, **settings: Any
) -> None:
    """Add labels, grid lines, a legend, and a vertical line at the training length.

    Args:
        axes: Axes with labelled curves.
        training_length: The training length in tokens; None for no vertical line.
        lengths: Ticks of the x axis, in tokens. The axis is then logarithmic. None leaves the axis unchanged.
        **settings: Arguments of `Axes.set`, such as xlabel, ylabel and title.
    """
    if training_length is not None:
        axes.axvline(training_length, color="0.6", ls="--", lw=1, label=f"training length {training_length:,}")
    if lengths is not None:
        axes.set_xscale("log", base=2)
        axes.set_xticks(lengths, [f"{length:,}" for length in lengths], rotation=30 if len(lengths) > 6 else 0)
        axes.minorticks_off()
    axes.set(**settings)
    axes.grid(alpha=0.3)
    axes.legend(fontsize=8)


def heat_map(axes: Axes, values: Tensor, number_format: str, **settings: Any) -> Any:
    """Draw a heat map with a number in each cell.

    Args:
        axes: Empty axes.
        values: The numbers, (rows, columns).
        number_format: Format of the numbers, such as ``.3g``.
        **settings: Arguments of `Axes.imshow`, such as cmap.

    Returns:
        The image, for ``Figure.colorbar``.
    """
    image = axes.imshow(values.numpy(), aspect="auto", **settings)
    middle = sum(image.get_clim()) / 2
    for (row, column), value in np.ndenumerate(values.numpy()):
        colour = "white" if value < middle else "black"
        axes.text(column, row, f"{value:{number_format}}", ha="center", va="center", color=colour, fontsize=8)
    return image

"""Figures of the loss by position, and of the context gain (windowed - full loss) by distance beyond the window."""

from collections.abc import Iterator
from dataclasses import replace

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from numpy.typing import NDArray

from kerple.compare.estimates import Estimate, estimate, over_seeds
from kerple.compare.figures import INTERVAL, Styles, add_legend, literal, plain, styles_of

POINTS = 32  # points of a curve of the loss by position
PER_OCTAVE = 2  # points per octave of distance of a curve of the gain
LABELS = {"loss": "mean loss (nats per token)", "gain": "windowed - full (nats per token)"}


def context_figures(table: pd.DataFrame | None, strategies: pd.Series) -> Iterator[tuple[str, Figure]]:
    """Yield (name, figure) of the loss by position and of the context gain by distance beyond the window.

    Each part of the comparison, such as a corpus, has its own figures.

    Bands are 95% intervals over seeds and segments; a single seed has no band. Segments of one document are not
    independent, so a band can be too narrow. Intervals in tables are over documents or groups of documents. In
    results/earlier/since-2023, the standard error of ALiBi's loss over documents is 1.7 times that over segments. For
    the gain, the ratio is 0.8 to 1.5, depending on the distance.

    Args:
        table: A row for each run and bin of positions, or None for no figures. Its columns are

            - ``strategy``, ``seed``, and ``part`` if the comparison has parts,
            - ``first``: first position of the bin,
            - ``length`` of the segments, ``window`` of the windowed attention, and number of ``segments``,
            - ``loss`` and ``gain``: means over segments, with standard errors ``loss_error`` and ``gain_error``.
        strategies: Labels of the strategies to draw, in the order of their colours.
    """
    if table is None:
        return
    table = table[table["strategy"].isin(strategies)]
    styles = styles_of(strategies)
    for part, of_part in parts(table):
        yield f"loss-by-position{part and f'-{part}'}", _drawn(of_part, styles, "loss")
    for part, of_part in parts(table[table["first"] >= table["window"]]):
        yield f"context-gain{part and f'-{part}'}", _drawn(of_part, styles, "gain")


def parts(table: pd.DataFrame) -> Iterator[tuple[str, pd.DataFrame]]:
    """Yield the name and the rows of each part of the comparison. Without parts, the name of all rows is empty."""
    for part, of_part in table.assign(part=table.get("part", "")).groupby("part", sort=False):
        yield str(part), of_part


def curve(table: pd.DataFrame, column: str) -> tuple[NDArray[np.float64], list[Estimate]]:
    """Return the horizontal coordinates of the points of one strategy's curve, and an estimate at each of them.

    For the loss, bins are merged into `POINTS` bins of equal width. For the gain, they are merged by distance beyond
    the window into `PER_OCTAVE` bins per octave. The standard error of a merged bin is set to the mean of the standard
    errors of its bins. Whatever the correlation of the bins, the true standard error is not larger.

    Args:
        table: The rows of the strategy, of all seeds, see `context_figures`.
        column: ``loss`` or ``gain``.
    """
    width = int(np.diff(np.unique(table["first"])).min()) if table["first"].nunique() > 1 else 1
    middle = table["first"] + width / 2
    if column == "gain":
        middle = middle - table["window"]
        groups = np.floor(np.log2(middle) * PER_OCTAVE)
    else:
        groups = middle // (table["length"] / POINTS)
    points, estimates = [], []
    for _, group in table.assign(middle=middle).groupby(groups):
        by_seed = group.groupby("seed")[[column, f"{column}_error"]].mean()
        segments = int(group["segments"].min())
        # all seeds read the same text, so more seeds do not reduce its variance
        variance = float((by_seed[f"{column}_error"] ** 2).mean())
        points.append(float(group["middle"].mean()))
        found = estimate(over_seeds(by_seed[column]))
        estimates.append(replace(found, text_variance=variance, blocks=segments, text_freedom=segments - 1))
    return np.asarray(points), estimates


def _drawn(table: pd.DataFrame, styles: Styles, column: str) -> Figure:
    """Draw the curve and the band of each strategy.

    Args:
        table: The rows of all strategies.
        styles: The style of each strategy.
        column: ``loss`` or ``gain``.
    """
    figure = Figure(figsize=(8.2, 4.2), layout="constrained")
    ax = figure.subplots()
    for strategy, group in table.groupby("strategy", sort=False):
        points, estimates = curve(group, column)
        low, high = np.transpose([estimate.interval() for estimate in estimates])
        style = styles[str(strategy)] | ({"marker": ""} if column == "loss" else {"markersize": 4})
        means = [estimate.mean for estimate in estimates]
        ax.plot(points, means, label=literal(str(strategy)), linewidth=1.3, **style)
        ax.fill_between(points, low, high, alpha=0.15, color=style["color"], linewidth=0)
    _axes(ax, table, column)
    several_seeds = table.groupby("strategy")["seed"].nunique().max() > 1
    add_legend(figure, INTERVAL if several_seeds else None)
    return figure


def _axes(ax: Axes, table: pd.DataFrame, column: str) -> None:
    """Set the scale, limits and labels of the axes.

    Args:
        ax: The axes, with the curves.
        table: The rows of all strategies.
        column: ``loss`` or ``gain``.
    """
    window = int(table["window"].iloc[0])
    if column == "gain":
        ax.set_xscale("log", base=2)
        ax.xaxis.set_major_formatter(lambda x, _: f"{x:.0f}")
        ax.axhline(0, color="black", linewidth=0.8)
        # the limits keep small gains visible, and cut off the curve of a collapsed strategy
        low, high = ax.get_ylim()
        gains = [max(np.asarray(line.get_ydata(), dtype=np.float64).tolist()) for line in ax.lines]
        ax.set_ylim(max(low, -3 * max(*gains, 0.005)), min(high, 4 * max(*gains, 0.005)))
    else:
        ax.axvline(window, color="black", linewidth=0.8, linestyle=":")
        losses = table[table["first"] >= window / 2]["loss"]  # the first tokens have little context and a high loss
        if np.isfinite(losses.min()):
            ax.set_ylim(losses.min() - 0.1, min(losses.max(), losses.min() + 1) + 0.1)
    where = f"distance beyond the {window} tokens of the window" if column == "gain" else "position in the segment"
    ax.set(xlabel=where, ylabel=LABELS[column])
    plain(ax)

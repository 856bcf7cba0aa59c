"""Figures of the loss by position in a long segment, and of the context gain by distance."""

from collections.abc import Iterator

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from numpy.typing import NDArray

from kerple.compare.estimates import Estimate
from kerple.compare.figures import INTERVAL, LEGEND, Styles, literal, plain, styles_of

POINTS = 32  # of a curve of the loss by position
PER_OCTAVE = 2  # points per octave of distance of a curve of the gain
COLUMNS = {"loss": "mean loss (nats per token)", "gain": "windowed - full (nats per token)"}


def context_figures(table: pd.DataFrame, strategies: pd.Series) -> Iterator[tuple[str, Figure]]:
    """Yield (name, figure) of the loss by position, and of the context gain by distance beyond the window.

    Bands are 95% intervals over seeds and segments; a single seed has no band. Segments of one document are not
    independent, so the bands are too narrow. For ALiBi in results/earlier/since-2023, the standard error over documents
    is 1.7 times as large for the loss, and 0.8 to 1.5 times as large for the gain. The tables use documents.

    Args:
        table: Columns strategy, seed, first (position of a bin), length, window and segments; loss, gain, loss_error
            and gain_error, means and standard errors over segments; and part if the comparison has several parts.
        strategies: All strategies of the comparison, which determine the colours.
    """
    table, styles = table.assign(strategy=table["strategy"].map(literal)), styles_of(strategies.map(literal))
    for part, of_part in _parts(table):
        yield f"loss-by-position{part and f'-{part}'}", _drawn(of_part, styles, "loss")
    for part, of_part in beyond_window(table):
        yield f"context-gain{part and f'-{part}'}", _drawn(of_part, styles, "gain")


def beyond_window(table: pd.DataFrame | None) -> Iterator[tuple[str, pd.DataFrame]]:
    """Yield (part, rows) of the positions beyond the window. The part is empty if there is only one."""
    for part, of_part in _parts(table) if table is not None else []:
        rows = of_part[of_part["first"] >= of_part["window"]]
        if len(rows):
            yield part, rows


def _parts(table: pd.DataFrame) -> list[tuple[str, pd.DataFrame]]:
    if "part" not in table:
        return [("", table)]
    return [(str(part), of_part) for part, of_part in table.groupby("part", sort=False)]


def curve(table: pd.DataFrame, column: str) -> tuple[NDArray[np.float64], list[Estimate]]:
    """Horizontal coordinates of the points of one strategy's curve, and an estimate at each of them.

    For the loss, bins are merged into `POINTS` bins of equal width. For the gain, they are merged by distance beyond
    the window into `PER_OCTAVE` bins per octave. The standard error of a mean of bins is at most the mean of their
    standard errors for any correlation; this upper bound is used.

    Args:
        table: The rows of the strategy, of all seeds.
        column: ``loss`` or ``gain``.
    """
    width = int(np.diff(np.unique(table["first"])).min()) if table["first"].nunique() > 1 else 1
    middle = table["first"] + width / 2
    if column == "gain":
        middle = middle - table["window"]
        groups = np.floor(np.log2(middle) * PER_OCTAVE)
    else:
        groups = middle // (table["length"] / POINTS)
    names = {"value": column, "error": f"{column}_error"}
    points, estimates = [], []
    for _, group in table.assign(middle=middle).groupby(groups):
        by_seed = group.groupby("seed")[list(names.values())].mean()
        values, errors = by_seed[names["value"]], by_seed[names["error"]]
        seeds = len(values)
        over_seeds = float(values.var(ddof=1) / seeds) if seeds > 1 else np.nan
        # all seeds read the same text, so more seeds do not reduce its variance
        text = float((errors**2).mean())
        points.append(float(group["middle"].mean()))
        segments = int(group["segments"].min())
        estimates.append(Estimate(float(values.mean()), over_seeds, text, seeds, segments, seeds - 1, segments - 1))
    return np.asarray(points), estimates


def _drawn(table: pd.DataFrame, styles: Styles, column: str) -> Figure:
    figure = Figure(figsize=(8.2, 4.2), layout="constrained")
    ax = figure.subplots()
    for strategy, group in table.groupby("strategy", sort=False):
        points, estimates = curve(group, column)
        low, high = np.transpose([estimate.interval() for estimate in estimates])
        style = styles[str(strategy)] | ({"marker": ""} if column == "loss" else {"markersize": 4})
        ax.plot(points, [estimate.mean for estimate in estimates], label=strategy, linewidth=1.3, **style)
        ax.fill_between(points, low, high, alpha=0.15, color=style["color"], linewidth=0)
    _axes(ax, table, column)
    figure.legend(title=INTERVAL, **LEGEND)
    return figure


def _axes(ax: Axes, table: pd.DataFrame, column: str) -> None:
    window = int(table["window"].iloc[0])
    if column == "gain":
        ax.set_xscale("log", base=2)
        ax.xaxis.set_major_formatter(lambda x, _: f"{x:.0f}")
        ax.axhline(0, color="black", linewidth=0.8)
        # limits keep small gains visible; the curve of a strategy that collapses leaves the axis
        low, high = ax.get_ylim()
        gains = [max(np.asarray(line.get_ydata(), dtype=np.float64).tolist()) for line in ax.lines]
        ax.set_ylim(max(low, -3 * max(*gains, 0.005)), min(high, 4 * max(*gains, 0.005)))
    else:
        ax.axvline(window, color="black", linewidth=0.8, linestyle=":")
        later = table[table["first"] >= window / 2]["loss"]  # without the first tokens, which have little context
        if np.isfinite(later.min()):
            ax.set_ylim(later.min() - 0.1, min(later.max(), later.min() + 1) + 0.1)
    where = f"distance beyond the {window} tokens of the window" if column == "gain" else "position in the segment"
    ax.set(xlabel=where, ylabel=COLUMNS[column])
    plain(ax)

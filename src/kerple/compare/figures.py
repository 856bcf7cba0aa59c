"""Figures of a report as files: its charts drawn with Matplotlib."""

import re
from collections import Counter
from collections.abc import Iterable, Sequence
from itertools import cycle
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
from matplotlib import rc_context
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import LogLocator, MaxNLocator, NullLocator

from kerple.base.errors import require
from kerple.compare.charts import Chart, Panel, context_charts, metric_charts
from kerple.compare.finished_runs import Runs

# the first seven are Okabe and Ito's palette for colour-blind readers; curves in other colours have other dashes too
COLOURS = ["#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000"]
COLOURS += ["#7A1FE0", "#6B6B00", "#C00060", "#808080", "#7A3B1E", "#00008B", "#E030E0"]
DASHES = ("-", "--", ":", "-.")  # each for seven curves in turn
MARKERS = "osD^vP*X"
Styles = dict[str, dict[str, Any]]
"""Colour, dashes and marker by strategy."""
# of figures for print, in inches: width of a column, height of the axes with the title of the legend, height of a row
# of the legend
WIDTH, AXES, ROW = 3.25, 2.2, 0.15
PRINT: Any = {"pdf.fonttype": 42, "font.size": 7}  # 42: TrueType fonts, which publishers require


def write_figures(drawn: Iterable[Chart], strategies: pd.Series, folder: Path) -> None:
    """Write charts as PNG and SVG. The files contain no time of writing. ``strategies``: in the order of the styles."""
    styles = styles_of(strategies)
    for chart in drawn:
        if chart.name:
            figure, path = draw(chart, styles), folder / f"{chart.name.replace('/', '_')}.svg"
            figure.savefig(path.with_suffix(".png"), dpi=150, metadata={"Software": None})
            with rc_context({"svg.hashsalt": chart.name}):
                figure.savefig(path, metadata={"Date": None})


def check_printed(summary: pd.DataFrame, strategies: Sequence[str]) -> None:
    """Raise a UserError if a strategy of `write_print_figures` has no finished run."""
    present = list(dict.fromkeys(summary["strategy"]))
    missing = ", ".join(strategy for strategy in strategies if strategy not in present)
    expected = f"some of {', '.join(present)}"
    require(not missing, "compare: figure_strategies", f"{missing} without a finished run", expected)


def write_print_figures(
    summary: pd.DataFrame, runs: Runs, strategies: Sequence[str], baseline: str, folder: Path
) -> None:
    """Write the figures for print as ``<folder>/<figure>.pdf``: one panel with the width of a column of a paper.

    The files are deterministic.

    Args:
        summary: Result of `kerple.compare.statistics.summarise`.
        runs: The summarised runs.
        strategies: Labels of the strategies to show, in the order of their colours; empty for all.
        baseline: The strategy in the denominator of ratios.
        folder: Folder of the PDFs, which is created if it does not exist.
    """
    chosen = summary.set_index("strategy").loc[list(strategies or summary["strategy"].unique())].reset_index()
    styles = styles_of(chosen["strategy"])
    folder.mkdir(parents=True, exist_ok=True)
    drawn = [chart for _, of in chosen.groupby("protocol", sort=False) for chart in metric_charts(of, runs, baseline)]
    for column in ("loss", "gain"):
        drawn += context_charts(runs.analyses.get("context_gain"), chosen["strategy"], column)
    files = Counter[str]()
    with rc_context(PRINT):
        for chart in drawn:
            if chart.name:
                figure = draw(chart, styles)
                narrow(figure)
                name = "-".join(filter(None, [chart.name, chart.panels[0].name]))
                file = re.sub(r"[^\w.-]+", "_", name)  # labels may have slashes
                files[file] += 1
                number = f"_{files[file]}" * (files[file] > 1)  # other labels may give the same file
                figure.savefig(folder / f"{file}{number}.pdf", metadata={"CreationDate": None})


def styles_of(strategies: pd.Series) -> Styles:
    """The style of each strategy, in the order of first appearance. The first 28 styles differ in colour or dashes."""
    looks = zip(cycle(COLOURS), cycle(np.repeat(DASHES, 7).tolist()), cycle(MARKERS), strict=False)
    styles = ({"color": color, "linestyle": dashes, "marker": marker} for color, dashes, marker in looks)
    return dict(zip(dict.fromkeys(strategies), styles, strict=False))


def draw(chart: Chart, styles: Styles) -> Figure:
    """Draw the panels of a chart, with a common vertical axis and a legend."""
    columns = min(len(chart.panels), 3)
    rows = -(-len(chart.panels) // columns)
    figure = Figure(figsize=(4.6 * columns + 1.8, 3.6 * rows + 0.3), layout="constrained")
    axes = figure.subplots(rows, columns, squeeze=False, sharey=True)
    for ax in axes.flat[len(chart.panels) :]:
        ax.remove()
    for ax, panel in zip(axes.flat, chart.panels, strict=False):
        _draw_panel(ax, panel, styles, chart)
    first = axes[0, 0]
    if chart.limits:
        first.set_ylim(chart.limits)  # shared by all panels
    if chart.log:
        first.set_yscale("log")
        _set_log_ticks(first)
    for ax in axes[:, 0]:
        ax.set_ylabel(literal(chart.label))
    add_legend(figure, chart.note or None)
    return figure


def _draw_panel(ax: Axes, panel: Panel, styles: Styles, chart: Chart) -> None:
    """Draw the curves of a panel with their bands, set its horizontal axis, and mark a place on it."""
    for strategy, points in panel.points.groupby("strategy", sort=False):
        style = styles[str(strategy)] | ({} if chart.lines else {"linestyle": ""})
        ax.plot(points["x"], points["y"], label=literal(str(strategy)), markersize=4, linewidth=1.5, **style)
        ax.fill_between(points["x"], points["low"], points["high"], alpha=0.15, color=style["color"], linewidth=0)
    ax.set_title(literal(panel.name), fontsize=10, pad=14)
    ax.set_xlabel(panel.across)
    plain(ax)
    if chart.zero:
        ax.axhline(0, color="black", linewidth=0.8)
    if panel.log:
        places = np.unique(panel.points["x"])
        ax.set_xscale("log", base=2)
        shown = places[:: -(-len(places) // 8)]
        ax.set_xticks(shown, [f"{place:.0f}" for place in shown])
        ax.minorticks_off()
    else:
        ax.xaxis.set_major_locator(MaxNLocator(8, integer=True))
    if panel.mark and panel.points["x"].min() <= panel.mark[0] <= panel.points["x"].max():
        ax.axvline(panel.mark[0], color="black", linewidth=0.8, linestyle=":")
        # above the axes, where the text covers no curve
        ax.text(panel.mark[0], 1.01, panel.mark[1], transform=ax.get_xaxis_transform(), fontsize=7, ha="center")


def _set_log_ticks(ax: Axes) -> None:
    """Set ticks of a logarithmic vertical axis at round numbers, without exponents."""
    low, high = ax.get_ylim()
    ax.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5) if high > 20 * low else (1, 1.2, 1.5, 2, 3, 4, 5, 7)))
    ax.yaxis.set_major_formatter("{x:g}")
    ax.yaxis.set_minor_locator(NullLocator())


def plain(ax: Axes) -> None:
    """Draw a faint grid, and hide the frame at the top and the right."""
    ax.grid(alpha=0.25, linewidth=0.6)
    ax.spines[["top", "right"]].set_visible(False)


def literal(label: str) -> str:
    """Escape a label. Matplotlib would show text between $ as a formula, and hide labels that begin with _."""
    return re.sub("^_", " _", label.replace("$", r"\$"))


def add_legend(figure: Figure, title: str | None) -> None:
    """Add a legend of all curves at the right. If it needs several columns, the figure becomes wider."""
    handles = {name: h for ax in figure.axes for h, name in zip(*ax.get_legend_handles_labels(), strict=True)}
    columns = -(-len(handles) // 15)  # as many rows as fit into the height of a panel
    figure.set_figwidth(figure.get_figwidth() + 1.8 * (columns - 1))
    place: Any = {"loc": "outside right center", "ncols": columns, "frameon": False}
    # handlelength: in units of the font size, long enough to show the dashes
    figure.legend(handles.values(), handles.keys(), title=title, fontsize=9, handlelength=3.2, **place)


def narrow(figure: Figure) -> None:
    """Fit a figure of one panel into a column: put its legend below, and remove its title, which a caption replaces.

    Within each group of three curves, line width and marker size decrease, and the thinner curve is on top. Up to three
    identical curves therefore stay visible.
    """
    (ax,) = figure.axes
    title = figure.legends[0].get_title().get_text().replace("\n", " ")
    handles, labels = ax.get_legend_handles_labels()
    for i, curve in enumerate(handles):
        curve.set(markersize=(5, 3.5, 2)[i % 3], linewidth=(2.2, 1.3, 0.7)[i % 3], zorder=2 + 0.1 * (i % 3))
    for shade in ax.collections:
        shade.set_alpha(min(0.15, 0.6 / len(handles)))
    ax.set_title("")
    legend: Any = {"loc": "outside lower center", "frameon": False, "fontsize": 7, "title": title, "title_fontsize": 7}
    for columns in (3, 2, 1):  # the largest number of columns with which the legend fits into the width
        figure.legends[0].remove()
        below = figure.legend(handles, labels, ncols=columns, handlelength=3, columnspacing=1, **legend)
        figure.set_size_inches(WIDTH, AXES + ROW * -(-len(labels) // columns))
        if below.get_window_extent().width < figure.bbox.width:
            break

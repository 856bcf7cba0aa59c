"""Figures for print: PDFs of one panel with the width of a column of a two-column paper."""

import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pandas as pd
from matplotlib import rc_context
from matplotlib.figure import Figure

from kerple.base.errors import UserError
from kerple.compare.context_gain_figures import context_figures
from kerple.compare.figures import figures
from kerple.compare.finished_runs import Runs

# in inches: width of a column, height of the axes with the title of the legend, height of a row of the legend
WIDTH, AXES, ROW = 3.25, 2.2, 0.15
STYLE: Any = {"pdf.fonttype": 42, "font.size": 7}  # 42: TrueType fonts, which publishers require


def write_print_figures(
    summary: pd.DataFrame, runs: Runs, strategies: Sequence[str], baseline: str, folder: Path
) -> None:
    """Write the figures of the report for print as ``<folder>/<figure>.pdf``. The files are deterministic.

    Args:
        summary: Result of `kerple.compare.statistics.summarise`.
        runs: The summarised runs.
        strategies: Labels of the strategies to show, in the order of their colours; empty for all.
        baseline: The strategy in the denominator of ratios.
        folder: Folder of the PDFs, which is created if it does not exist.

    Raises:
        UserError: If a strategy has no finished run.
    """
    present = list(dict.fromkeys(summary["strategy"]))
    if missing := ", ".join(strategy for strategy in strategies if strategy not in present):
        expected = f"some of {', '.join(present)}"
        raise UserError(f"compare: figure_strategies: got {missing} without a finished run, expected {expected}")
    chosen = summary.set_index("strategy").loc[list(strategies or present)].reset_index()
    drawings: dict[str, Figure] = {}
    with rc_context(STYLE):
        for protocol, cells in chosen.groupby("protocol", sort=False):
            for name, figure in figures(cells, runs.training_lengths, baseline):
                drawings[f"{name}-{protocol}"] = figure
        drawings |= context_figures(runs.analyses.get("context_gain"), chosen["strategy"])
        folder.mkdir(parents=True, exist_ok=True)
        for name, figure in drawings.items():
            _narrow(figure)
            file = re.sub(r"[^\w.-]+", "_", name)  # labels may have slashes
            figure.savefig(folder / f"{file}.pdf", metadata={"CreationDate": None})


def _narrow(figure: Figure) -> None:
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

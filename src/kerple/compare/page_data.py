"""Data of the interactive figures of the page, for its script."""

import math
from typing import Any

import numpy as np
import pandas as pd

from kerple.compare.context_gain import beyond_window, curve
from kerple.compare.figures import style
from kerple.compare.runs import Runs
from kerple.compare.statistics import in_tokens, lower_is_better
from kerple.compare.tables import METRIC_NAMES

DASHES = {"-": [], "--": [8, 4], ":": [2, 3], "-.": [10, 3, 2, 3]}  # pixels of line, gap, line, …


def page_figures(summary: pd.DataFrame, runs: Runs) -> list[dict[str, Any]]:
    """The interactive figures of the page, in order: each metric against length, and the context gain by distance.

    Each figure has a name, its vertical axes (see page.js), whether lower is better, whether it is open at first, and
    its protocols. A protocol has the values of each strategy at each length; a missing value is null.

    Args:
        summary: A row for each strategy and cell, with ratios and their intervals.
        runs: The runs that are summarised.
    """
    order = list(dict.fromkeys(summary["strategy"]))
    drawn: list[dict[str, Any]] = []
    for metric, of_metric in summary.groupby("metric", sort=False):
        lower = lower_is_better(str(metric))
        protocols = []
        for protocol, chosen in of_metric.groupby("protocol", sort=False):
            lengths = sorted(int(length) for length in chosen["length"].unique())
            cells = runs.results[(runs.results["metric"] == metric) & (runs.results["protocol"] == protocol)]
            tokens = in_tokens(str(metric), str(protocol))
            curves = [_against_length(chosen, cells, lengths, strategy, i) for i, strategy in enumerate(order)]
            about = {"name": str(protocol), "trained": runs.training_lengths[str(protocol)], "lengths": lengths}
            about |= {"tokens": tokens, "across": "evaluation length (tokens)" if tokens else "length of the problem"}
            protocols.append(about | {"strategies": [curve for curve in curves if curve]})
        axes = ["log", "linear", "start", "baseline"] if lower else ["linear"]
        name = METRIC_NAMES.get(str(metric), str(metric))
        drawn.append({"name": name, "lower": lower, "axes": axes, "open": not drawn, "protocols": protocols})
    gains = _gains(runs.analyses.get("context_gain"), order)
    return [*drawn[:1], *gains, *drawn[1:]]


def _against_length(
    chosen: pd.DataFrame, cells: pd.DataFrame, lengths: list[int], strategy: str, i: int
) -> dict[str, Any] | None:
    rows = chosen[chosen["strategy"] == strategy].set_index("length").reindex(lengths)
    if rows["mean"].isna().all():
        return None
    seeds = cells[cells["strategy"] == strategy].pivot(index="length", columns="seed", values="value")
    return _look(strategy, i) | {
        "seeds": {str(seed): _numbers(values.reindex(lengths)) for seed, values in seeds.items()},
        **{name: _numbers(rows[name]) for name in ("mean", "std", "ratio", "ratio_low", "ratio_high")},
    }


def _gains(table: pd.DataFrame | None, order: list[str]) -> list[dict[str, Any]]:
    """The figure of the context gain by distance, a protocol per part; no figure without distances beyond a window."""
    protocols = []
    for part, of_part in beyond_window(table):
        window = int(of_part["window"].iloc[0])
        strategies, distances = [], np.empty(0)
        for strategy, rows in of_part.groupby("strategy", sort=False):
            distances, estimates = curve(rows, "gain")
            low, high = np.transpose([estimate.interval() for estimate in estimates])
            values = {"mean": [estimate.mean for estimate in estimates], "low": low, "high": high}
            numbers = {name: _numbers(of_name) for name, of_name in values.items()}
            strategies.append(_look(str(strategy), order.index(str(strategy))) | numbers)
        about = {"name": part, "trained": None, "lengths": distances.tolist(), "tokens": True}
        across = f"distance beyond the {window} tokens of the window"
        protocols.append(about | {"across": across, "strategies": strategies})
    figure = {"name": "Context gain", "lower": False, "axes": ["gain"], "open": True, "protocols": protocols}
    return [figure] if protocols else []


def _look(strategy: str, i: int) -> dict[str, Any]:
    look = style(i)
    return {"name": strategy, "colour": look["color"], "dash": DASHES[look["linestyle"]]}


def _numbers(values: Any) -> list[float | None]:
    """Values for strict JSON; missing and infinite values are None."""
    return [float(f"{value:.7g}") if math.isfinite(value) else None for value in values]

"""Data of the interactive figures of the page, for its script."""

import math
from typing import Any

import numpy as np
import pandas as pd

from kerple.compare.context_gain_figures import curve, parts
from kerple.compare.figures import Styles, styles_of
from kerple.compare.finished_runs import Runs
from kerple.compare.statistics import METRIC_NAMES, in_tokens, lower_is_better

DASHES = {"-": [], "--": [8, 4], ":": [2, 3], "-.": [10, 3, 2, 3]}  # lengths of dash, gap, dash, … in pixels


def page_figures(summary: pd.DataFrame, runs: Runs) -> list[dict[str, Any]]:
    """Data of the figures in their order: the first metric against length, the context gain, and the other metrics.

    Each figure has a name, the vertical axes that a reader can select (``AXES`` of page.js), whether lower is better,
    whether the page shows it unfolded, and its protocols. A protocol has the values of each strategy at each length;
    a missing value is None.

    Args:
        summary: Result of `kerple.compare.statistics.summarise`.
        runs: The summarised runs.
    """
    styles = {
        strategy: {"name": strategy, "colour": of["color"], "dash": DASHES[of["linestyle"]]}
        for strategy, of in styles_of(summary["strategy"]).items()
    }
    of_metrics: list[dict[str, Any]] = []
    for metric, of_metric in summary.groupby("metric", sort=False):
        lower = lower_is_better(str(metric))
        protocols = []
        for protocol, cells in of_metric.groupby("protocol", sort=False):
            lengths = sorted(int(length) for length in cells["length"].unique())
            results = runs.results[(runs.results["metric"] == metric) & (runs.results["protocol"] == protocol)]
            tokens = in_tokens(str(metric), str(protocol))
            curves = [
                style | _against_length(cells, results, lengths, strategy)
                for strategy, style in styles.items()
                if (cells["strategy"] == strategy).any()
            ]
            about = {"name": str(protocol), "trained": runs.training_lengths[str(protocol)], "lengths": lengths}
            about |= {"tokens": tokens, "across": "evaluation length (tokens)" if tokens else "length of the problem"}
            protocols.append(about | {"strategies": curves})
        figure = {"name": METRIC_NAMES[str(metric)], "lower": lower, "open": not of_metrics, "protocols": protocols}
        of_metrics.append(figure | {"axes": ["log", "linear", "start", "baseline"] if lower else ["linear"]})
    return [*of_metrics[:1], *_gains(runs.analyses.get("context_gain"), styles), *of_metrics[1:]]


def _against_length(cells: pd.DataFrame, results: pd.DataFrame, lengths: list[int], strategy: str) -> dict[str, Any]:
    """The values of a strategy's curve at each length: those of each seed, and mean, std and ratios.

    Args:
        cells: The rows of the summary with one metric and protocol.
        results: The results of the runs with this metric and protocol.
        lengths: All lengths of the protocol.
        strategy: Label of the strategy.
    """
    rows = cells[cells["strategy"] == strategy].set_index("length").reindex(lengths)
    seeds = results[results["strategy"] == strategy].pivot(index="length", columns="seed", values="value")
    statistics = {name: _numbers(rows[name]) for name in ("mean", "std", "ratio", "ratio_low", "ratio_high")}
    return statistics | {"seeds": {str(seed): _numbers(values.reindex(lengths)) for seed, values in seeds.items()}}


def _gains(table: pd.DataFrame | None, styles: Styles) -> list[dict[str, Any]]:
    """The figure of the context gain, as a list; empty if the table has no bin of positions beyond the window.

    Args:
        table: See `kerple.compare.context_gain_figures.context_figures`. Its parts take the place of protocols.
        styles: Name, colour and dashes of each strategy's curve.
    """
    protocols = []
    for part, of_part in parts(table[table["first"] >= table["window"]]) if table is not None else ():
        window = int(of_part["window"].iloc[0])
        strategies = []
        distances = np.empty(0)
        for strategy, rows in of_part.groupby("strategy", sort=False):
            distances, estimates = curve(rows, "gain")
            low, high = np.transpose([estimate.interval() for estimate in estimates])
            means = [estimate.mean for estimate in estimates]
            numbers = {"mean": _numbers(means), "low": _numbers(low), "high": _numbers(high)}
            strategies.append(styles[str(strategy)] | numbers)
        about = {"name": part, "trained": None, "lengths": distances.tolist(), "tokens": True, "strategies": strategies}
        protocols.append(about | {"across": f"distance beyond the {window} tokens of the window"})
    figure = {"name": "Context gain", "lower": False, "axes": ["gain"], "open": True, "protocols": protocols}
    return [figure] if protocols else []


def _numbers(values: Any) -> list[float | None]:
    """Round values to 7 digits for the page. Missing and infinite values are None, because JSON has neither."""
    return [float(f"{value:.7g}") if math.isfinite(value) else None for value in values]

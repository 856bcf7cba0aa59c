"""Data and script of the page's interactive figure."""

import json
import math
from collections.abc import Mapping
from importlib import resources
from typing import Any

import pandas as pd

from kerple.compare.figures import COLOURS
from kerple.compare.statistics import in_tokens, lower_is_better
from kerple.compare.tables import METRIC_NAMES

DASH_LENGTHS: tuple[list[int], ...] = ([], [8, 4], [2, 3], [10, 3, 2, 3])


def curves(summary: pd.DataFrame, results: pd.DataFrame, trained: Mapping[str, int | None], baseline: str) -> str:
    """All curves as JSON, escaped for a ``script`` element.

    Args:
        summary: A row for each strategy and cell, with ratios and their intervals.
        results: A row for each run and cell.
        trained: Training length of each protocol, or None.
        baseline: The strategy to which ratios are taken.
    """
    order = list(dict.fromkeys(summary["strategy"]))
    metrics = []
    for metric, of_metric in summary.groupby("metric", sort=False):
        protocols = []
        for protocol, chosen in of_metric.groupby("protocol", sort=False):
            runs = results[(results["metric"] == metric) & (results["protocol"] == protocol)]
            curve = _protocol(chosen, runs, str(protocol), trained[str(protocol)], order)
            protocols.append(curve | {"tokens": in_tokens(str(metric), str(protocol))})
        name = METRIC_NAMES.get(str(metric), str(metric))
        metrics.append({"name": name, "lower": lower_is_better(str(metric)), "protocols": protocols})
    text = json.dumps({"baseline": baseline, "metrics": metrics}, allow_nan=False, separators=(",", ":"))
    return text.replace("<", "\\u003c")  # labels may contain anything


def library() -> tuple[str, str]:
    """Script and style of the page: those of uPlot (MIT), which draws the figure, and `page.js`, which controls it."""
    folder = resources.files("kerple.compare")
    script = folder.joinpath("uPlot/uPlot.iife.min.js").read_text() + folder.joinpath("page.js").read_text()
    return script, folder.joinpath("uPlot/uPlot.min.css").read_text()


def _protocol(
    chosen: pd.DataFrame, runs: pd.DataFrame, protocol: str, trained: int | None, order: list[str]
) -> dict[str, Any]:
    lengths = sorted(int(length) for length in chosen["length"].unique())
    strategies = []
    for i, strategy in enumerate(order):
        rows = chosen[chosen["strategy"] == strategy].set_index("length").reindex(lengths)
        if rows["mean"].isna().all():
            continue
        seeds = runs[runs["strategy"] == strategy].pivot(index="length", columns="seed", values="value")
        strategies.append(
            {
                "name": strategy,
                "colour": COLOURS[i % len(COLOURS)],
                "dash": DASH_LENGTHS[i // len(COLOURS) % len(DASH_LENGTHS)],
                "seeds": {str(seed): _numbers(values.reindex(lengths)) for seed, values in seeds.items()},
                **{name: _numbers(rows[name]) for name in ("mean", "std", "ratio", "ratio_low", "ratio_high")},
            }
        )
    return {"name": protocol, "trained": trained, "lengths": lengths, "strategies": strategies}


def _numbers(values: pd.Series) -> list[float | None]:
    """Values for strict JSON: missing and infinite ones become None."""
    return [float(f"{value:.7g}") if math.isfinite(value) else None for value in values]

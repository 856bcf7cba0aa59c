"""Tables of a comparison with a row per strategy and a column per length, as Table 3 of Chi et al. (2022)."""

import math
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
import pandas as pd

from kerple.compare.estimates import Estimate, by_block, difference
from kerple.compare.markup import DAGGER, NOTHING, Cell, Table
from kerple.compare.statistics import HIGHER_IS_BETTER, LOGARITHMIC, mean_reciprocal_rank

MOST_COLUMNS = 12
METRIC_NAMES = {
    "ppl": "Perplexity",
    "bits_per_byte": "Bits per byte",
    "exact_match": "Exact match",
    "token_accuracy": "Token accuracy",
    "mrr": "Mean reciprocal rank",
}
FAR_CONTEXT = (  # quantity of `FarContext`, the contexts whose losses are subtracted, meaning of a positive difference
    ("gain", "none", "own", "the loss is lower with distant text than without"),
    ("content", "foreign", "own", "a text's own distant text serves better than that of another document"),
    ("disturbance", "foreign", "none", "distant text of another document raises the loss"),
)
Gains = dict[tuple[str, int], Estimate]
"""Difference of losses of each (strategy, length)."""


def comparison(chosen: pd.DataFrame, trained: int | None, baseline: str) -> Table:
    """Table of mean ± standard deviation over seeds. The best mean is bold, † marks a significant difference.

    Args:
        chosen: The rows of a summary with one metric and protocol.
        trained: Training length, or None.
        baseline: The strategy with which the others are compared.
    """
    metric, protocol = chosen[["metric", "protocol"]].iloc[0]
    lengths, shown = chosen["length"].unique(), _shown(chosen["length"])
    cells: dict[str, dict[str, Cell]] = {s: {} for s in dict.fromkeys(chosen["strategy"])}
    row: Any
    for row in chosen[chosen["length"].isin(shown)].itertuples():
        mark = DAGGER if row.significant else ""
        cells[row.strategy][_times(row.length, trained)] = Cell(f"{number(row.mean, row.std)}{mark}", bool(row.best))
    columns = [_times(length, trained) for length in shown]
    paired = _paired(chosen)
    for row in paired[paired["length"] == paired["length"].max()].itertuples():
        last = f"ratio to {baseline} at {row.length}"
        cells[row.strategy][last] = Cell(_with_interval("#.4g", row.ratio, row.ratio_low, row.ratio_high))
        columns += [] if last in columns else [last]
    body = pd.DataFrame.from_dict(cells, orient="index").reindex(columns=columns).fillna(NOTHING)
    fewest, most = int(chosen["seeds"].min()), int(chosen["seeds"].max())
    seeds = f"{most} seeds" if fewest == most else f"{fewest} to {most} seeds"
    compared = "differences of mean loss" if metric in LOGARITHMIC else "differences"
    note = (
        f"Mean ± standard deviation over {seeds}; best mean of a column in bold; {DAGGER}: differs from {baseline} "
        f"(two-sided Welch test of {compared} over {_sources(chosen)}; p < 0.05 after Holm's correction over the "
        "strategies of a column, the only one)."
    )
    if most == 1:
        note = "Best of each column in bold. With one seed the ranking may not be reproducible."
    if not paired.empty:
        note += f" Last column: ratio to {baseline} (geometric mean over seeds){_interval_note(paired)}."
    if len(shown) < len(lengths):
        note += f" {len(shown)} of {len(lengths)} lengths are shown, results.csv has all."
    return Table(f"{METRIC_NAMES.get(metric, metric)}, {protocol}", body, note)


def intervals(cells: pd.DataFrame, trained: int | None, baseline: str) -> Table | None:
    """Table of the ratio to the baseline with its interval, or None without ratios. Arguments as `comparison`."""
    chosen = _paired(cells).sort_values("length", kind="stable")
    if chosen.empty:
        return None
    metric, protocol = chosen[["metric", "protocol"]].iloc[0]
    rows: dict[str, dict[str, Cell]] = {}
    row: Any
    for row in chosen[chosen["length"].isin(_shown(chosen["length"]))].itertuples():
        text = _with_interval(".3f", row.ratio, row.ratio_low, row.ratio_high)
        rows.setdefault(row.strategy, {})[_times(row.length, trained)] = Cell(text)
    order = [strategy for strategy in dict.fromkeys(cells["strategy"]) if strategy in rows]
    body = pd.DataFrame.from_dict(rows, orient="index").loc[order].fillna(NOTHING)
    note = f"Geometric mean over seeds divided by {baseline}'s, on the same text{_interval_note(chosen)}."
    return Table(f"{METRIC_NAMES.get(metric, metric)} relative to {baseline}, {protocol}", body, note)


def context_gain_table(summary: pd.DataFrame, blocks: pd.DataFrame, window: str, trained: int | None) -> Table | None:
    """Table of the context gain: loss with windowed attention minus loss with full attention, on the same targets.

    None if no strategy has both protocols.

    Args:
        summary: Summary of the strategies, which determines the order of rows.
        blocks: Sums by block of the runs.
        window: Label of the windowed protocol, such as ``windowed64``, after the name of a part if there are several.
        trained: Training length.
    """
    part, _, name = window.rpartition(" ")
    full, width = f"{part} full".strip(), name.removeprefix("windowed")
    title = f"Context gain beyond {width} tokens{part and f', {part}'}"
    means = "text farther away than the window helps"
    return _gain_table(title, f"{window} minus {full}", means, context_gains(blocks, window), summary, trained)


def far_context(summary: pd.DataFrame, blocks: pd.DataFrame, own: str, trained: int | None) -> Iterator[Table | None]:
    """Yield tables of gain, content and disturbance from `FarContext`. Other arguments as `context_gain_table`.

    Args:
        own: Label of the reading of a target's own text, such as ``far_own64``, after the name of a part.
    """
    part = own.rpartition(" ")[0]
    for name, *readings, means in FAR_CONTEXT:
        first, second = (own.replace("far_own", f"far_{reading}") for reading in readings)
        title, gains = f"Far context: {name}{part and f', {part}'}", loss_differences(blocks, first, second)
        yield _gain_table(title, f"{first} minus {second}", means, gains, summary, trained)


def _gain_table(
    title: str, names: str, means: str, gains: Gains, summary: pd.DataFrame, trained: int | None
) -> Table | None:
    """Table of differences of losses, or None without differences."""
    if not gains:
        return None
    shown = _shown(pd.Series([length for _, length in gains]))
    gains = {cell: gain for cell, gain in gains.items() if cell[1] in shown}
    rows: dict[str, dict[str, Cell]] = {}
    for (strategy, length), gain in gains.items():
        low, high = gain.interval()
        text = _with_interval("+.4f", gain.mean, low, high)
        rows.setdefault(strategy, {})[_times(length, trained)] = Cell(text, bool(low > 0))
    order = [s for s in dict.fromkeys(summary["strategy"]) if s in rows]
    body = pd.DataFrame.from_dict(rows, orient="index").loc[order].fillna(NOTHING)
    sources = "seeds and text" if next(iter(gains.values())).blocks > 1 else "seeds"
    interval = f"; 95% interval over {sources}" if max(gain.seeds for gain in gains.values()) > 1 else ""
    note = f"{names}, nats per token, on the same targets{interval}."
    return Table(title, body, f"{note} Above 0, in bold if the whole interval is: {means}.")


def context_gains(blocks: pd.DataFrame, window: str) -> Gains:
    """Context gain of each (strategy, length) with length > window and the same blocks in both protocols.

    Args:
        blocks: Sums by block of the runs.
        window: Label of the windowed protocol, as in `context_gain_table`.
    """
    part, _, name = window.rpartition(" ")
    width = int(name.removeprefix("windowed"))
    return loss_differences(blocks[blocks["length"] > width], window, f"{part} full".strip())


def loss_differences(blocks: pd.DataFrame, first: str, second: str) -> Gains:
    """Mean loss of protocol ``first`` minus that of ``second``, of each (strategy, length) with equal blocks."""
    losses = blocks[(blocks["metric"] == "ppl") & blocks["protocol"].isin([first, second])]
    gains: Gains = {}
    cell: Any
    for cell, cells in losses.groupby(["strategy", "length"], sort=False):
        sums = {protocol: by_block(of_protocol) for protocol, of_protocol in cells.groupby("protocol")}
        if (gain := difference(sums.get(first), sums.get(second), same_runs=True)) is not None:
            gains[cell] = gain
    return gains


def tasks(results: pd.DataFrame, metric: str, trained: Mapping[str, int | None]) -> Table | None:
    """Table of strategies × tasks: mean accuracy beyond the training length, and mean reciprocal rank over tasks.

    It is None for other metrics, and for a single task.
    """
    chosen = results[results["metric"] == metric]
    if metric not in HIGHER_IS_BETTER or chosen["protocol"].nunique() < 2:
        return None
    lengths = {trained[protocol] for protocol in chosen["protocol"].unique()}
    if None not in lengths:
        chosen = chosen[chosen["length"] > chosen["protocol"].map(trained)]
    # the mean of a task is over lengths that all its strategies have, because longer problems are harder
    having = chosen.groupby("protocol")["strategy"].transform("nunique")
    common = chosen.groupby(["protocol", "length"])["strategy"].transform("nunique") == having
    dropped, chosen = sorted(chosen.loc[~common, "protocol"].unique()), chosen[common]
    if chosen.empty:
        return None
    scores = chosen.groupby(["strategy", "protocol"], sort=False)["value"].mean().unstack()
    scores = scores.loc[list(dict.fromkeys(chosen["strategy"])), list(dict.fromkeys(chosen["protocol"]))]
    whole = not scores.isna().any(axis=None)  # ranks among different strategies have no mean
    columns = {c: scores[c] for c in scores}
    if whole:
        columns["mean reciprocal rank"] = mean_reciprocal_rank(scores, metric)
    best = {c: (column == column.max()) & (column > column.min()) for c, column in columns.items()}
    body = pd.DataFrame(
        {c: [Cell(f"{v:.3f}" if v == v else "–", b) for v, b in zip(columns[c], best[c], strict=True)] for c in columns}
    )
    body.index = list(scores.index)
    body = body.T if len(columns) > max(MOST_COLUMNS, len(body)) else body
    beyond = "" if None in lengths else f" at lengths beyond {lengths.pop() if len(lengths) == 1 else 'training'}"
    ranks = "ranks are over strategies, ties share one, and 1 / rank is averaged over tasks."
    note = f"Mean over seeds and lengths; {ranks if whole else 'no ranks: not all strategies have all tasks.'}"
    if dropped:
        note += f" Of {', '.join(dropped)} only the lengths that all strategies have; the tables below have all."
    return Table(f"{METRIC_NAMES.get(metric, metric)}{beyond}, by task", body, note)


def costs(measured: pd.DataFrame) -> Table | None:
    """Table of parameters, training speed and peak memory of each strategy; None if no run measured them."""
    if measured.empty:
        return None
    rows: dict[str, dict[str, Cell]] = {}
    shared = "parallel" in measured and measured["parallel"].max() > 1
    measured = measured.assign(part=measured.get("part", ""))
    parts, groups = list(dict.fromkeys(measured["part"])), measured.groupby(["part", "strategy"], sort=False)
    for (part, strategy), group in sorted(groups, key=lambda group: parts.index(group[0][0])):
        speed = pd.to_numeric(group["tokens_per_second"]).mean()  # NaN for runs of a few steps
        row = {
            "position parameters": _span(group["position_parameters"]),
            "all parameters": _span(group["parameters"]),
            **({} if shared else {"tokens per second": "–" if math.isnan(speed) else f"{speed:,.0f}"}),
            "peak memory (MiB)": f"{group['peak_memory_bytes'].mean() / 2**20:,.0f}",
        }
        rows[f"{part} {strategy}".strip()] = {name: Cell(text) for name, text in row.items()}
    speeds = "Runs that trained side by side shared the machine: compare speeds by the benchmarks instead."
    note = f"Mean over seeds. {'' if shared else speeds}".strip()
    return Table("Cost of training", pd.DataFrame.from_dict(rows, orient="index"), note)


def number(mean: float, std: float) -> str:
    """A mean with its standard deviation as text of three or four significant digits."""
    if not math.isfinite(mean):
        return "∞" if mean > 0 else "–"
    digits = 3 if abs(mean) < 10 else 2 if abs(mean) < 100 else 1 if abs(mean) < 1000 else 0
    spread = f" ± {std:.{digits}f}" if math.isfinite(std) else ""
    return f"{mean:.{digits}f}{spread}"


def _paired(cells: pd.DataFrame) -> pd.DataFrame:
    """The rows of other strategies that have a ratio to the baseline."""
    return cells[cells["fewest_seeds"].notna() & np.isfinite(cells["ratio"])]


def _with_interval(digits: str, value: float, low: float, high: float) -> str:
    """A value with its 95% interval, or with "(one seed)"."""
    interval = f" [{low:{digits}}, {high:{digits}}]" if low <= high else " (one seed)" * math.isfinite(value)
    return f"{value:{digits}}{interval}"


def _interval_note(ratios: pd.DataFrame) -> str:
    """Name the sources of variation that the intervals of these ratios cover; empty without intervals."""
    return f"; 95% interval over {_sources(ratios)}" if ratios["fewest_seeds"].max() > 1 else ""


def _sources(chosen: pd.DataFrame) -> str:
    """Sampling units of the tests of these cells."""
    if chosen["blocks"].max() <= 1:
        return "seeds"
    return "seeds and problems" if chosen["metric"].iloc[0] in HIGHER_IS_BETTER else "seeds and text"


def _span(counts: pd.Series) -> str:
    return "–".join(dict.fromkeys(f"{count:,}" for count in (counts.min(), counts.max())))


def _shown(lengths: pd.Series) -> list[int]:
    """The distinct lengths in order; of more than `MOST_COLUMNS`, that number with even spacing."""
    distinct = sorted(lengths.unique())
    spread = np.linspace(0, len(distinct) - 1, min(len(distinct), MOST_COLUMNS)).round().astype(int)
    return [distinct[i] for i in spread]


def _times(length: int, trained: int | None) -> str:
    if not trained or length % trained or length < trained:
        return f"{length}"
    return f"{length} ({length // trained}×)"

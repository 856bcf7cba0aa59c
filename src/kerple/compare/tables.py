"""Tables of a comparison. Most have a row per strategy and a column per length, as Table 3 of Chi et al. (2022)."""

import math
import re
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
import pandas as pd

from kerple.compare.estimates import Estimate, by_block, difference
from kerple.compare.finished_runs import COSTS, by_part
from kerple.compare.statistics import LOGARITHMIC, METRIC_NAMES, lower_is_better
from kerple.compare.table_markup import DAGGER, NOTHING, Cell, Table

MOST_COLUMNS = 12
# Quantities of the analysis `FarContext`, each the loss in one context minus the loss in another: name, context of the
# first loss, context of the subtracted loss, and meaning of a positive difference.
FAR_CONTEXT = (
    ("gain", "none", "own", "the loss is lower with distant text than without"),
    ("content", "foreign", "own", "the loss is lower with distant text of the same document than with that of another"),
    ("disturbance", "foreign", "none", "distant text of another document raises the loss"),
)
Gains = dict[tuple[str, int], Estimate]
"""Differences of mean losses by (strategy, length)."""


def metric_table(chosen: pd.DataFrame, trained: int | None, baseline: str) -> Table:
    """Table of mean ± standard deviation over seeds. The best mean is bold, † marks a significant difference.

    Args:
        chosen: The rows of `kerple.compare.statistics.summarise` with one metric and protocol.
        trained: Training length, or None if it is not known.
        baseline: The strategy with which the others are compared.
    """
    metric, protocol = chosen[["metric", "protocol"]].iloc[0]
    body = _body(chosen.set_index(["strategy", "length"]).apply(_mean_cell, axis=1), chosen["strategy"], trained)
    compared = "differences of mean loss" if metric in LOGARITHMIC else "differences"
    note = (
        f"Mean ± standard deviation over {count_seeds(chosen)}; best mean of a column in bold; {DAGGER}: differs from "
        f"{baseline} (two-sided Welch test of {compared} over {_sources(chosen)}; p < 0.05 after Holm's correction "
        "over the strategies of a column; no other correction)."
    )
    if chosen["seeds"].max() == 1:
        note = "Best of each column in bold. With one seed the ranking may not be reproducible."
    shown, lengths = body.shape[1], chosen["length"].nunique()
    if not (ratios := _with_ratio(chosen)).empty:
        longest = ratios["length"].max()
        last = ratios[ratios["length"] == longest].set_index("strategy")
        body[f"ratio to {baseline} at {longest}"] = last.apply(_ratio_cell, axis=1, digits="#.4g")
        body = body.fillna(NOTHING)
        note += f" Last column: ratio to {baseline} (geometric mean over seeds){_interval_note(ratios)}."
    if shown < lengths:
        note += f" {shown} of {lengths} lengths are shown, results.csv has all."
    return Table(f"{METRIC_NAMES[metric]}, {protocol}", body, note)


def count_seeds(cells: pd.DataFrame) -> str:
    """Return the numbers of seeds of some rows of a summary, such as "3 to 8 seeds"."""
    fewest, most = int(cells["seeds"].min()), int(cells["seeds"].max())
    return f"{most} seeds" if fewest == most else f"{fewest} to {most} seeds"


def ratio_table(chosen: pd.DataFrame, trained: int | None, baseline: str) -> Table | None:
    """Table of the ratio to the baseline with its interval; None without ratios. Arguments as in `metric_table`."""
    ratios = _with_ratio(chosen)
    if ratios.empty:
        return None
    metric, protocol = ratios[["metric", "protocol"]].iloc[0]
    cells = ratios.set_index(["strategy", "length"]).apply(_ratio_cell, axis=1, digits=".3f")
    body = _body(cells, chosen["strategy"], trained)
    note = f"Geometric mean over seeds divided by {baseline}'s, on the same text{_interval_note(ratios)}."
    return Table(f"{METRIC_NAMES[metric]} relative to {baseline}, {protocol}", body, note)


def difference_tables(
    blocks: pd.DataFrame, strategies: pd.Series, protocol: str, trained: int | None
) -> Iterator[Table]:
    """Yield the tables of loss differences of a protocol: the loss in one context minus the loss in another context.

    A ``windowed`` protocol has one table: its loss, with attention limited to a window, minus the loss of ``full``. A
    ``far_own`` protocol, which reads distant text of the same document, has a table for each quantity in `FAR_CONTEXT`.
    Other protocols have none. Both losses are of the same targets. A table is left out if no strategy has both losses.

    Args:
        blocks: Sums of losses by block, see `kerple.compare.finished_runs.Runs`.
        strategies: Labels of the strategies, in the order of the rows.
        protocol: Name of the protocol, such as ``windowed64``. If the comparison has several parts (corpora or tasks),
            the name begins with the part, as in ``code windowed64``.
        trained: Training length, or None if it is not known.
    """
    part, _, name = protocol.rpartition(" ")
    contrasts = []  # title, protocol of the first loss and of the subtracted loss, meaning of a positive difference
    if name.startswith("windowed"):
        title = f"Context gain beyond {name.removeprefix('windowed')} tokens"
        contrasts = [(title, protocol, f"{part} full".strip(), "text farther away than the window helps")]
    elif name.startswith("far_own"):
        for quantity, *contexts, meaning in FAR_CONTEXT:
            first, second = (protocol.replace("far_own", f"far_{context}") for context in contexts)
            contrasts.append((f"Far context: {quantity}", first, second, meaning))
    for title, first, second, meaning in contrasts:
        if gains := loss_differences(blocks, first, second):
            cells = {cell: gain_cell(gain) for cell, gain in gains.items()}
            sources = "seeds and text" if next(iter(gains.values())).blocks > 1 else "seeds"
            interval = f"; 95% interval over {sources}" if max(gain.seeds for gain in gains.values()) > 1 else ""
            note = f"{first} minus {second}, nats per token, on the same targets{interval}. "
            note += f"A positive difference means that {meaning}. It is bold if the whole interval is positive."
            yield Table(f"{title}{part and f', {part}'}", _body(pd.Series(cells), strategies, trained), note)


def loss_differences(blocks: pd.DataFrame, first: str, second: str) -> Gains:
    """Return the mean loss of one protocol minus that of another, for each strategy and length.

    A difference is left out if a protocol lacks a seed or a block, or if the two protocols have different text.
    Lengths within the window of a windowed protocol are also left out, because their differences are 0.

    Args:
        blocks: Sums of losses by block, see `kerple.compare.finished_runs.Runs`.
        first: Name of the first protocol, such as ``windowed64`` or ``code windowed64``, see `difference_tables`.
        second: Name of the protocol that is subtracted, such as ``full``.
    """
    losses = blocks[(blocks["metric"] == "ppl") & blocks["protocol"].isin([first, second])]
    if window := re.search(r"\bwindowed(\d+)$", first):
        losses = losses[losses["length"] > int(window[1])]
    gains: Gains = {}
    cell: Any
    for cell, cells in losses.groupby(["strategy", "length"], sort=False):
        seeds = sorted(set(cells["seed"]))
        sums = {protocol: by_block(of_protocol, seeds) for protocol, of_protocol in cells.groupby("protocol")}
        if (gain := difference(sums.get(first), sums.get(second), same_runs=True)) is not None:
            gains[cell] = gain
    return gains


def task_table(results: pd.DataFrame, metric: str, trained: Mapping[str, int | None]) -> Table | None:
    """Table of the mean accuracy beyond the training length by strategy and task, and of the mean reciprocal rank.

    None if the metric is not an accuracy, if there is only one task, or if no task has a length with results of all its
    strategies. If the training length of any task is not known, the means of all tasks are over all lengths.

    Args:
        results: Results of the runs, see `kerple.compare.finished_runs.Runs`.
        metric: Name of the metric.
        trained: Training length of each task; None if it is not known.
    """
    # decoded answers are the same task again
    chosen = results[(results["metric"] == metric) & ~results["protocol"].str.endswith(" generated")]
    if lower_is_better(metric) or chosen["protocol"].nunique() < 2:
        return None
    lengths = {trained[protocol] for protocol in chosen["protocol"].unique()}
    if None not in lengths:
        chosen = chosen[chosen["length"] > chosen["protocol"].map(trained)]
    # longer problems are harder, so the mean of a task is only over lengths that all strategies with the task have
    of_task = chosen.groupby("protocol")["strategy"].transform("nunique")
    common = chosen.groupby(["protocol", "length"])["strategy"].transform("nunique") == of_task
    shortened = sorted(chosen.loc[~common, "protocol"].unique())
    chosen = chosen[common]
    if chosen.empty:
        return None
    scores = chosen.groupby(["strategy", "protocol"], sort=False)["value"].mean().unstack()
    scores = scores.loc[list(dict.fromkeys(chosen["strategy"])), list(dict.fromkeys(chosen["protocol"]))]
    complete = not scores.isna().any(axis=None)
    if complete:  # if a task lacks results of a strategy, its ranks would be among fewer strategies
        # Kazemnejad et al. 2023, section 4
        scores["mean reciprocal rank"] = (1 / scores.rank(ascending=False)).mean(axis=1)
    best = (scores == scores.max()) & (scores > scores.min())
    texts = scores.map(lambda value: "–" if math.isnan(value) else f"{value:.3f}")
    body = pd.DataFrame({task: list(map(Cell, texts[task], best[task])) for task in scores}, list(scores.index))
    body = body.T if body.shape[1] > max(MOST_COLUMNS, len(body)) else body
    beyond = "" if None in lengths else f" at lengths beyond {lengths.pop() if len(lengths) == 1 else 'training'}"
    ranked = "ranks are over strategies, ties share their mean rank, and 1 / rank is averaged over tasks."
    note = f"Mean over seeds and lengths; {ranked if complete else 'no ranks: not all strategies have all tasks.'}"
    if shortened:
        note += f" Of {', '.join(shortened)}, only lengths that all strategies have are counted; tables below show all."
    return Table(f"{METRIC_NAMES[metric]}{beyond}, by task", body, note)


def cost_table(measured: pd.DataFrame) -> Table | None:
    """Table of parameters, speed and peak memory by part (corpus or task) and strategy; None without measurements.

    The speed is left out if several runs were trained at the same time.

    Args:
        measured: Cost of training of the runs, see `kerple.compare.finished_runs.Runs`.
    """
    if measured.empty:
        return None
    rows = {}
    shared = "parallel" in measured and measured["parallel"].max() > 1
    measured = measured.assign(**{name: math.nan for name in COSTS if name not in measured})  # of an incomplete file
    for part, of_part in by_part(measured):
        for strategy, group in of_part.groupby("strategy", sort=False):
            speed = pd.to_numeric(group["tokens_per_second"]).mean()  # NaN for runs of a few steps
            rows[f"{part} {strategy}".strip()] = {
                "position parameters": format_range(group["position_parameters"]),
                "all parameters": format_range(group["parameters"]),
                **({} if shared else {"tokens per second": format_count(speed)}),
                "peak memory (MiB)": format_count(group["peak_memory_bytes"].mean() / 2**20),
            }
    speeds = "Runs that trained side by side shared the machine: compare speeds by the benchmarks instead."
    note = f"Mean over seeds. {'' if shared else speeds}".strip()
    return Table("Cost of training", pd.DataFrame.from_dict(rows, orient="index").map(Cell), note)


def format_mean(mean: float, std: float = math.nan) -> str:
    """Format a mean and its standard deviation with 3 decimals for a mean below 10, 2 below 100, 1 below 1000, else 0.

    A standard deviation of NaN is left out. An infinite mean is shown as ∞, and a mean of NaN as –.
    """
    if not math.isfinite(mean):
        return "∞" if mean > 0 else "–"
    digits = 3 if abs(mean) < 10 else 2 if abs(mean) < 100 else 1 if abs(mean) < 1000 else 0
    return f"{mean:.{digits}f}" + (f" ± {std:.{digits}f}" if math.isfinite(std) else "")


def format_count(count: float) -> str:
    """Format a count without decimals; NaN is shown as –."""
    return "–" if math.isnan(count) else f"{count:,.0f}"


def format_range(counts: pd.Series) -> str:
    """Format the smallest and the largest count, or one number if they are equal."""
    return "–".join(dict.fromkeys(map(format_count, (counts.min(), counts.max()))))


def _body(cells: pd.Series, strategies: pd.Series, trained: int | None) -> pd.DataFrame:
    """Arrange cells in a row per strategy and a column per length, with its ratio to the training length if an integer.

    If there are more than `MOST_COLUMNS` lengths, `MOST_COLUMNS` of them are shown, evenly spaced. Strategies without a
    cell are left out.

    Args:
        cells: `Cell` by strategy and length.
        strategies: Labels of the strategies, in the order of the rows.
        trained: Training length, or None if it is not known.
    """
    body = cells.unstack()  # lengths are sorted
    shown = np.linspace(0, body.shape[1] - 1, min(body.shape[1], MOST_COLUMNS)).round().astype(int)
    body = body.loc[[strategy for strategy in dict.fromkeys(strategies) if strategy in body.index]].iloc[:, shown]
    headings = [f"{n} ({n // trained}×)" if trained and n % trained == 0 else f"{n}" for n in map(int, body.columns)]
    return body.fillna(NOTHING).set_axis(headings, axis=1).rename_axis(None)


# the type Any, because pandas-stubs allows only numbers and texts in a column
def _mean_cell(row: Any) -> Any:
    """The `Cell` of the mean ± standard deviation in a row of a summary."""
    return Cell(f"{format_mean(row['mean'], row['std'])}{DAGGER if row['significant'] else ''}", bool(row["best"]))


def _ratio_cell(row: Any, digits: str) -> Any:
    """The `Cell` of the ratio and its interval in a row of a summary. ``digits`` is the format of the numbers."""
    return Cell(format_estimate(digits, row["ratio"], row["ratio_low"], row["ratio_high"]))


def _with_ratio(cells: pd.DataFrame) -> pd.DataFrame:
    """The rows of strategies that have a finite ratio to the baseline, without those of the baseline."""
    return cells[cells["fewest_seeds"].notna() & np.isfinite(cells["ratio"])]


def format_estimate(digits: str, value: float, low: float, high: float) -> str:
    """Format a value and its interval. With one seed, the words "one seed" replace the interval.

    Args:
        digits: Format of the numbers, such as ``.3f``.
        value: The value.
        low: Lower end of the interval, or NaN.
        high: Upper end of the interval, or NaN.
    """
    interval = f" [{low:{digits}}, {high:{digits}}]" if low <= high else " (one seed)" * math.isfinite(value)
    return f"{value:{digits}}{interval}"


def gain_cell(gain: Estimate) -> Cell:
    """Return the cell of a gain, bold if its whole interval is positive."""
    low, high = gain.interval()
    return Cell(format_estimate("+.4f", gain.mean, low, high), bool(low > 0))


def _interval_note(ratios: pd.DataFrame) -> str:
    """Name the sources of variation that the intervals of these ratios cover; empty if all have one seed."""
    return f"; 95% interval over {_sources(ratios)}" if ratios["fewest_seeds"].max() > 1 else ""


def _sources(chosen: pd.DataFrame) -> str:
    """Name the sampling units of the tests in these rows of a summary."""
    if chosen["blocks"].max() <= 1:
        return "seeds"
    return "seeds and text" if lower_is_better(chosen["metric"].iloc[0]) else "seeds and problems"

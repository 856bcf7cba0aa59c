"""Sentences at the top of the page: the main results of a comparison and their significance."""

from bisect import bisect_left
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import pandas as pd

from kerple.compare.estimates import Estimate, by_block, difference, estimate, over_seeds, satterthwaite
from kerple.compare.finished_runs import Runs
from kerple.compare.statistics import CELL, LOGARITHMIC, METRIC_NAMES, lower_is_better
from kerple.compare.tables import count_seeds, format_mean, loss_differences

MOST_SEEDS = 100  # largest number of seeds that is computed for an effect


def findings(summary: pd.DataFrame, runs: Runs, baseline: str) -> Iterator[str]:
    """Yield the texts at the top of a page: the best strategy at the longest length, and the context gain there.

    Only the first metric is described, and in each part of the comparison (a task or a corpus) only the first protocol
    and the context gain.

    Args:
        summary: Result of `kerple.compare.statistics.summarise`.
        runs: The summarised runs.
        baseline: The strategy with which the others are compared.
    """
    metric = str(summary["metric"].iloc[0])
    of_metric = summary[summary["metric"] == metric]
    several = of_metric["protocol"].nunique() > 1
    described = set()
    for name, rows in of_metric.groupby("protocol", sort=False):
        protocol = str(name)
        # the protocol of an accuracy is the name of a task
        part = protocol.rpartition(" ")[0] if lower_is_better(metric) else protocol
        prefix = f"{part}: " if part and several else ""
        if part not in described:
            yield prefix + " ".join(_at_longest(rows, baseline, runs.training_lengths[protocol]))
        if protocol.split()[-1].startswith("windowed"):
            yield from (prefix + sentence for sentence in _context_gain(runs.blocks, protocol))
        described.add(part)


def _at_longest(cells: pd.DataFrame, baseline: str, trained: int | None) -> Iterator[str]:
    """Yield sentences on the best strategy at the longest length, and on significant differences from the baseline.

    Args:
        cells: The rows of a summary with one metric and protocol.
        baseline: The strategy with which the others are compared.
        trained: Training length, or None if it is not known.
    """
    rows = cells[cells["length"] == cells["length"].max()].set_index("strategy")
    length, metric = int(rows["length"].iloc[0]), str(rows["metric"].iloc[0])
    lower = lower_is_better(metric)
    name = METRIC_NAMES[metric].lower()
    where = f"At length {length:,}" + (f", {length / trained:.3g} times that of training," if trained else "")
    if not rows["best"].any():
        yield f"{where} {f'only {rows.index[0]} has' if len(rows) == 1 else 'all strategies have the same'} {name}."
        return
    mean: pd.Series = rows["mean"]
    best: Any = mean.idxmin() if lower else mean.idxmax()
    row: Any = rows.loc[best]
    sentence = f"{where} {best} has the {'lowest' if lower else 'highest'} {name}, {format_mean(row['mean'])}"
    if row["difference_low"] <= row["difference_high"]:  # both are NaN for the baseline, and with one seed
        effect, digits, word = ("ratio", ".3f", "to") if metric in LOGARITHMIC else ("difference", "+.3f", "from")
        middle, low, high = (f"{row[effect + end]:{digits}}" for end in ("", "_low", "_high"))
        sentence += f" ({effect} {word} {baseline}: {middle}, 95% interval {low} to {high})"
    yield f"{sentence}."
    others = rows[rows["fewest_seeds"] > 0]
    if others["p_holm"].isna().all():
        one_seed = rows["seeds"].max() == 1
        fewer = f"{baseline}, or each other strategy, has fewer than two seeds at this length"
        untested = "each difference is 0 or not finite" if others["fewest_seeds"].max() > 1 else fewer
        reason = "there is only one seed" if one_seed else untested
        yield f"No difference was tested for significance, because {reason}; the ranking may not be reproducible."
        return
    tested = others["p_holm"].notna()
    significant, better = others["significant"].astype(bool), (others["difference"] < 0) == lower
    text = (
        f"Against {baseline}, over {count_seeds(rows)}, {_are(others.index[significant & better])} better "
        f"and {_are(others.index[significant & ~better])} worse (p < 0.05 after Holm's correction); "
        f"strategies without a significant difference: {', '.join(others.index[tested & ~significant]) or 'none'}"
    )
    if not tested.all():
        reason = "fewer than two seeds at this length, or a difference that is 0 or not finite"
        text += f"; strategies that were not tested ({reason}): {', '.join(others.index[~tested])}"
    yield f"{text}."


def _context_gain(blocks: pd.DataFrame, window: str) -> Iterator[str]:
    """Yield a sentence on the context gain at the longest length. It names only strategies with several seeds.

    Args:
        blocks: Sums by block of the runs.
        window: Name of the windowed protocol, such as ``windowed64``, or ``code windowed64`` for the part ``code``.
    """
    part, _, name = window.rpartition(" ")
    gains = loss_differences(blocks, window, f"{part} full".strip())
    longest = max((length for _, length in gains), default=0)
    effects: dict[str, list[str]] = {"lowers": [], "raises": [], "has no significant effect on": []}
    for (strategy, length), gain in gains.items():
        low, high = gain.interval()
        if length == longest and low <= high:
            effect = "lowers" if low > 0 else "raises" if high < 0 else "has no significant effect on"
            effects[effect].append(strategy)
    if any(effects.values()):
        text = "; it ".join(f"{effect} the loss of {', '.join(names)}" for effect, names in effects.items() if names)
        width = name.removeprefix("windowed")
        yield f"At length {longest:,}, text farther away than {width} tokens {text} (95% intervals)."


def power_of_the_tests(summary: pd.DataFrame, runs: Runs, baseline: str) -> Iterator[str]:
    """Yield a text on the differences that the tests detect and the seeds that the observed differences need.

    A second text is on the correlation of losses over seeds. Both are about the first metric and protocol at the
    longest length. They leave out strategies with one seed. The arguments are those of `findings`.
    """
    metric, protocol = summary[["metric", "protocol"]].iloc[0]
    length = summary["length"][(summary["metric"] == metric) & (summary["protocol"] == protocol)].max()
    cell = [metric, protocol, length]
    results, blocks = (table[(table[CELL] == cell).all(axis=1)] for table in (runs.results, runs.blocks))
    values = results.pivot(index="seed", columns="strategy", values="value")
    values = values.apply(np.log) if metric in LOGARITHMIC else values
    sums = {str(strategy): by_block(rows) for strategy, rows in blocks.groupby("strategy")}
    detectable: list[float] = []
    needed: defaultdict[int, list[str]] = defaultdict(list)  # strategies by number of seeds
    for strategy in (name for name in map(str, values) if name != baseline and baseline in values):
        pair = [over_seeds(values[name].dropna()) for name in (strategy, baseline)]
        found = difference(sums.get(strategy), sums.get(baseline)) or difference(pair[0], pair[1])
        if found is not None and found.error > 0:
            # the variance over seeds and its freedom as if both strategies had the smaller number of seeds
            variances = [alone.seed_variance * alone.seeds / found.seeds for alone in map(estimate, pair)]
            freedom = satterthwaite(variances, [found.seeds - 1] * len(variances))
            equal = replace(found, seed_variance=sum(variances), seed_freedom=freedom)
            needed[_seeds_needed(equal)].append(strategy)
            detectable.append(found.detectable())
    if needed:
        unit = "nats per token" if metric == "ppl" else METRIC_NAMES[metric].lower()
        ends = " to ".join(dict.fromkeys(f"{end:.2g}" for end in (min(detectable), max(detectable))))
        more = f"more than {MOST_SEEDS}"
        seeds = (f"{n if n <= MOST_SEEDS else more} ({', '.join(needed[n])})" for n in sorted(needed))
        yield (
            f"At length {length:,}, the smallest difference from {baseline} that a test detects with a probability of "
            f"80% is {ends} {unit} (two-sided test at 5% without Holm's correction). For a difference of the observed "
            f"size on this text, a test needs so many seeds of each strategy: {'; '.join(seeds)}."
        )
    pairs = values.corr(min_periods=3).to_numpy()[np.triu_indices(values.shape[1], 1)]
    if len(pairs := pairs[np.isfinite(pairs)]):
        yield (
            f"The losses of two strategies at equal seeds have a mean correlation of {pairs.mean():.2f}, over "
            f"{len(pairs)} pairs of strategies with at least 3 common seeds. The tests treat seeds as independent."
        )


def _seeds_needed(found: Estimate) -> int:
    """The number of seeds of each strategy with which a test detects this difference; `MOST_SEEDS` + 1 for more."""
    numbers = range(2, MOST_SEEDS + 1)
    return 2 + bisect_left(numbers, True, key=lambda n: found.expected(n).detectable() <= abs(found.mean))


def _are(names: Any) -> str:
    """Labels, or "none", with "is" or "are"."""
    return f"{', '.join(names) or 'none'} {'are' if len(names) > 1 else 'is'}"

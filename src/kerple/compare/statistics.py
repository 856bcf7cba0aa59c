"""Statistics of a comparison whose runs have the same targets, data and budget, and differ in strategy and seed.

A *result* is a row (strategy, seed, metric, protocol, length, value); a *cell* is a (metric, protocol, length).
Strategies are compared with the baseline within a cell, over all seeds of both and on the same text. Runs are not
paired by seed: the losses of two strategies with one seed have a correlation of only 0.06 to 0.16, and pairing would
exclude seeds that only one strategy has.
"""

import math

import numpy as np
import pandas as pd
from numpy.typing import ArrayLike, NDArray

from kerple.base.errors import UserError
from kerple.compare.estimates import Sums, by_block, difference, logarithm

CELL = ["metric", "protocol", "length"]
LOWER_IS_BETTER = ("ppl", "bits_per_byte", "loss")
LOGARITHMIC = ("ppl", "bits_per_byte")  # compared by ratios, that is, by differences of logarithms
HIGHER_IS_BETTER = ("exact_match", "token_accuracy", "accuracy")


def in_tokens(metric: str, protocol: str) -> bool:
    """Whether the length of a cell is a number of tokens, as for perplexity and needles, or the length of a problem."""
    return lower_is_better(metric) or "niah" in protocol


def lower_is_better(metric: str) -> bool:
    """Whether a smaller value of this metric is better.

    Raises:
        UserError: If the metric is not known.
    """
    if metric not in LOWER_IS_BETTER + HIGHER_IS_BETTER:
        known = ", ".join(LOWER_IS_BETTER + HIGHER_IS_BETTER)
        raise UserError(f"metric: got {metric!r}, expected one of {known}; add it to kerple.compare.statistics")
    return metric in LOWER_IS_BETTER


def holm(p: ArrayLike) -> NDArray[np.float64]:
    """Holm's (1979) step-down adjustment of p-values, which controls the family-wise error under any dependence.

    The i-th smallest of n p-values is multiplied by n - i + 1. The results are made monotone and at most 1. NaN stays
    NaN and is not one of the n.
    """
    p = np.asarray(p, dtype=np.float64)
    adjusted = np.full_like(p, np.nan)
    tested = np.flatnonzero(~np.isnan(p))
    order = tested[np.argsort(p[tested], kind="stable")]
    steps = p[order] * np.arange(len(order), 0, -1)
    adjusted[order] = np.minimum(np.maximum.accumulate(steps), 1.0)
    return adjusted


def against_baseline(results: pd.DataFrame, baseline: str, blocks: pd.DataFrame | None = None) -> pd.DataFrame:
    """Test each strategy against the baseline in each cell: Welch's test, two-sided, over all seeds of each.

    Perplexities and bits per byte are compared by their logarithms, that is, by the mean loss in nats. Accuracies are
    not transformed. Holm's correction is applied over the strategies of a cell. There is no other correction.

    Args:
        results: Columns strategy, seed, metric, protocol, length, value; a row for each combination.
        baseline: The strategy with which the others are compared.
        blocks: Sums by block of the same cells: strategy, seed, metric, protocol, length, block, sum, count. With them,
            and if both were tested on the same text, the test is over seeds and text, otherwise over seeds.

    Returns:
        One row for each cell and each strategy except the baseline, with the columns

        - ``fewest_seeds``: smaller number of seeds of the two,
        - ``blocks``: number of blocks of text, 1 without sums by block,
        - ``difference``: mean over seeds minus that of the baseline, of logarithms for logarithmic metrics,
        - ``difference_low`` and ``difference_high``: its 95% interval over seeds and text,
        - ``t``, ``p`` and ``p_holm``.

        With one seed of either, interval and test are NaN. If all values are equal, the test is NaN.

    Raises:
        UserError: If the baseline has no results.
    """
    strategies = list(dict.fromkeys(results["strategy"]))
    if baseline not in strategies:
        raise UserError(f"compare: baseline: got {baseline!r}, expected one of {', '.join(strategies)}")
    of_cell = {} if blocks is None else dict(iter(blocks.groupby(["strategy", *CELL])))
    rows = []
    for cell, group in results.groupby(CELL, sort=False):
        values = {strategy: of.set_index("seed")["value"] for strategy, of in group.groupby("strategy")}
        if baseline not in values:
            continue
        # bits per byte and perplexity have the same losses, and sums by block are stored for perplexity
        losses = ("ppl", *cell[1:]) if cell[0] == "bits_per_byte" else cell
        for strategy in (s for s in strategies if s != baseline and s in values):
            sides = [(of_cell.get((side, *losses)), values[side].index) for side in (strategy, baseline)]
            ours, theirs = (None if of is None else by_block(of, seeds) for of, seeds in sides)
            if cell[0] == "bits_per_byte" and ours and theirs:
                ours, theirs = logarithm(*ours), logarithm(*theirs)
            effect = difference(ours, theirs)
            if effect is None:
                metric = str(cell[0])
                effect = difference(_over_seeds(values[strategy], metric), _over_seeds(values[baseline], metric))
                assert effect is not None, "one block with count 1 is the same text for both"
            tested = effect.error >= 0 and (effect.mean or effect.error)
            t = effect.mean / effect.error if tested and effect.error else math.copysign(math.inf, effect.mean)
            row = (effect.seeds, effect.blocks, effect.mean, *effect.interval())
            rows.append((strategy, *cell, *row, *((t, effect.p()) if tested else (math.nan, math.nan))))
    names = ["fewest_seeds", "blocks", "difference", "difference_low", "difference_high", "t", "p"]
    tests = pd.DataFrame(rows, columns=["strategy", *CELL, *names])
    tests["p_holm"] = tests.groupby(CELL)["p"].transform(holm) if len(tests) else tests["p"]
    return tests


def _over_seeds(values: pd.Series, metric: str) -> Sums:
    with np.errstate(divide="ignore"):
        numbers = np.log(values) if metric in LOGARITHMIC else values
    return numbers.to_numpy(dtype=np.float64)[:, None], np.ones((len(values), 1))


def summarise(results: pd.DataFrame, baseline: str, blocks: pd.DataFrame | None = None) -> pd.DataFrame:
    """Mean and standard deviation over seeds for every strategy and cell, with marks for tables.

    Args:
        results: See `against_baseline`.
        baseline: The strategy with which the others are compared.
        blocks: See `against_baseline`.

    Returns:
        One row for each strategy and cell, in the order of the results, with the columns of `against_baseline` and

        - ``seeds``, ``mean`` and ``std`` (n - 1 in the denominator; NaN for one seed),
        - ``best``: whether the mean is the best of its cell, ties included, unless all tie,
        - ``significant``: p_holm < 0.05,
        - ``ratio``, ``ratio_low`` and ``ratio_high``: ratio of geometric means over seeds to the baseline, with
            its interval; NaN if the metric is not logarithmic.

    Raises:
        UserError: If a metric is unknown, or the baseline is missing.
    """
    tests = against_baseline(results, baseline, blocks)
    keys = ["strategy", *CELL]
    values = results.groupby(keys, sort=False)["value"]
    summary = values.agg(seeds="count", mean="mean", std="std").reset_index()
    sign = np.where(summary["metric"].map(lower_is_better), 1.0, -1.0)
    cost = summary["mean"] * sign
    cells = cost.groupby([summary[c] for c in CELL])
    summary["best"] = (cost == cells.transform("min")) & (cost < cells.transform("max"))
    summary = summary.merge(tests, on=keys, how="left")
    summary["significant"] = summary["p_holm"] < 0.05
    compared = summary["metric"].isin(LOGARITHMIC)
    for end in ("", "_low", "_high"):
        summary[f"ratio{end}"] = np.exp(summary[f"difference{end}"].astype(float).where(compared))
    summary.loc[compared & (summary["strategy"] == baseline), "ratio"] = 1.0
    return summary


def mean_reciprocal_rank(scores: pd.DataFrame, metric: str) -> pd.Series:
    """Mean over tasks of 1 / rank (Kazemnejad et al. 2023, section 4). Ties share their mean rank.

    Args:
        scores: Scores (strategies, tasks), such as the mean exact match beyond the training length; none is missing.
        metric: Name of the metric, which determines whether larger is better.

    Returns:
        A number in (0, 1] for each strategy; 1 if it is the best at every task.
    """
    return (1 / scores.rank(axis=0, ascending=lower_is_better(metric), method="average")).mean(axis=1)

"""Statistics of a comparison whose runs have the same targets, data and budget, and differ in strategy and seed.

A *result* is a row (strategy, seed, metric, protocol, length, value); a *cell* is a (metric, protocol, length).
Strategies are compared within a cell and in pairs, over all seeds of each and on the same text. Runs of one seed have
the same order of data, but their losses hardly go together (a correlation of 0.06 to 0.16 between strategies), so that
pairing by seed would gain nothing and lose the seeds that only one has.
"""

import math

import numpy as np
import pandas as pd
from numpy.typing import ArrayLike, NDArray

from kerple.base.errors import UserError
from kerple.compare.estimates import Sums, by_block, difference, logarithm

CELL = ["metric", "protocol", "length"]
LOWER_IS_BETTER = ("ppl", "bits_per_byte", "loss")
LOGARITHMIC = ("ppl", "bits_per_byte")  # metrics that are compared by ratios, that is by differences of logarithms
HIGHER_IS_BETTER = ("exact_match", "token_accuracy", "accuracy")


def in_tokens(metric: str, protocol: str) -> bool:
    """Whether the lengths of a cell are numbers of tokens, as with perplexities and needles, not those of problems."""
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
    """Holm's step-down adjustment of p-values (Holm 1979), which controls the family-wise error without independence.

    The i-th smallest of n p-values is multiplied by n - i + 1; the results are made monotone and at most 1. NaN stays
    NaN and does not count as a test.
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

    Perplexities and bits per byte are compared by their logarithm, that is by the mean loss in nats; accuracies as they
    are. Holm's correction is applied over the strategies of a cell: the family of tests asks who differs from the
    baseline at this length. There is no other correction.

    Args:
        results: Columns strategy, seed, metric, protocol, length, value; a row for each combination.
        baseline: The strategy with which the others are compared.
        blocks: Sums by block of the same cells: strategy, seed, metric, protocol, length, block, sum, count. If they
            are known, and both were tested on the same text, the test is over seeds and text, else over seeds alone.

    Returns:
        One row for each strategy but the baseline and each cell: ``fewest_seeds`` (of the two), ``blocks`` (of text; 1
        where none are known), ``difference`` (mean over seeds of ours minus that of the baseline's, of the logarithm
        where that is compared), ``difference_low`` and ``difference_high`` (its 95% interval over seeds and text),
        ``t``, ``p`` and ``p_holm``. With one seed of either there is no interval and no test, and where all are exactly
        equal there is no test; what is not there is NaN.

    Raises:
        UserError: If the baseline has no results, or a combination occurs twice.
    """
    strategies = list(dict.fromkeys(results["strategy"]))
    if baseline not in strategies:
        raise UserError(f"baseline: got {baseline!r}, expected one of {', '.join(strategies)}")
    _once(results)
    of_cell = {} if blocks is None else dict(iter(blocks.groupby(["strategy", *CELL])))
    rows = []
    for cell, group in results.groupby(CELL, sort=False):
        values = {strategy: of.set_index("seed")["value"] for strategy, of in group.groupby("strategy")}
        if baseline not in values:
            continue
        # bits per byte are of the same losses as perplexity, of which the sums are kept
        losses = ("ppl", *cell[1:]) if cell[0] == "bits_per_byte" else cell
        for strategy in (s for s in strategies if s != baseline and s in values):
            ours, theirs = (_sums(of_cell.get((side, *losses)), values[side]) for side in (strategy, baseline))
            if cell[0] == "bits_per_byte" and ours and theirs:
                ours, theirs = logarithm(*ours), logarithm(*theirs)
            effect = difference(ours, theirs)
            if effect is None:
                metric = str(cell[0])
                effect = difference(_over_seeds(values[strategy], metric), _over_seeds(values[baseline], metric))
                assert effect is not None, "one number a seed is on the same text"
            tested = effect.error >= 0 and (effect.mean or effect.error)
            t = effect.mean / effect.error if tested and effect.error else math.copysign(math.inf, effect.mean)
            row = (effect.seeds, effect.blocks, effect.mean, *effect.interval())
            rows.append((strategy, *cell, *row, *((t, effect.p()) if tested else (math.nan, math.nan))))
    names = ["fewest_seeds", "blocks", "difference", "difference_low", "difference_high", "t", "p"]
    tests = pd.DataFrame(rows, columns=["strategy", *CELL, *names])
    tests["p_holm"] = tests.groupby(CELL)["p"].transform(holm) if len(tests) else tests["p"]
    return tests


def _sums(blocks: pd.DataFrame | None, values: pd.Series) -> Sums | None:
    return None if blocks is None else by_block(blocks, values.index)


def _over_seeds(values: pd.Series, metric: str) -> Sums:
    with np.errstate(divide="ignore"):
        numbers = np.log(values) if metric in LOGARITHMIC else values
    return numbers.to_numpy(dtype=np.float64)[:, None], np.ones((len(values), 1))


def summarise(
    results: pd.DataFrame, baseline: str, alpha: float = 0.05, blocks: pd.DataFrame | None = None
) -> pd.DataFrame:
    """Mean and standard deviation over seeds for every strategy and cell, with the marks a table needs.

    Args:
        results: See `against_baseline`.
        baseline: The strategy against which the others are tested.
        alpha: Level of the corrected test, in (0, 1).
        blocks: See `against_baseline`.

    Returns:
        One row for each strategy and cell, in the order in which they first occur: ``seeds``, ``mean``, ``std`` (n - 1
        in the denominator; NaN for one seed), ``best`` (the best mean of its cell, ties included, unless all tie), the
        columns of `against_baseline`, ``significant`` (p_holm < alpha), and where logarithms are compared ``ratio``
        with ``ratio_low`` and ``ratio_high``, their exponentials: the geometric mean over seeds of ours over
        that of the baseline's, and its interval.

    Raises:
        UserError: If alpha is out of range, a metric is unknown, the baseline is missing, or a combination occurs
            twice.
    """
    if not 0 < alpha < 1:
        raise UserError(f"alpha: got {alpha}, expected a level between 0 and 1 such as 0.05")
    tests = against_baseline(results, baseline, blocks)
    keys = ["strategy", *CELL]
    values = results.groupby(keys, sort=False)["value"]
    summary = values.agg(seeds="count", mean="mean", std="std").reset_index()
    sign = np.where(summary["metric"].map(lower_is_better), 1.0, -1.0)
    cost = summary["mean"] * sign
    cells = cost.groupby([summary[c] for c in CELL])
    summary["best"] = (cost == cells.transform("min")) & (cost < cells.transform("max"))
    summary = summary.merge(tests, on=keys, how="left")
    summary["significant"] = summary["p_holm"] < alpha
    compared = summary["metric"].isin(LOGARITHMIC)
    for end in ("", "_low", "_high"):
        summary[f"ratio{end}"] = np.exp(summary[f"difference{end}"].astype(float).where(compared))
    summary.loc[compared & (summary["strategy"] == baseline), "ratio"] = 1.0
    return summary


def mean_reciprocal_rank(scores: pd.DataFrame, metric: str) -> pd.Series:
    """Mean over tasks of 1 / rank, a summary of how a strategy does on many tasks (Kazemnejad et al. 2023, section 4).

    Args:
        scores: Scores (strategies, tasks), for instance the mean exact match beyond the training length. Ties share
            their mean rank.
        metric: Name of the scores' metric, which says whether larger is better.

    Returns:
        A number in (0, 1] for each strategy; 1 means that it is the best at every task.

    Raises:
        UserError: If a strategy lacks a task, because ranks among different strategies cannot be averaged.
    """
    if scores.isna().any(axis=None):
        lacking = [f"{s} lacks {t}" for s, row in scores.iterrows() for t in scores.columns[row.isna()]]
        raise UserError(f"mean reciprocal rank: {'; '.join(lacking)}; run what is missing or leave the task out")
    return (1 / scores.rank(axis=0, ascending=lower_is_better(metric), method="average")).mean(axis=1)


def _once(results: pd.DataFrame) -> None:
    keys = ["strategy", "seed", *CELL]
    twice = results[results.duplicated(keys)]
    if len(twice):
        raise UserError(
            f"results: {dict(twice.iloc[0][keys])} occurs twice, expected one for a strategy, seed and cell"
        )

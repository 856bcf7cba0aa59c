"""Statistics of a comparison: every number has the same targets, data and budget behind it, and one value per seed.

A *result* is one row (strategy, seed, metric, protocol, length, value); a *cell* is a (metric, protocol, length).
Strategies are compared inside a cell only, and paired: the same seed means the same order of data and the same test
blocks.
"""

import warnings
from collections.abc import Callable

import numpy as np
import pandas as pd
from numpy.typing import ArrayLike, NDArray
from scipy import stats

from kerple.errors import UserError

CELL = ["metric", "protocol", "length"]
LOWER_IS_BETTER = ("ppl", "bits_per_byte", "loss")
HIGHER_IS_BETTER = ("exact_match", "token_accuracy", "accuracy")


def lower_is_better(metric: str) -> bool:
    """Whether a smaller value of this metric wins.

    Raises:
        UserError: If the metric is not known; guessing would put the bold on the worst.
    """
    if metric not in LOWER_IS_BETTER + HIGHER_IS_BETTER:
        known = ", ".join(LOWER_IS_BETTER + HIGHER_IS_BETTER)
        raise UserError(f"metric: got {metric!r}, expected one of {known}; add it to kerple.report.statistics")
    return metric in LOWER_IS_BETTER


def holm(p: ArrayLike) -> NDArray[np.float64]:
    """Holm's step-down adjustment of p-values (Holm 1979): strong control of the family-wise error, no independence
    needed.

    The i-th smallest of n is multiplied by n - i + 1, made monotone, capped at 1. NaN stays NaN and does not count as
    a test.
    """
    p = np.asarray(p, dtype=np.float64)
    adjusted = np.full_like(p, np.nan)
    tested = np.flatnonzero(~np.isnan(p))
    order = tested[np.argsort(p[tested], kind="stable")]
    steps = p[order] * np.arange(len(order), 0, -1)
    adjusted[order] = np.minimum(np.maximum.accumulate(steps), 1.0)
    return adjusted


def against_baseline(results: pd.DataFrame, baseline: str) -> pd.DataFrame:
    """Paired two-sided t-test of every strategy against the baseline, cell by cell, over the seeds both have.

    Holm's correction is over the strategies of one cell: the family is "who differs from the baseline at this length".

    Args:
        results: Columns strategy, seed, metric, protocol, length, value; one row for each combination.
        baseline: The strategy the others are compared with.

    Returns:
        One row for each strategy but the baseline and each cell: ``pairs`` (seeds in common), ``difference`` (mean of
        value minus the baseline's), ``t``, ``p``, ``p_holm``. With fewer than two pairs, or where every pair is
        exactly equal, there is no test and t and p are NaN; the same non-zero difference at every seed gives p = 0.

    Raises:
        UserError: If the baseline has no results, or a combination occurs twice.
    """
    strategies = list(dict.fromkeys(results["strategy"]))
    if baseline not in strategies:
        raise UserError(f"baseline: got {baseline!r}, expected one of {', '.join(strategies)}")
    _once(results)
    rows = []
    for cell, group in results.groupby(CELL, sort=False):
        by_seed = group.pivot(index="seed", columns="strategy", values="value")
        if baseline not in by_seed:
            continue
        for strategy in (s for s in strategies if s != baseline and s in by_seed):
            pairs = by_seed[[strategy, baseline]].dropna()
            rows.append((strategy, *cell, len(pairs), *_paired(pairs[strategy], pairs[baseline])))
    tests = pd.DataFrame(rows, columns=["strategy", *CELL, "pairs", "difference", "t", "p"])
    tests["p_holm"] = tests.groupby(CELL)["p"].transform(holm) if len(tests) else tests["p"]
    return tests


def _paired(ours: pd.Series, theirs: pd.Series) -> tuple[float, float, float]:
    difference = float((ours - theirs).mean()) if len(ours) else np.nan
    if len(ours) < 2 or not (ours != theirs).any():
        return difference, np.nan, np.nan
    with warnings.catch_warnings():  # equal differences are not a loss of precision but the strongest evidence there is
        warnings.filterwarnings("ignore", "Precision loss", RuntimeWarning)
        warnings.filterwarnings("ignore", "divide by zero", RuntimeWarning)
        test = stats.ttest_rel(ours.to_numpy(), theirs.to_numpy())
    return difference, float(test.statistic), float(test.pvalue)


def summarise(results: pd.DataFrame, baseline: str, alpha: float = 0.05) -> pd.DataFrame:
    """Mean and standard deviation over seeds for every strategy and cell, with the marks a table needs.

    Args:
        results: As for `against_baseline`.
        baseline: The strategy the others are tested against.
        alpha: Level of the corrected test, in (0, 1).

    Returns:
        One row for each strategy and cell, in the order in which they first occur: ``seeds``, ``mean``, ``std`` (n - 1
        in the denominator; NaN for one seed), ``best`` (the best mean of its cell, ties included, unless all tie), the
        columns of `against_baseline` and ``significant`` (p_holm < alpha).

    Raises:
        UserError: If alpha is out of range, a metric is unknown, the baseline is missing, or a combination occurs
            twice.
    """
    if not 0 < alpha < 1:
        raise UserError(f"alpha: got {alpha}, expected a level between 0 and 1 such as 0.05")
    tests = against_baseline(results, baseline)
    keys = ["strategy", *CELL]
    values = results.groupby(keys, sort=False)["value"]
    summary = values.agg(seeds="count", mean="mean", std="std").reset_index()
    sign = np.where(summary["metric"].map(lower_is_better), 1.0, -1.0)
    cost = summary["mean"] * sign
    cells = cost.groupby([summary[c] for c in CELL])
    summary["best"] = (cost == cells.transform("min")) & (cost < cells.transform("max"))
    summary = summary.merge(tests, on=keys, how="left")
    summary["significant"] = summary["p_holm"] < alpha
    return summary


def interval(
    sums: ArrayLike,
    counts: ArrayLike,
    transform: Callable[[NDArray], NDArray] = np.exp,
    *,
    against: tuple[ArrayLike, ArrayLike] | None = None,
    level: float = 0.95,
    resamples: int = 2000,
    seed: int = 0,
) -> tuple[float, float]:
    """Bootstrap interval, over blocks of the test set, of the mean over seeds of ``transform(Σ sums / Σ counts)``.

    A resample draws whole blocks with replacement, the same blocks for all seeds (and for both sides of a ratio):
    blocks are what was sampled from the corpus, tokens inside one are far from independent. Seeds are held fixed;
    their spread is the ± of the table.

    Args:
        sums: (seeds, blocks) sums over a block, for instance of the loss in nats.
        counts: (seeds, blocks) what was summed, for instance targets.
        transform: From a mean to the metric; the exponential for perplexity, ``np.asarray`` for an accuracy.
        against: Sums and counts of a second strategy over the same blocks: the interval is then of the ratio of the
            two metrics.
        level: Confidence level.
        resamples: Bootstrap resamples.
        seed: Of the resampling.

    Returns:
        Lower and upper end; NaN with fewer than two blocks.

    Raises:
        UserError: If the shapes differ.
    """
    sides = [(sums, counts), *([against] if against is not None else [])]
    arrays = [(np.asarray(s, dtype=np.float64), np.asarray(c, dtype=np.float64)) for s, c in sides]
    shapes = {a.shape[1:] for pair in arrays for a in pair}
    if len(shapes) > 1 or any(s.ndim != 2 or s.shape != c.shape for s, c in arrays):
        raise UserError(
            f"blocks: got shapes {[tuple(a.shape for a in pair) for pair in arrays]}, expected (seeds, blocks)"
        )
    blocks = arrays[0][0].shape[1]
    if blocks < 2:
        return np.nan, np.nan

    def statistic(index: NDArray, axis: int = -1) -> NDArray:  # index (..., blocks)
        index = index.astype(np.int64)
        means = [transform(s[:, index].sum(-1) / c[:, index].sum(-1)).mean(0) for s, c in arrays]
        return means[0] if against is None else means[0] / means[1]

    found = stats.bootstrap(
        (np.arange(blocks),),
        statistic,
        n_resamples=resamples,
        confidence_level=level,
        method="percentile",
        batch=250,
        rng=np.random.default_rng(seed),
    )
    return float(found.confidence_interval.low), float(found.confidence_interval.high)


def mean_reciprocal_rank(scores: pd.DataFrame, metric: str) -> pd.Series:
    """Mean over tasks of 1 / rank (Kazemnejad et al. 2023, section 4): how one strategy does on many tasks, in one
    number.

    Args:
        scores: (strategies, tasks), for instance the mean exact match beyond the training length; ties share their
            mean rank.
        metric: Says whether more is better.

    Returns:
        One number in (0, 1] for each strategy; 1 means best at every task.

    Raises:
        UserError: If a strategy lacks a task: ranks over different sets of rivals cannot be averaged.
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
            f"results: {dict(twice.iloc[0][keys])} occurs twice, expected one value for each strategy, seed and cell"
        )

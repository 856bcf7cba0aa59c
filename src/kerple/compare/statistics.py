"""Statistics of a comparison whose runs have the same targets, data and budget, and differ in strategy and seed.

A *result* is a row (strategy, seed, metric, protocol, length, value); a *cell* is a (metric, protocol, length).
Strategies are compared within a cell and in pairs: runs with the same seed have the same order of data and the same
test blocks.
"""

import math
from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np
import pandas as pd
from numpy.typing import ArrayLike, NDArray
from scipy import stats

from kerple.base.errors import UserError

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


@dataclass(frozen=True)
class Estimate:
    """A mean over seeds, with its variance over seeds and over text.

    Args:
        mean: Mean over seeds of Σ sums / Σ counts.
        seed_variance: Variance of the mean that the spread over seeds implies; NaN with one seed.
        text_variance: Variance of the mean that the spread over blocks of text implies; 0 if no blocks are known.
        seeds: Number of seeds.
        blocks: Number of blocks, that is of documents where the tests say which blocks are of one.
    """

    mean: float
    seed_variance: float
    text_variance: float
    seeds: int
    blocks: int

    @property
    def error(self) -> float:
        """Standard error over seeds and text; with one seed over text alone; NaN if neither variance is known."""
        if not math.isfinite(self.mean) or self.seeds == self.blocks == 1:
            return math.nan
        return math.sqrt(np.nansum([self.seed_variance, self.text_variance]))

    @property
    def freedom(self) -> int:
        """Degrees of freedom of `error`: those of the seeds, or with one seed those of the text.

        With those of the seeds, a test errs no more often than its level, whichever of the two variances is larger, if
        no block has a large share of the targets.
        """
        return (self.seeds if self.seeds > 1 else self.blocks) - 1

    def interval(self, level: float = 0.95) -> tuple[float, float]:
        """Confidence interval by Student's t; NaN without a standard error."""
        if not self.error >= 0:
            return math.nan, math.nan
        half = stats.t.isf((1 - level) / 2, self.freedom) * self.error
        return self.mean - half, self.mean + half

    def above(self, bound: float = 0.0) -> float:
        """One-sided p-value, which is small if the mean is above the bound; 1 - p is the p-value of the other side."""
        if not self.error >= 0:
            return math.nan
        distance = self.mean - bound
        if self.error <= 1e-12 * max(abs(self.mean), abs(bound)):  # the same at every seed
            return 0.5 if distance == 0 else float(distance < 0)
        return float(stats.t.sf(distance / self.error, self.freedom))

    def p(self) -> float:
        """Two-sided p-value of the hypothesis that the mean is 0."""
        return 2 * min(one := self.above(), 1 - one)


def estimate(sums: ArrayLike, counts: ArrayLike) -> Estimate:
    """Mean over seeds of ``Σ sums / Σ counts``, with its variance over seeds and over text.

    A mean depends on two random choices: the seeds of training and the text of the test. The spread over seeds, which
    were all tested on the same blocks, gives the variance of the first. The spread over blocks of the mean over seeds
    gives that of the second; whole blocks are used because tokens in a block are not independent. Where a test tells
    which blocks are of one document, that document is a block here, because they are not independent either. The
    quotient is linearised. The sum of the two is the variance for other seeds and other text. An interaction of seeds
    and text is counted in both, so the sum is rather too large than too small.

    Args:
        sums: Sums over each block (seeds, blocks); for a difference, those of one strategy minus those of the other on
            the same seeds and blocks. There is one block if the sums by block are not known.
        counts: Numbers of summands (seeds, blocks), for instance targets.
    """
    sums, counts = np.asarray(sums, dtype=np.float64), np.asarray(counts, dtype=np.float64)
    if sums.ndim != 2 or sums.shape != counts.shape or not sums.size:
        raise UserError(f"blocks: got shapes {sums.shape} and {counts.shape}, expected (seeds, blocks) of both")
    seeds, blocks = sums.shape
    of_seed = sums.sum(1) / counts.sum(1)
    s, c = sums.mean(0), counts.mean(0)
    with np.errstate(invalid="ignore"):  # a collapsed model's loss is infinite
        residual = s - s.sum() / c.sum() * c
        over_text = blocks / (blocks - 1) * (residual**2).sum() / c.sum() ** 2 if blocks > 1 else 0.0
        over_seeds = of_seed.var(ddof=1) / seeds if seeds > 1 else math.nan
    return Estimate(float(of_seed.mean()), float(over_seeds), float(over_text), seeds, blocks)


def against_baseline(results: pd.DataFrame, baseline: str, blocks: pd.DataFrame | None = None) -> pd.DataFrame:
    """Test each strategy against the baseline in each cell: paired, two-sided, over the seeds that both have.

    Perplexities and bits per byte are compared by their logarithm, that is by the mean loss in nats; accuracies as they
    are. Holm's correction is applied over the strategies of a cell: the family of tests asks who differs from the
    baseline at this length. There is no other correction.

    Args:
        results: Columns strategy, seed, metric, protocol, length, value; a row for each combination.
        baseline: The strategy with which the others are compared.
        blocks: Sums by block of the same cells: strategy, seed, metric, protocol, length, block, sum, count. If they
            are known, the test is over seeds and text, else over seeds alone.

    Returns:
        One row for each strategy but the baseline and each cell: ``pairs`` (seeds in common), ``blocks`` (of text; 1
        where none are known), ``difference`` (mean over seeds of ours minus the baseline's, of the logarithm where that
        is compared), ``difference_low`` and ``difference_high`` (its 95% interval over seeds and text; over text alone
        with one seed), ``t``, ``p`` and ``p_holm``. With fewer than two pairs, or
        where every pair is exactly equal, there is no test and t and p are NaN; the same non-zero difference at every
        seed and block gives p = 0.

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
        by_seed = group.pivot(index="seed", columns="strategy", values="value")
        if baseline not in by_seed:
            continue
        for strategy in (s for s in strategies if s != baseline and s in by_seed):
            pairs = by_seed[[strategy, baseline]].dropna()
            # bits per byte are of the same losses as perplexity, of which the sums are kept
            losses = ("ppl", *cell[1:]) if cell[0] == "bits_per_byte" else cell
            sides = [of_cell.get((side, *losses)) for side in (strategy, baseline)]
            rows.append((strategy, *cell, *_paired(pairs[strategy], pairs[baseline], sides[0], sides[1], str(cell[0]))))
    names = ["pairs", "blocks", "difference", "difference_low", "difference_high", "t", "p"]
    tests = pd.DataFrame(rows, columns=["strategy", *CELL, *names])
    tests["p_holm"] = tests.groupby(CELL)["p"].transform(holm) if len(tests) else tests["p"]
    return tests


def _paired(
    ours: pd.Series, theirs: pd.Series, our_blocks: pd.DataFrame | None, their_blocks: pd.DataFrame | None, metric: str
) -> tuple[float, ...]:
    if not len(ours):
        return (0, 0, *[math.nan] * 5)
    with np.errstate(divide="ignore", invalid="ignore"):
        d = np.asarray(np.log(ours / theirs) if metric in LOGARITHMIC else ours - theirs, dtype=np.float64)
    over_seeds = estimate(d[:, None], np.ones((len(d), 1)))
    sides = [None if b is None else by_block(b, ours.index) for b in (our_blocks, their_blocks)]
    compared = log_ratio if metric == "bits_per_byte" else difference
    over_both = compared(*sides)
    tested_by = over_seeds if over_both is None else over_both
    tested = len(d) > 1 and (d != 0).any() and math.isfinite(tested_by.mean)
    t = tested_by.mean / tested_by.error if tested and tested_by.error else math.copysign(math.inf, tested_by.mean)
    p = tested_by.p() if tested else math.nan
    return len(d), tested_by.blocks, tested_by.mean, *tested_by.interval(), t if tested else math.nan, p


def by_block(blocks: pd.DataFrame, seeds: Iterable[int] | None = None) -> tuple[NDArray, NDArray] | None:
    """Sums and counts of one strategy in one cell, (seeds, blocks) each; None if a seed lacks a block."""
    wide = blocks.pivot(index="seed", columns="block", values=["sum", "count"])
    if seeds is not None:
        wide = wide.reindex(list(seeds))
    if wide.isna().any(axis=None):
        return None
    return wide["sum"].to_numpy(), wide["count"].to_numpy()


def difference(ours: tuple[NDArray, NDArray] | None, theirs: tuple[NDArray, NDArray] | None) -> Estimate | None:
    """Mean loss of one minus that of the other; None if they do not have the same seeds and blocks."""
    if ours is None or theirs is None or not _same_text(ours, theirs):
        return None
    return estimate(ours[0] - theirs[0], ours[1])


def log_ratio(ours: tuple[NDArray, NDArray] | None, theirs: tuple[NDArray, NDArray] | None) -> Estimate | None:
    """Logarithm of the ratio of two mean losses, linearised; None if they do not have the same seeds and blocks.

    It is that of the ratio of bits per byte too: the bytes of the text are the same on both sides.
    """
    if ours is None or theirs is None or not _same_text(ours, theirs):
        return None
    counts = ours[1]
    means = [(sums.sum(1) / counts.sum(1))[:, None] for sums in (ours[0], theirs[0])]  # (seeds, 1)
    with np.errstate(invalid="ignore", divide="ignore"):  # a collapsed model's loss is infinite
        return estimate(counts * np.log(means[0] / means[1]) + ours[0] / means[0] - theirs[0] / means[1], counts)


def _same_text(ours: tuple[NDArray, NDArray], theirs: tuple[NDArray, NDArray]) -> bool:
    return ours[0].shape == theirs[0].shape and bool((ours[1] == theirs[1]).all())


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
        with ``ratio_low`` and ``ratio_high``, their exponentials: the geometric mean over seeds of ours over the
        baseline's, and its interval.

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
            f"results: {dict(twice.iloc[0][keys])} occurs twice, expected one value for each strategy, seed and cell"
        )

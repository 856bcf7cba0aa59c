"""Statistics of a comparison whose runs have the same targets, data and budget, and differ in strategy and seed.

A *result* is a row (strategy, seed, metric, protocol, length, value); a *cell* is a (metric, protocol, length).
Strategies are compared within a cell and in pairs, over all seeds of each and on the same text. Runs of one seed have
the same order of data, but their losses hardly go together (a correlation of 0.06 to 0.16 between strategies), so that
pairing by seed would gain nothing and lose the seeds that only one has.
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
Sums = tuple[NDArray[np.float64], NDArray[np.float64]]
"""Sums and counts of one strategy in one cell, (seeds, blocks) each."""


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
        seeds: Number of seeds; of the strategy that has fewest, if there are several.
        blocks: Number of blocks, that is of documents where the tests say which blocks are of one.
        seed_freedom: Degrees of freedom of the first variance.
        text_freedom: Degrees of freedom of the second.
    """

    mean: float
    seed_variance: float
    text_variance: float
    seeds: int
    blocks: int
    seed_freedom: float
    text_freedom: float

    @property
    def error(self) -> float:
        """Standard error over seeds and text; NaN with one seed, because what others would give is not known."""
        return math.sqrt(self.seed_variance + self.text_variance) if math.isfinite(self.mean) else math.nan

    @property
    def freedom(self) -> float:
        """Degrees of freedom of `error`: Satterthwaite's (1946) of the two variances.

        With two seeds, those of the seeds: their spread is too uncertain to say that text has the larger part in it,
        and a test that believed it would err twice as often as its level.
        """
        if self.seeds == 2:
            return self.seed_freedom
        return satterthwaite([self.seed_variance, self.text_variance], [self.seed_freedom, self.text_freedom])

    def interval(self, level: float = 0.95) -> tuple[float, float]:
        """Confidence interval by Student's t; NaN without a standard error."""
        if not self.error >= 0:
            return math.nan, math.nan
        half = stats.t.isf((1 - level) / 2, self.freedom) * self.error if self.error else 0.0
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


def satterthwaite(variances: ArrayLike, freedoms: ArrayLike) -> float:
    """Degrees of freedom of a sum of independent variances (Satterthwaite 1946); variances of 0 and NaN add none."""
    variances, freedoms = np.asarray(variances, dtype=np.float64), np.asarray(freedoms, dtype=np.float64)
    known = variances > 0
    return float(variances[known].sum() ** 2 / (variances[known] ** 2 / freedoms[known]).sum()) if known.any() else 1.0


def estimate(*strategies: Sums) -> Estimate:
    """The sum over strategies of each one's mean over seeds of ``Σ sums / Σ counts``, with its variances.

    A mean depends on two random choices: the seeds of training and the text of the test. The seeds of a strategy, which
    were all tested on the same blocks, give a variance of the first. Seeds of two strategies have nothing in common, so
    that these variances add up, as in Welch's test (1947); a number of the same runs, such as what text beyond a window
    is worth, is of one strategy, and subtracted before. The text is the same for all: the spread over blocks of the sum
    of the means gives the variance of the second. Whole blocks are used because tokens in a block are not independent,
    and documents, where a test tells which blocks are of one. The quotient is linearised. The two variances are added.
    An interaction of seeds and text is counted in both, so the sum is rather too large than too small.

    Degrees of freedom of the text are its effective number of documents less one, (Σ counts)² / Σ counts² - 1 (Kish
    1965): a document of half of the text is half of the sample.

    Args:
        *strategies: Sums over each block (seeds, blocks) and numbers of summands of the same shape, such as targets, of
            each strategy; for a difference, with the other sign for what is subtracted. There is one block if the sums
            by block are not known.
    """
    means, variances, freedoms, seeds, residual = [], [], [], [], np.zeros(1)
    for sums, counts in strategies:
        sums, counts = np.asarray(sums, dtype=np.float64), np.asarray(counts, dtype=np.float64)
        if sums.ndim != 2 or sums.shape != counts.shape or not sums.size:
            raise UserError(f"blocks: got shapes {sums.shape} and {counts.shape}, expected (seeds, blocks) of both")
        of_seed, s, c = sums.sum(1) / counts.sum(1), sums.mean(0), counts.mean(0)  # (seeds,), (blocks,) twice
        with np.errstate(invalid="ignore"):  # a collapsed model's loss is infinite
            residual = residual + (s - s.sum() / c.sum() * c) / c.sum()
            variances.append(of_seed.var(ddof=1) / len(of_seed) if len(of_seed) > 1 else math.nan)
        means.append(of_seed.mean())
        seeds.append(len(of_seed))
        freedoms.append(len(of_seed) - 1)
    blocks = len(c)
    with np.errstate(invalid="ignore"):
        over_text = blocks / (blocks - 1) * (residual**2).sum() if blocks > 1 else 0.0
    return Estimate(
        mean=float(sum(means)),
        seed_variance=float(sum(variances)),
        text_variance=float(over_text),
        seeds=min(seeds),
        blocks=blocks,
        seed_freedom=satterthwaite(variances, freedoms),
        text_freedom=float(c.sum() ** 2 / (c**2).sum() - 1),
    )


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


def by_block(blocks: pd.DataFrame, seeds: Iterable[int] | None = None) -> Sums | None:
    """Sums and counts of one strategy in one cell, (seeds, blocks) each; None if a seed lacks a block."""
    wide = blocks.pivot(index="seed", columns="block", values=["sum", "count"])
    if seeds is not None:
        wide = wide.reindex(list(seeds))
    if wide.isna().any(axis=None):
        return None
    return wide["sum"].to_numpy(), wide["count"].to_numpy()


def difference(ours: Sums | None, theirs: Sums | None, same_runs: bool = False) -> Estimate | None:
    """Mean loss of one less that of the other; None if they were not tested on the same text.

    Args:
        ours: Sums and counts, (seeds, blocks) each.
        theirs: Those of the other.
        same_runs: Whether both are of the same runs in the same order, so that each seed gives a difference. Else the
            seeds of one have nothing to do with those of the other.
    """
    if ours is None or theirs is None or ours[1].shape[1] != theirs[1].shape[1]:
        return None
    if not (ours[1][0] == theirs[1]).all() or (same_runs and len(ours[0]) != len(theirs[0])):
        return None
    return estimate((ours[0] - theirs[0], ours[1])) if same_runs else estimate(ours, (-theirs[0], theirs[1]))


def logarithm(sums: NDArray[np.float64], counts: NDArray[np.float64]) -> Sums:
    """Sums whose mean is the logarithm of the mean loss of each seed, linearised, with their counts.

    A difference of two is the logarithm of the ratio of two losses. It is that of the ratio of bits per byte too: the
    bytes of the text are the same on both sides.
    """
    means = (sums.sum(1) / counts.sum(1))[:, None]  # (seeds, 1)
    with np.errstate(invalid="ignore", divide="ignore"):  # a collapsed model's loss is infinite
        return counts * (np.log(means) - 1) + sums / means, counts


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

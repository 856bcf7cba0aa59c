"""Estimates of means and differences, with standard errors over seeds and text."""

import math
from collections.abc import Iterable
from dataclasses import dataclass, replace

import numpy as np
import pandas as pd
from numpy.typing import ArrayLike, NDArray
from scipy import stats

Sums = tuple[NDArray[np.float64], NDArray[np.float64]]
"""Sums of one strategy, such as sums of losses in nats, and numbers of summands: two arrays (seeds, blocks)."""


@dataclass(frozen=True)
class Estimate:
    """A mean over seeds, or a sum or difference of such means, with its variance over seeds and over text.

    Args:
        mean: The mean.
        seed_variance: Variance of the mean due to the seeds; NaN if a strategy has one seed.
        text_variance: Variance of the mean due to the blocks of text; 0 with one block.
        seeds: Number of seeds; of several strategies, the smallest number.
        blocks: Number of blocks of text, such as documents, see `kerple.compare.finished_runs.Runs`.
        seed_freedom: Degrees of freedom of ``seed_variance``.
        text_freedom: Degrees of freedom of ``text_variance``.
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
        """Standard error over seeds and text; NaN with one seed, or if the mean is not finite."""
        return math.sqrt(self.seed_variance + self.text_variance) if math.isfinite(self.mean) else math.nan

    @property
    def freedom(self) -> float:
        """Degrees of freedom of `error`: those of Satterthwaite (1946) for the sum of the two variances.

        With two seeds, ``seed_freedom`` is used instead, but at most 2. The variance of two seeds is too uncertain for
        Satterthwaite's formula: a test with it would reject a true null hypothesis at twice the nominal rate, also for
        the difference from a strategy with many seeds.
        """
        if self.seeds == 2:
            return min(self.seed_freedom, 2.0)
        return satterthwaite([self.seed_variance, self.text_variance], [self.seed_freedom, self.text_freedom])

    def interval(self) -> tuple[float, float]:
        """95% confidence interval of the mean by Student's t distribution: its two ends, NaN if `error` is NaN."""
        if not self.error >= 0:
            return math.nan, math.nan
        half = stats.t.isf((1 - 0.95) / 2, self.freedom) * self.error if self.error else 0.0
        return self.mean - half, self.mean + half

    def above(self, bound: float = 0.0) -> float:
        """One-sided p-value p: a small p is evidence that the mean exceeds the bound. NaN if `error` is NaN.

        The null hypothesis is that the mean is at most the bound. The p-value of the null hypothesis that the
        mean is at least the bound is 1 - p. If the error is 0, p is 0 above the bound, 1 below it and 0.5 at it.
        """
        if not self.error >= 0:
            return math.nan
        distance = self.mean - bound
        if self.error <= 1e-12 * max(abs(self.mean), abs(bound)):  # 0, except for rounding
            return 0.5 if distance == 0 else float(distance < 0)
        return float(stats.t.sf(distance / self.error, self.freedom))

    def p(self) -> float:
        """Two-sided p-value of the hypothesis that the mean is 0; NaN if `error` is NaN."""
        above = self.above()
        return 2 * min(above, 1 - above)

    def expected(self, seeds: int, blocks: float | None = None) -> "Estimate":
        """Return the estimate that is expected with other numbers of seeds per strategy and blocks of equal size.

        Args:
            seeds: Number of seeds of each strategy. This estimate must have the same number of seeds of each strategy.
            blocks: Number of blocks of text; None for the same text.
        """
        blocks = self.text_freedom + 1 if blocks is None else blocks
        return replace(
            self,
            seed_variance=self.seed_variance * self.seeds / seeds,
            text_variance=self.text_variance * (self.text_freedom + 1) / blocks,
            seeds=seeds,
            seed_freedom=self.seed_freedom * (seeds - 1) / (self.seeds - 1),
            text_freedom=blocks - 1,
        )

    def detectable(self) -> float:
        """Return the mean that a one-sided test at 2.5% with this standard error detects with 80% power.

        A two-sided test at 5% detects it with the same power, except for the chance of an error in the sign.
        """
        return float((stats.t.isf(0.025, self.freedom) + stats.t.ppf(0.8, self.freedom)) * self.error)


def satterthwaite(variances: ArrayLike, freedoms: ArrayLike) -> float:
    """Degrees of freedom of a sum of independent variances (Satterthwaite 1946).

    Variances of 0 and NaN are ignored. The result is 1 if no other variance is left.
    """
    variances, freedoms = np.asarray(variances, dtype=np.float64), np.asarray(freedoms, dtype=np.float64)
    known = variances > 0
    return float(variances[known].sum() ** 2 / (variances[known] ** 2 / freedoms[known]).sum()) if known.any() else 1.0


def estimate(*strategies: Sums) -> Estimate:
    """Estimate the mean of a strategy, or the sum of the means of several strategies, with its variances.

    The mean of a seed is ``Σ sums / Σ counts`` over all blocks. The mean of a strategy is the mean over its seeds. It
    depends on two random samples: the seeds of training and the text of the test.

    - Seeds: all seeds of a strategy were tested on the same blocks, and the spread of their means gives a variance.
      Seeds of two strategies are independent, so these variances are added, as in Welch's test (1947). For a difference
      within each run, such as the context gain, the caller subtracts first and passes one strategy.
    - Text: all strategies were tested on the same blocks. The contributions of one block to the means of all strategies
      are added, and the spread of these totals over the blocks gives a variance. ``Σ sums / Σ counts`` is linearised.
      The sampling unit is a block, such as a document, because tokens in a block are not independent.

    The two variances are added. An interaction of seeds and text is part of both, so the sum is conservative. The
    degrees of freedom of the text are Kish's (1965) effective number of blocks less one, (Σ counts)² / Σ counts² - 1.

    Args:
        *strategies: For each strategy, sums and counts of the same shape (seeds, blocks). A count is the number of
            summands, such as targets. For a difference, the sums of the subtracted strategy are negative. If sums by
            block are not known, there is one block.
    """
    means = []  # an array (seeds,) for each strategy
    residual = np.zeros(1)  # contribution of each block to the sum of the means, less its expected contribution
    for sums, counts in strategies:
        sums, counts = np.asarray(sums, dtype=np.float64), np.asarray(counts, dtype=np.float64)
        means.append(sums.sum(1) / counts.sum(1))
        total, count = sums.mean(0), counts.mean(0)  # of each block
        with np.errstate(invalid="ignore"):  # a collapsed model's loss is infinite
            residual = residual + (total - total.sum() / count.sum() * count) / count.sum()
    blocks = len(count)
    with np.errstate(invalid="ignore"):
        variances = [x.var(ddof=1) / len(x) if len(x) > 1 else math.nan for x in means]
        text_variance = blocks / (blocks - 1) * (residual**2).sum() if blocks > 1 else 0.0
    return Estimate(
        mean=float(sum(x.mean() for x in means)),
        seed_variance=float(sum(variances)),
        text_variance=float(text_variance),
        seeds=min(map(len, means)),
        blocks=blocks,
        seed_freedom=satterthwaite(variances, [len(x) - 1 for x in means]),
        text_freedom=float(count.sum() ** 2 / (count**2).sum() - 1),
    )


def over_seeds(values: pd.Series) -> Sums:
    """Return one value per seed as sums of one block, whose text variance is 0."""
    return values.to_numpy(dtype=np.float64)[:, None], np.ones((len(values), 1))


def by_block(blocks: pd.DataFrame, seeds: Iterable[int] | None = None) -> Sums | None:
    """Return sums and counts, (seeds, blocks) each, or None if a seed lacks a block.

    Args:
        blocks: Columns seed, block, sum and count; the rows of one strategy, metric, protocol and length.
        seeds: The seeds, in this order; None for all, in ascending order.
    """
    wide = blocks.pivot(index="seed", columns="block", values=["sum", "count"])
    if seeds is not None:
        wide = wide.reindex(list(seeds))
    if wide.isna().any(axis=None):
        return None
    return wide["sum"].to_numpy(), wide["count"].to_numpy()


def difference(ours: Sums | None, theirs: Sums | None, same_runs: bool = False) -> Estimate | None:
    """Estimate the difference of two mean losses.

    The result is None if one of them is None, or if their counts differ, which shows that their text differs. With
    ``same_runs``, it is also None if their numbers of seeds differ.

    Args:
        ours: Sums and counts, (seeds, blocks) each.
        theirs: Sums and counts that are subtracted.
        same_runs: Whether both are of the same runs in the same order. The difference is then computed for each seed.
            Otherwise the seeds are independent samples.
    """
    if ours is None or theirs is None or ours[1].shape[1] != theirs[1].shape[1]:
        return None
    if any((counts != theirs[1][0]).any() for _, counts in (ours, theirs)):
        return None
    if same_runs and len(ours[0]) != len(theirs[0]):
        return None
    return estimate((ours[0] - theirs[0], ours[1])) if same_runs else estimate(ours, (-theirs[0], theirs[1]))


def logarithm(sums: NDArray[np.float64], counts: NDArray[np.float64]) -> Sums:
    """Return sums whose mean, for each seed, is the logarithm of the mean loss; and the counts.

    The sum of a block is linearised at the mean. The difference of two such means is the logarithm of a ratio of mean
    losses. With one tokenizer, the ratio of bits per byte has the same logarithm, because the number of bytes cancels.

    Args:
        sums: Sums of losses (seeds, blocks).
        counts: Numbers of targets (seeds, blocks).
    """
    means = (sums.sum(1) / counts.sum(1))[:, None]  # (seeds, 1)
    with np.errstate(invalid="ignore", divide="ignore"):  # a collapsed model's loss is infinite
        return counts * (np.log(means) - 1) + sums / means, counts

"""Estimates of means and differences, with standard errors over seeds and text."""

import math
from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np
import pandas as pd
from numpy.typing import ArrayLike, NDArray
from scipy import stats

from kerple.base.errors import UserError

Sums = tuple[NDArray[np.float64], NDArray[np.float64]]
"""Sums and counts of one strategy in one cell, (seeds, blocks) each."""


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

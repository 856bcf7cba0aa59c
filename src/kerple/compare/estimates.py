"""Estimates of means and differences, with standard errors over seeds and text."""

import math
from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np
import pandas as pd
from numpy.typing import ArrayLike, NDArray
from scipy import stats

Sums = tuple[NDArray[np.float64], NDArray[np.float64]]
"""Sums and counts of one strategy in one cell, (seeds, blocks) each."""


@dataclass(frozen=True)
class Estimate:
    """A mean over seeds, with its variance over seeds and over text.

    Args:
        mean: Mean over seeds of Σ sums / Σ counts.
        seed_variance: Variance of the mean over seeds; NaN with one seed.
        text_variance: Variance of the mean over blocks of text; 0 if sums by block are not known.
        seeds: Number of seeds; of several strategies, the smallest number.
        blocks: Number of blocks of text. A block is a document if the test knows documents.
        seed_freedom: Degrees of freedom of the seed variance.
        text_freedom: Degrees of freedom of the text variance.
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
        """Standard error over seeds and text; NaN with one seed."""
        return math.sqrt(self.seed_variance + self.text_variance) if math.isfinite(self.mean) else math.nan

    @property
    def freedom(self) -> float:
        """Degrees of freedom of `error`: Satterthwaite's (1946) for the sum of the two variances.

        With two seeds, the degrees of freedom of the seeds are used. The variance of two seeds is too uncertain for
        Satterthwaite's formula: a test that uses it rejects twice as often as its level.
        """
        if self.seeds == 2:
            return self.seed_freedom
        return satterthwaite([self.seed_variance, self.text_variance], [self.seed_freedom, self.text_freedom])

    def interval(self, level: float = 0.95) -> tuple[float, float]:
        """Confidence interval of the mean by Student's t; NaN without a standard error."""
        if not self.error >= 0:
            return math.nan, math.nan
        half = stats.t.isf((1 - level) / 2, self.freedom) * self.error if self.error else 0.0
        return self.mean - half, self.mean + half

    def above(self, bound: float = 0.0) -> float:
        """One-sided p-value of the alternative that the mean exceeds the bound; 1 - p is that of the other side."""
        if not self.error >= 0:
            return math.nan
        distance = self.mean - bound
        if self.error <= 1e-12 * max(abs(self.mean), abs(bound)):  # equal at every seed
            return 0.5 if distance == 0 else float(distance < 0)
        return float(stats.t.sf(distance / self.error, self.freedom))

    def p(self) -> float:
        """Two-sided p-value of the hypothesis that the mean is 0."""
        return 2 * min(one := self.above(), 1 - one)


def satterthwaite(variances: ArrayLike, freedoms: ArrayLike) -> float:
    """Degrees of freedom of a sum of independent variances (Satterthwaite 1946). Variances of 0 and NaN are ignored."""
    variances, freedoms = np.asarray(variances, dtype=np.float64), np.asarray(freedoms, dtype=np.float64)
    known = variances > 0
    return float(variances[known].sum() ** 2 / (variances[known] ** 2 / freedoms[known]).sum()) if known.any() else 1.0


def estimate(*strategies: Sums) -> Estimate:
    """Estimate the sum over strategies of the mean over seeds of ``Σ sums / Σ counts``, with its variances.

    A mean depends on two random samples: the seeds of training and the text of the test.

    - Seeds: all seeds of a strategy were tested on the same blocks, and their spread gives a variance. Seeds of two
      strategies are independent, so these variances are added, as in Welch's test (1947). For a quantity of the same
      runs, such as the context gain, the caller subtracts first and passes one strategy.
    - Text: all strategies have the same text. The spread over blocks of the sum of the means gives a variance. The
      quotient is linearised. The unit is a block because tokens in a block are not independent; it is a document if
      the test knows documents.

    The two variances are added. An interaction of seeds and text is part of both, so the sum is conservative. The
    degrees of freedom of the text are Kish's (1965) effective number of documents less one,
    (Σ counts)² / Σ counts² - 1.

    Args:
        *strategies: For each strategy, sums (seeds, blocks) and numbers of summands, such as targets, of the same
            shape. For a difference, the sums of the subtracted strategy are negative. If sums by block are not known,
            there is one block.
    """
    means, variances, freedoms, seeds, residual = [], [], [], [], np.zeros(1)
    for sums, counts in strategies:
        sums, counts = np.asarray(sums, dtype=np.float64), np.asarray(counts, dtype=np.float64)
        of_seed, s, c = sums.sum(1) / counts.sum(1), sums.mean(0), counts.mean(0)  # (seeds,), (blocks,), (blocks,)
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
    """Estimate the difference of two mean losses; None if they were not tested on the same text.

    Args:
        ours: Sums and counts, (seeds, blocks) each.
        theirs: Sums and counts that are subtracted.
        same_runs: Whether both are of the same runs in the same order. The difference is then taken per seed.
            Otherwise the seeds are independent samples.
    """
    if ours is None or theirs is None or ours[1].shape[1] != theirs[1].shape[1]:
        return None
    if not (ours[1][0] == theirs[1]).all() or (same_runs and len(ours[0]) != len(theirs[0])):
        return None
    return estimate((ours[0] - theirs[0], ours[1])) if same_runs else estimate(ours, (-theirs[0], theirs[1]))


def logarithm(sums: NDArray[np.float64], counts: NDArray[np.float64]) -> Sums:
    """Linearised sums whose mean is the logarithm of the mean loss of each seed, with their counts.

    The difference of two such means is the logarithm of a ratio of losses. This is also the ratio of bits per byte,
    because both texts have the same number of bytes.
    """
    means = (sums.sum(1) / counts.sum(1))[:, None]  # (seeds, 1)
    with np.errstate(invalid="ignore", divide="ignore"):  # a collapsed model's loss is infinite
        return counts * (np.log(means) - 1) + sums / means, counts

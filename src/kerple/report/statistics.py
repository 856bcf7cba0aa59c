"""Statistics of a comparison: every number has the same targets, data and budget behind it, and one value per seed.

A *result* is one row (strategy, seed, metric, protocol, length, value); a *cell* is a (metric, protocol, length).
Strategies are compared inside a cell only, and paired: the same seed means the same order of data and the same test
blocks.
"""

import itertools
import math
from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np
import pandas as pd
from numpy.typing import ArrayLike, NDArray
from scipy import stats

from kerple.errors import UserError

CELL = ["metric", "protocol", "length"]
LOWER_IS_BETTER = ("ppl", "bits_per_byte", "loss")
LOGARITHMIC = ("ppl", "bits_per_byte")  # a ratio says more of these than a difference does
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


@dataclass(frozen=True)
class Estimate:
    """A mean over seeds and text, and how sure it is of each.

    Args:
        mean: Over seeds, of each seed's Σ sums / Σ counts.
        seed_variance: Of that mean, from the spread over seeds; nan with one seed.
        text_variance: Of that mean, from the spread over blocks of text; 0 where no blocks are known.
        seeds: How many.
        blocks: How many.
    """

    mean: float
    seed_variance: float
    text_variance: float
    seeds: int
    blocks: int

    @property
    def error(self) -> float:
        """Standard error over both; over text alone with one seed, nan if neither is known."""
        if not math.isfinite(self.mean) or self.seeds == self.blocks == 1:
            return math.nan
        return math.sqrt(np.nansum([self.seed_variance, self.text_variance]))

    @property
    def freedom(self) -> int:
        """Degrees of freedom of `error`: those of the seeds, so that no test is wrong more often than it says,
        whichever of the two variances is the larger; those of the text with one seed."""
        return (self.seeds if self.seeds > 1 else self.blocks) - 1

    def interval(self, level: float = 0.95) -> tuple[float, float]:
        """Confidence interval by Student's t; nan where there is no error."""
        if not self.error >= 0:
            return math.nan, math.nan
        half = stats.t.isf((1 - level) / 2, self.freedom) * self.error
        return self.mean - half, self.mean + half

    def above(self, bound: float = 0.0) -> float:
        """One-sided p-value: small where the mean is above the bound; 1 - p is that of the other side."""
        if not self.error >= 0:
            return math.nan
        distance = self.mean - bound
        if self.error <= 1e-12 * max(abs(self.mean), abs(bound)):  # the same at every seed
            return 0.5 if distance == 0 else float(distance < 0)
        return float(stats.t.sf(distance / self.error, self.freedom))

    def p(self, bound: float = 0.0) -> float:
        """Two-sided p-value of a mean that is the bound."""
        return 2 * min(one := self.above(bound), 1 - one)


def estimate(sums: ArrayLike, counts: ArrayLike) -> Estimate:
    """Mean over seeds of ``Σ sums / Σ counts``, with its variance over seeds and over text.

    Two things could have come out otherwise: the seed of the training and the text of the test. The first is seen in
    the spread over seeds (all were tested on the same blocks), the second in the spread over blocks of the seeds' mean
    (tokens inside a block are far from independent; that of a ratio is linearised). Their sum is the variance of what
    other seeds on other text would give; what varies with both together is in both parts, so it errs to the safe side.

    Args:
        sums: (seeds, blocks) sums over a block; of a difference, ours minus theirs on the same seeds and blocks. One
            block where nothing is known of text.
        counts: (seeds, blocks) what was summed, for instance targets.
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


def flips(differences: ArrayLike) -> float:
    """Two-sided p-value of paired differences by all changes of their signs, without an assumption on their spread but
    symmetry; (seeds,). Its smallest value is 2 / 2^seeds: 0.0625 with five seeds, so it checks a t-test and does not
    replace one."""
    d = np.asarray(differences, dtype=np.float64)
    signs = np.array(list(itertools.product((1, -1), repeat=len(d))))
    means = np.abs((signs * d).mean(1))
    return float((means >= abs(d.mean()) * (1 - 1e-12)).mean())


def against_baseline(results: pd.DataFrame, baseline: str, blocks: pd.DataFrame | None = None) -> pd.DataFrame:
    """Paired two-sided test of every strategy against the baseline, cell by cell, over the seeds both have.

    Perplexities and bits per byte are compared by their logarithm, that is by the mean loss in nats, accuracies as
    they are. Holm's correction is over the strategies of one cell: the family is "who differs from the baseline at
    this length". It is the only correction.

    Args:
        results: Columns strategy, seed, metric, protocol, length, value; one row for each combination.
        baseline: The strategy the others are compared with.
        blocks: Sums by block of the same cells: strategy, seed, metric, protocol, length, block, sum, count. Where they
            are known the test is over seeds and text, else over seeds alone.

    Returns:
        One row for each strategy but the baseline and each cell: ``pairs`` (seeds in common), ``blocks`` (of text; 1
        where none are known), ``difference`` (mean over seeds of ours minus the baseline's, of the logarithm where that
        is compared), ``difference_low`` and ``difference_high`` (its 95% interval over seeds and text; over text alone
        with one seed), ``t``, ``p``,
        ``p_flips`` (from five pairs on) and ``p_holm``. With fewer than two pairs, or where every pair is exactly
        equal, there is no test and t and p are NaN; the same non-zero difference at every seed and block gives p = 0.

    Raises:
        UserError: If the baseline has no results, or a combination occurs twice.
    """
    strategies = list(dict.fromkeys(results["strategy"]))
    if baseline not in strategies:
        raise UserError(f"baseline: got {baseline!r}, expected one of {', '.join(strategies)}")
    _once(results)
    known = {} if blocks is None else dict(iter(blocks.groupby(["strategy", *CELL])))
    rows = []
    for cell, group in results.groupby(CELL, sort=False):
        by_seed = group.pivot(index="seed", columns="strategy", values="value")
        if baseline not in by_seed:
            continue
        for strategy in (s for s in strategies if s != baseline and s in by_seed):
            pairs = by_seed[[strategy, baseline]].dropna()
            sides = [known.get((side, *cell)) for side in (strategy, baseline)]
            rows.append((strategy, *cell, *_paired(*(pairs[side] for side in (strategy, baseline)), *sides, cell[0])))
    names = ["pairs", "blocks", "difference", "difference_low", "difference_high", "t", "p", "p_flips"]
    tests = pd.DataFrame(rows, columns=["strategy", *CELL, *names])
    tests["p_holm"] = tests.groupby(CELL)["p"].transform(holm) if len(tests) else tests["p"]
    return tests


def _paired(
    ours: pd.Series, theirs: pd.Series, our_blocks: pd.DataFrame | None, their_blocks: pd.DataFrame | None, metric: str
) -> tuple[float, ...]:
    if not len(ours):
        return (0, 0, *[math.nan] * 6)
    with np.errstate(divide="ignore", invalid="ignore"):
        d = (np.log(ours / theirs) if metric in LOGARITHMIC else ours - theirs).to_numpy(dtype=np.float64)
    found = estimate(d[:, None], np.ones((len(d), 1)))
    sides = [None if b is None else by_block(b, ours.index) for b in (our_blocks, their_blocks)]
    if metric != "bits_per_byte" and (paired := difference(*sides)) is not None:
        found = paired
    tested = len(d) > 1 and (d != 0).any() and math.isfinite(found.mean)
    t = found.mean / found.error if tested and found.error else math.copysign(math.inf, found.mean)
    p = found.p() if tested else math.nan
    checked = flips(d) if len(d) >= 5 and tested else math.nan
    return len(d), found.blocks, found.mean, *found.interval(), t if tested else math.nan, p, checked


def by_block(blocks: pd.DataFrame, seeds: Iterable[int] | None = None) -> tuple[NDArray, NDArray] | None:
    """Sums and counts of one strategy's cell, (seeds, blocks) each; None if a seed lacks a block."""
    wide = blocks.pivot(index="seed", columns="block", values=["sum", "count"])
    if seeds is not None:
        wide = wide.reindex(list(seeds))
    if wide.isna().any(axis=None):
        return None
    return wide["sum"].to_numpy(), wide["count"].to_numpy()


def difference(ours: tuple[NDArray, NDArray] | None, theirs: tuple[NDArray, NDArray] | None) -> Estimate | None:
    """Mean loss of one minus that of the other on the same seeds and blocks; None where they are not the same."""
    if ours is None or theirs is None or ours[0].shape != theirs[0].shape or (ours[1] != theirs[1]).any():
        return None
    return estimate(ours[0] - theirs[0], ours[1])


def summarise(
    results: pd.DataFrame, baseline: str, alpha: float = 0.05, blocks: pd.DataFrame | None = None
) -> pd.DataFrame:
    """Mean and standard deviation over seeds for every strategy and cell, with the marks a table needs.

    Args:
        results: As for `against_baseline`.
        baseline: The strategy the others are tested against.
        alpha: Level of the corrected test, in (0, 1).
        blocks: As for `against_baseline`.

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

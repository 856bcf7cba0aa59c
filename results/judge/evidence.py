"""What claims are judged by: committed CSVs, read as (seeds × lengths) tables, and answers that may be "cannot
tell"."""

import math
from collections.abc import Iterable
from dataclasses import dataclass, field
from enum import Enum
from pathlib import Path

import numpy as np
import pandas as pd
from scipy import stats

from kerple.report.statistics import holm

ALPHA = 0.05


class Answer(Enum):
    """Whether a statement holds in the numbers."""

    YES = "reproduced"
    NO = "contradicted"
    UNCLEAR = "not resolved"


@dataclass(frozen=True)
class Part:
    """What the numbers say of one part of a claim, as two one-sided p-values.

    Args:
        wrong: p-value under the hypothesis that the statement is false; it is small if the numbers show that it holds.
        right: p-value under the hypothesis that the statement is true; it is small if they show that it does not.
    """

    wrong: float
    right: float

    @property
    def answer(self) -> Answer:
        """By one-sided tests at ALPHA / 2, that is by a 95% interval."""
        if self.wrong < ALPHA / 2:
            return Answer.YES
        return Answer.NO if self.right < ALPHA / 2 else Answer.UNCLEAR


class Untested(LookupError):
    """The numbers a claim needs are not among the results; the message says which."""


@dataclass(frozen=True)
class Evidence:
    """Committed results of comparisons, one folder each.

    Args:
        root: Folder of the comparisons' folders.
        tables: Those read already.
    """

    root: Path
    tables: dict[Path, pd.DataFrame] = field(default_factory=dict, repr=False)

    def table(self, comparison: str, name: str) -> pd.DataFrame:
        """A CSV of a comparison's report.

        Raises:
            Untested: If it is not there.
        """
        path = self.root / comparison / f"{name}.csv"
        if not path.exists():
            raise Untested(f"{comparison}/{name}.csv is not there")
        if path not in self.tables:
            self.tables[path] = pd.read_csv(path)
        return self.tables[path]

    def rows(self, comparison: str, name: str, strategy: str) -> pd.DataFrame:
        """The rows of one strategy, sorted by seed.

        Raises:
            Untested: If there is none.
        """
        table = self.table(comparison, name)
        found = table[table["strategy"] == strategy]
        if found.empty:
            raise Untested(f"no {strategy} in {comparison}/{name}.csv")
        return found.sort_values("seed", kind="stable")

    def values(self, comparison: str, strategy: str, protocol: str = "full", metric: str = "ppl") -> pd.DataFrame:
        """Values of a strategy: seeds down, lengths across.

        Raises:
            Untested: If there is none.
        """
        rows = self.rows(comparison, "results", strategy)
        rows = rows[(rows["protocol"] == protocol) & (rows["metric"] == metric)]
        if rows.empty:
            raise Untested(f"no {metric} of {strategy} by {protocol} in {comparison}/results.csv")
        return rows.pivot(index="seed", columns="length", values="value")


def ratio(ours: pd.Series, theirs: pd.Series) -> pd.Series:
    """Ratio at each seed both have."""
    return (ours / theirs).dropna()


def at_most(ratios: pd.Series, bound: float = 1.0) -> Part:
    """Whether a ratio, over seeds, is at most ``bound``: t-tests of its mean logarithm; nothing with fewer than two
    seeds."""
    logs = np.log(ratios.to_numpy(dtype=np.float64)) - math.log(bound)
    if len(logs) < 2 or not np.isfinite(logs).all():
        return Part(1.0, 1.0)
    error = logs.std(ddof=1) / math.sqrt(len(logs))
    if error < 1e-12:  # the same at every seed
        return Part(0.0, 1.0) if logs.mean() <= 1e-12 else Part(1.0, 0.0)
    t = logs.mean() / error
    return Part(float(stats.t.cdf(t, len(logs) - 1)), float(stats.t.sf(t, len(logs) - 1)))


def above(ratios: pd.Series, bound: float = 1.0) -> Part:
    """Whether a ratio, over seeds, is more than ``bound``; as `at_most`."""
    return at_most(1 / ratios, 1 / bound)


def within(ratios: pd.Series, tolerance: float) -> Part:
    """Whether a ratio is 1 up to a relative tolerance."""
    return every(at_most(ratios, 1 + tolerance), above(ratios, 1 - tolerance))


def every(*parts: Part) -> Part:
    """Whether all parts hold.

    To show that they do, each must be shown. To show that they do not, one is enough, but the more parts there are the
    sooner one looks wrong by chance: Bonferroni's correction.

    Raises:
        Untested: If there is no part: the results have none of the lengths it is about.
    """
    if not parts:
        raise Untested("the results have none of the lengths that it is about")
    return Part(max(part.wrong for part in parts), min(1.0, len(parts) * min(part.right for part in parts)))


def all_seeds(truths: Iterable[bool]) -> Part:
    """Shown if it is so at every seed, shown not to be if at none: by the sign test, so from six seeds on.

    n coins agree on one given side once in 2^n times, five of them more often than a 95% interval may be wrong.
    """
    found = [bool(truth) for truth in truths]
    chance = 0.5 ** len(found)
    return Part(chance if all(found) else 1.0, 1.0 if any(found) else chance)


def significantly_below(ours: pd.DataFrame, theirs: pd.DataFrame) -> Part:
    """Whether (seeds × lengths) values are below others at each length: paired t-tests, Holm's correction over
    lengths."""
    lengths = [length for length in ours.columns if length in theirs.columns]
    pairs = [(ours[length] - theirs[length]).dropna() for length in lengths]
    if not lengths or min(map(len, pairs)) < 2:
        return Part(1.0, 1.0)
    p = holm([stats.ttest_1samp(d, 0).pvalue if d.std() > 0 else float(d.mean() == 0) for d in pairs]) / 2
    lower = [level if d.mean() < 0 else 1.0 for d, level in zip(pairs, p, strict=True)]
    higher = [level if d.mean() > 0 else 1.0 for d, level in zip(pairs, p, strict=True)]
    return Part(float(max(lower)), float(min(higher)))


def growth(values: pd.DataFrame) -> pd.Series:
    """Value at the longest length over that at the shortest, for each seed."""
    return values[values.columns.max()] / values[values.columns.min()]


def percent(ratios: pd.Series) -> str:
    """A ratio as a signed difference in per cent, with its standard deviation over seeds."""
    if not np.isfinite(ratios).all():
        return "∞"
    spread = f" ± {100 * ratios.std():.2g}" if len(ratios) > 1 else ""
    return f"{100 * (ratios.mean() - 1):+.2g}{spread} %" if ratios.mean() < 10 else f"×{ratios.mean():.3g}"

"""`python -m results.judge.error_rates results`: error rates of the statistics on simulated data with a known truth.

Seeds and packages are drawn with replacement from results/main. The truth is the mean over all of them.
To measure false positives, strategies are shifted to equal means before drawing. The four questions of the plan are
answered on comparisons drawn from normal distributions, see `Plan`.
"""

import math
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import ClassVar

import numpy as np
import pandas as pd
from scipy import stats

from kerple.compare.estimates import Estimate, Sums, difference, estimate, logarithm
from kerple.compare.statistics import holm
from results.judge.__main__ import tiers
from results.judge.evidence import Value
from results.judge.questions import FIVE_PERCENT, QUESTIONS, answers
from results.judge.statements import ALPHA, evaluate

TIMES = 1000  # simulated data sets per row
K = 64  # the pilot's runs with this number of scored targets per block are used


Terms = dict[tuple[str, int], float]
"""A linear combination of losses of a strategy: the factor of each protocol and length in training lengths."""


def far(more: str, less: str, times: int, sign: int = 1) -> Terms:
    """Return the difference of two losses of `FarContext` at a length in training lengths."""
    return {(f"far_{more}", times): sign, (f"far_{less}", times): -sign}


GAIN: Terms = {("windowed", 8): 1, ("full", 8): -1}
GROWTH: Terms = {(p, n): s * k for p, s in (("windowed", 1), ("full", -1)) for n, k in ((8, 2), (4, -3), (2, 1))}
# statistic -> the terms of each strategy, and the numbers of seeds that are drawn of each
INTERVALS: dict[str, tuple[dict[str, Terms], list[tuple[int, ...]]]] = {
    "context gain at 8×, KERPLE-log": ({"KerpleLog": GAIN}, [(2,), (3,), (5,), (8,)]),
    "its growth from 4× to 8× (C9)": ({"KerpleLog": GROWTH}, [(3,), (8,)]),
    **{
        f"loss of KERPLE-log minus that of ALiBi at {n}×": (
            {"KerpleLog": {("full", n): 1}, "ALiBi": {("full", n): -1}},
            [(2, 2), (3, 3), (8, 8), (8, 3)],
        )
        for n in (8, 16)
    },
    "gain at 8×, KERPLE-log": ({"KerpleLog": far("none", "own", 8)}, [(8,)]),
    "content at 8×, KERPLE-log": ({"KerpleLog": far("foreign", "own", 8)}, [(8,)]),
    "gain at 16× of KERPLE-log minus that of RNoPE-SWA": (
        {"KerpleLog": far("none", "own", 16), "RNoPE-SWA": far("none", "own", 16, -1)},
        [(8, 8)],
    ),
    "gain at 8× of KERPLE-power minus that of KERPLE-log": (
        {"KerplePower": far("none", "own", 8), "KerpleLog": far("none", "own", 8, -1)},
        [(4, 8)],
    ),
    "own loss of RNoPE-SWA, 16× minus 4×": ({"RNoPE-SWA": {("far_own", 16): 1, ("far_own", 4): -1}}, [(8,)]),
    "disturbance at 16×, RNoPE-SWA": ({"RNoPE-SWA": far("foreign", "none", 16)}, [(8,)]),
    "own loss at 16× of RNoPE-SWA with a temperature minus that without": (
        {"RNoPE-SWA temperature": {("far_own", 16): 1}, "RNoPE-SWA": {("far_own", 16): -1}},
        [(3, 8)],
    ),
}


class ResampledRuns:
    """The runs of main as sums by seed and package, and random samples of them."""

    def __init__(self, root: Path) -> None:
        self.generator = np.random.default_rng(0)
        self.tier = tiers(root)["main"]

    def combination(self, strategy: str, terms: Terms) -> Sums:
        """Return a linear combination of losses of all runs of a strategy."""
        cells = [self.tier.losses(strategy, protocol, 128 * times).blocks for protocol, times in terms]
        return sum(factor * cell[0] for factor, cell in zip(terms.values(), cells, strict=True)), cells[0][1]

    def centred(self, strategy: str, terms: Terms) -> Sums:
        """Return `combination`, shifted to a mean of 0 over all seeds and packages."""
        sums, counts = self.combination(strategy, terms)
        return sums - (sums.sum(1) / counts.sum(1)).mean() * counts, counts

    def samples(self, *populations: tuple[Sums, int]) -> Iterator[list[Sums]]:
        """Yield `TIMES` samples with replacement, each with the same packages of all populations.

        Args:
            *populations: Sums of all seeds, and the number of seeds in a sample.
        """
        number_of_packages = populations[0][0][0].shape[1]
        for _ in range(TIMES):
            packages = self.generator.integers(number_of_packages, size=number_of_packages)
            seeds = [self.generator.integers(len(sums[0]), size=number) for sums, number in populations]
            yield [
                (sums[np.ix_(chosen, packages)], counts[np.ix_(chosen, packages)])
                for ((sums, counts), _), chosen in zip(populations, seeds, strict=True)
            ]


def tails(estimates: list[Estimate], truth: float = 0.0) -> tuple[str, ...]:
    """Format the fraction of intervals above the truth, the fraction below it, and the median width."""
    low, high = np.transpose([estimate.interval() for estimate in estimates])
    return f"{np.mean(low > truth):.1%}", f"{np.mean(high < truth):.1%}", f"{np.median(high - low):.3f}"


def intervals(runs: ResampledRuns) -> Iterator[tuple[str, ...]]:
    """Yield rows (statistic, seeds, fraction of intervals above the truth, fraction below it, median width)."""
    for name, (terms, numbers) in INTERVALS.items():
        for seeds in numbers:
            drawn = zip((runs.centred(*of_strategy) for of_strategy in terms.items()), seeds, strict=True)
            found = [estimate(*sample) for sample in runs.samples(*drawn)]
            yield name, " and ".join(map(str, seeds)), *tails(found)
    ours, theirs = (runs.combination(strategy, {("full", 8): 1.0}) for strategy in ("KerpleLog", "ALiBi"))
    truth = np.subtract(*(np.log(s.sum(1) / c.sum(1)).mean() for s, c in (ours, theirs)))
    found = [difference(logarithm(*a), logarithm(*b)) for a, b in runs.samples((ours, 3), (theirs, 3))]
    yield "bits per byte of KERPLE-log minus those of ALiBi at 8×", "3 and 3", *tails(found, truth)


def decisions(runs: ResampledRuns) -> Iterator[tuple[str, ...]]:
    """Yield rows (wrong decision, seeds, rate)."""
    columns = [runs.centred(strategy, {("full", 8): 1.0}) for strategy in ("KerpleLog", "ALiBi", "RNoPE-SWA")]
    significant = []
    for ours, *others in runs.samples(*((column, 3) for column in columns)):
        significant.append(min(holm([found.p() for other in others if (found := difference(other, ours))])) < ALPHA)
    yield "a † in a column without differences (5%)", "3 each", f"{np.mean(significant):.1%}"
    losses = runs.combination("KerpleLog", {("full", 16): 1})[0].sum(1)
    pairs = [losses[runs.generator.integers(8, size=(2, 8))] for _ in range(TIMES)]
    spreads = [stats.levene(*pair, center="median").pvalue < ALPHA for pair in pairs]
    name = "standard deviations of two samples of the same seeds differ significantly, Brown and Forsythe (5%)"
    yield name, "8 and 8", f"{np.mean(spreads):.1%}"


class Plan:
    """Simulated runs of PLAN.md, with normally distributed effects of seeds and packages on losses, gain and content.

    Effects of seeds have the variances of beyond-128, with windowed less full loss as a proxy of gain and content.
    Effects of packages have the covariance of the pilot's runs. The pilot has no ALiBi and KERPLE-power. Their
    difference from KERPLE-log has the spread over packages of RNoPE-SWA's difference in the pilot, times the ratio of
    both spreads in beyond-128.
    Lengths are 1,024 (8×) and 2,048 (16×).
    """

    trained, samples, packages = 128, "seeds", 10
    # (strategy, protocol, length) -> number of seeds, and the expression whose seed variance in beyond-128 is used
    seeds: ClassVar[dict[tuple[str, str, int], tuple[int, str]]] = {
        ("KerpleLog", "far_none", 1024): (8, "windowed:KerpleLog[8x] / KerpleLog[8x]"),
        ("KerpleLog", "far_foreign", 1024): (8, "windowed:KerpleLog[8x] / KerpleLog[8x]"),
        ("KerpleLog", "far_none", 2048): (8, "windowed:KerpleLog[16x] / KerpleLog[16x]"),
        ("KerpleLog", "full", 2048): (8, "KerpleLog[16x]"),
        ("RNoPE-SWA", "far_none", 2048): (8, "windowed:RNoPE-SWA[16x] / RNoPE-SWA[16x]"),
        ("RNoPE-SWA", "full", 2048): (8, "RNoPE-SWA[16x]"),
        ("ALiBi", "full", 2048): (8, "ALiBi[16x]"),
        ("KerplePower", "far_none", 1024): (4, "windowed:KerplePower[8x] / KerplePower[8x]"),
    }

    def __init__(self, root: Path) -> None:
        self.generator = np.random.default_rng(0)
        tier = tiers(root)["beyond-128"]
        found = {cell: evaluate(number, tier).estimate for cell, (_, number) in self.seeds.items()}
        self.seed_deviation = {cell: math.sqrt(of.seed_variance * of.seeds) for cell, of in found.items()}
        pilot = pd.read_csv(Path(__file__).parent / "pilot.csv").query("k == @K")
        pilot = pilot.assign(far_none=pilot["none"] - pilot["own"], far_foreign=pilot["foreign"] - pilot["own"])
        means = pilot.groupby(["strategy", "length", "group"])[["far_none", "far_foreign", "full"]].mean().unstack()
        measured = {
            (strategy, protocol, length): rows[protocol].to_numpy() - rows[protocol].mean()
            for (strategy, length), rows in means.iterrows()
            for protocol in ("far_none", "far_foreign", "full")
        }
        self.covariance = np.cov([measured[cell] for cell in list(self.seeds)[:6]])
        gain = "windowed:{0}[8x] / {0}[8x] * KerpleLog[8x] / windowed:KerpleLog[8x]"
        whole = "{}[16x] / KerpleLog[16x]"
        self.difference_deviation = []
        for other, number, cell in (("ALiBi", whole, ("full", 2048)), ("KerplePower", gain, ("far_none", 1024))):
            text = [evaluate(number.format(name), tier).estimate.text_variance for name in (other, "RNoPE-SWA")]
            pilots = measured["RNoPE-SWA", *cell] - measured["KerpleLog", *cell]
            self.difference_deviation.append(np.std(pilots, ddof=1) * math.sqrt(text[0] / text[1]))

    def draw(self, truth: Sequence[float]) -> None:
        """Draw all runs.

        Args:
            truth: Means in the order of `seeds`.
        """
        text = self.generator.multivariate_normal(np.zeros(6), self.covariance, self.packages).T
        differences = self.generator.normal(0, np.transpose([self.difference_deviation]), (2, self.packages))
        effects = [*text, text[3] + differences[0], text[0] + differences[1]]  # in the order of `seeds`
        self.values = {
            cell: mean + effect + self.generator.normal(0, self.seed_deviation[cell], (self.seeds[cell][0], 1))
            for cell, mean, effect in zip(self.seeds, truth, effects, strict=True)
        }

    def losses(self, strategy: str, protocol: str, length: int) -> Value:
        """See `Tier.losses`. The loss of *own* is 0, so *none* is the gain and *foreign* the content."""
        own = protocol == "far_own"
        values = self.values[strategy, "far_none" if own else protocol, length] * (not own)
        return Value(pd.Series(values.mean(1)), "", (values, np.ones_like(values)))


def questions(plan: Plan) -> Iterator[tuple[str, ...]]:
    """Yield rows (question, wrongly yes, wrongly no, power of yes, after correction, power of no, effects).

    An effect is the one that a statement of the question detects with 80% power.
    """
    # true means in the order of Plan.seeds; "first": the effect of a question's first statement is 0, others are large
    truths = {
        "first": (0, 1, 0, 0, -1, 0, 0, 0),
        "second": (1, 0, 0, 0, 0, -1, 0, 1),
        "interest": (0.02, 0.02, 0, 0, -0.02, -FIVE_PERCENT, FIVE_PERCENT, 0.04),
        "nothing": (0,) * 8,
    }
    rates, resolvable = {}, {}
    for name, truth in truths.items():
        for _ in range(TIMES):
            plan.draw(truth)
            for question, of in answers(plan).items():
                row = (of.p < ALPHA / 2, of.below < ALPHA / 2, of.answer == "yes")
                rates.setdefault((question, name), []).append(row)
                resolvable.setdefault(question, []).append([part.number.estimate.detectable() for part in of.parts])
    for question in QUESTIONS:
        of = {name: np.mean(rates[question, name], 0) for name in truths}
        wrong = max(of["first"][0], of["second"][0])
        shown = wrong, of["interest"][1], of["interest"][0], of["interest"][2], of["nothing"][1]
        effects = " and ".join(f"{effect:.3f}" for effect in np.median(resolvable[question], 0))
        yield question, *(f"{rate:.1%}" for rate in shown), effects


def page(root: Path) -> str:
    """Return the content of ERRORS.md."""
    runs = ResampledRuns(root)
    tables = {"intervals": intervals(runs), "decisions": decisions(runs), "questions": questions(Plan(root))}
    rows = {name: "\n".join(f"| {' | '.join(row)} |" for row in table) for name, table in tables.items()}
    return (Path(__file__).parent / "errors.md").read_text().format(times=f"{TIMES:,}", **rows)


if __name__ == "__main__":
    (Path(sys.argv[1]) / "ERRORS.md").write_text(page(Path(sys.argv[1])))

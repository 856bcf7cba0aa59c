"""`python -m results.judge.error_rates results`: error rates of the statistics on simulated data with a known truth.

Seeds and test files are drawn with replacement from results/earlier/beyond-128. The truth is the mean over all of them.
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


class ResampledRuns:
    """The runs of beyond-128 as sums by seed and file, and random samples of them."""

    def __init__(self, root: Path) -> None:
        self.generator = np.random.default_rng(0)
        tier = tiers(root)["beyond-128"]
        self.sums = {
            (strategy, protocol, times): tier.losses(strategy, protocol, 128 * times).blocks
            for strategy in ("KerpleLog", "ALiBi", "T5")
            for protocol in ("full", "windowed")
            for times in (2, 4, 8, 16)
        }
        self.counts = self.sums["ALiBi", "full", 8][1][0]

    def combination(self, strategy: str, terms: dict[tuple[str, int], float]) -> Sums:
        """Return a linear combination of losses, such as windowed less full, of all runs of a strategy.

        ``terms`` has the factor of each (protocol, length in training lengths).
        """
        sums = sum(factor * self.sums[strategy, *key][0] for key, factor in terms.items())
        return sums, np.broadcast_to(self.counts, sums.shape)

    def centred(self, strategy: str, terms: dict[tuple[str, int], float]) -> Sums:
        """Return `combination`, shifted to a mean of 0 over all seeds and files."""
        sums, counts = self.combination(strategy, terms)
        return sums - (sums.sum(1) / counts.sum(1)).mean() * counts, counts

    def samples(self, *populations: tuple[Sums, int]) -> Iterator[list[Sums]]:
        """Yield `TIMES` samples with replacement, each with the same files of all populations.

        Args:
            *populations: Sums of all seeds, and the number of seeds in a sample.
        """
        for _ in range(TIMES):
            files = self.generator.integers(len(self.counts), size=len(self.counts))
            seeds = [self.generator.integers(len(sums[0]), size=number) for sums, number in populations]
            yield [
                (sums[np.ix_(chosen, files)], counts[np.ix_(chosen, files)])
                for ((sums, counts), _), chosen in zip(populations, seeds, strict=True)
            ]


def tails(estimates: list[Estimate], truth: float = 0.0) -> tuple[str, ...]:
    """Format the fraction of intervals above the truth, the fraction below it, and the median width."""
    low, high = np.transpose([estimate.interval() for estimate in estimates])
    return f"{np.mean(low > truth):.1%}", f"{np.mean(high < truth):.1%}", f"{np.median(high - low):.3f}"


def intervals(runs: ResampledRuns) -> Iterator[tuple[str, ...]]:
    """Yield rows (statistic, seeds, fraction of intervals above the truth, fraction below it, median width)."""
    gain = {("windowed", 8): 1.0, ("full", 8): -1.0}
    step = {(name, n): sign * k for name, sign in (("windowed", 1), ("full", -1)) for n, k in ((8, 2), (4, -3), (2, 1))}
    for seeds in (2, 3, 5, 8):
        samples = runs.samples((runs.centred("KerpleLog", gain), seeds))
        yield "context gain at 8×, KERPLE-log", str(seeds), *tails([estimate(s) for (s,) in samples])
    for seeds in (3, 8):
        samples = runs.samples((runs.centred("KerpleLog", step), seeds))
        yield "its growth from 4× to 8× (C9)", str(seeds), *tails([estimate(s) for (s,) in samples])
    for times in (8, 16):
        ours, theirs = (runs.centred(strategy, {("full", times): 1.0}) for strategy in ("KerpleLog", "ALiBi"))
        for seeds in ((2, 2), (3, 3), (8, 8), (8, 3)):
            samples = runs.samples((ours, seeds[0]), (theirs, seeds[1]))
            found = [difference(*pair) for pair in samples]
            yield f"loss of KERPLE-log minus that of ALiBi at {times}×", f"{seeds[0]} and {seeds[1]}", *tails(found)
    ours, theirs = (runs.combination(strategy, {("full", 8): 1.0}) for strategy in ("KerpleLog", "ALiBi"))
    truth = np.subtract(*(np.log(s.sum(1) / c.sum(1)).mean() for s, c in (ours, theirs)))
    found = [difference(logarithm(*a), logarithm(*b)) for a, b in runs.samples((ours, 3), (theirs, 3))]
    yield "bits per byte of KERPLE-log minus those of ALiBi at 8×", "3 and 3", *tails(found, truth)


def decisions(runs: ResampledRuns) -> Iterator[tuple[str, ...]]:
    """Yield rows (wrong decision, seeds, rate)."""
    columns = [runs.centred(strategy, {("full", 8): 1.0}) for strategy in ("KerpleLog", "ALiBi", "T5")]
    significant = []
    for ours, *others in runs.samples(*((column, 3) for column in columns)):
        significant.append(min(holm([found.p() for other in others if (found := difference(other, ours))])) < ALPHA)
    yield "a † in a column without differences (5%)", "3 each", f"{np.mean(significant):.1%}"
    losses = runs.sums["KerpleLog", "full", 16][0].sum(1)
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

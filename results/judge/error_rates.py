"""`python -m results.judge.error_rates results`: how often the statistics err, on draws from the committed runs.

A draw takes seeds, and test files, with replacement from those of results/beyond-128, where the truth is the mean of
all of them. A statistic whose 95% interval leaves the truth out in 5% of 1,000 draws does what it says. Strategies are
shifted to equal means first, where it is asked how often they are told apart although they do not differ.
"""

import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
from scipy import stats

from kerple.compare.statistics import Estimate, Sums, difference, estimate, holm, logarithm
from results.judge.__main__ import tiers
from results.judge.evidence import angle
from results.judge.statements import ALPHA, Number, Part, verdict

TIMES = 1000
Interval = Callable[[Estimate], tuple[float, float]]


def seeds_alone(ours: Sums, theirs: Sums | None = None) -> Estimate:
    """As statistics without text are made, paired by seed: Student's t over one number a seed."""
    sums = ours[0] if theirs is None else (ours[0] - theirs[0][: len(ours[0])])
    return estimate(((sums.sum(1) / ours[1].sum(1))[:, None], np.ones((len(sums), 1))))


def paired(ours: Sums, theirs: Sums) -> Estimate:
    """The differences of seeds that both have, over seeds and text."""
    both = min(len(ours[0]), len(theirs[0]))
    return estimate((ours[0][:both] - theirs[0][:both], ours[1][:both]))


def before(estimate: Estimate) -> tuple[float, float]:
    """The interval of the edition before: degrees of freedom of the seeds, with one seed of the blocks."""
    half = stats.t.isf(ALPHA / 2, (estimate.seeds if estimate.seeds > 1 else estimate.blocks) - 1) * estimate.error
    return estimate.mean - half, estimate.mean + half


class Runs:
    """The runs of beyond-128 as sums by seed and file, and draws from them."""

    def __init__(self, root: Path) -> None:
        self.generator, tier = np.random.default_rng(0), tiers(root)["beyond-128"]
        self.sums = {
            (strategy, protocol, times): tier.losses(strategy, protocol, 128 * times).blocks
            for strategy in ("KerpleLog", "ALiBi", "T5")
            for protocol in ("full", "windowed")
            for times in (2, 4, 8, 16)
        }
        self.counts = self.sums["ALiBi", "full", 8][1][0]

    def all(self, strategy: str, terms: dict[tuple[str, int], float]) -> Sums:
        """A sum of a strategy's losses, such as windowed less full at 8 times the training length."""
        sums = sum(factor * self.sums[strategy, *key][0] for key, factor in terms.items())
        return sums, np.broadcast_to(self.counts, sums.shape)

    def centred(self, sums: Sums) -> Sums:
        """The same with a mean of 0 over all seeds and files."""
        return sums[0] - (sums[0].sum(1) / sums[1].sum(1)).mean() * sums[1], sums[1]

    def draws(self, *of: tuple[Sums, int]) -> Iterator[list[Sums]]:
        """`TIMES` draws: this number of seeds of each, the same files for all."""
        for _ in range(TIMES):
            files = self.generator.integers(len(self.counts), size=len(self.counts))
            rows = [self.generator.integers(len(sums[0]), size=seeds) for sums, seeds in of]
            yield [(s[np.ix_(r, files)], c[np.ix_(r, files)]) for ((s, c), _), r in zip(of, rows, strict=True)]


def left_out(intervals: list[tuple[float, float]]) -> str:
    """How many of some intervals leave 0 out, and how wide they are in the median."""
    ends = np.asarray(intervals)
    return f"{np.mean((ends[:, 0] > 0) | (ends[:, 1] < 0)):.1%}, {np.median(ends[:, 1] - ends[:, 0]):.3f} wide"


def compared(*estimates: tuple[list[Estimate], Interval]) -> list[str]:
    return [left_out([interval(estimate) for estimate in of]) for of, interval in estimates]


def intervals(runs: Runs) -> Iterator[tuple[str, ...]]:
    """Rows (statistic, draws, before, now) of how often intervals leave the truth out."""
    gain = {("windowed", 8): 1.0, ("full", 8): -1.0}
    step = {(name, n): sign * k for name, sign in (("windowed", 1), ("full", -1)) for n, k in ((8, 2), (4, -3), (2, 1))}
    for seeds in (1, 2, 3, 5, 8):
        drawn = [estimate(s) for (s,) in runs.draws((runs.centred(runs.all("KerpleLog", gain)), seeds))]
        yield "context gain at 8×, KERPLE-log", str(seeds), *compared((drawn, before), (drawn, Estimate.interval))
    for seeds in (3, 8):
        drawn = [s for (s,) in runs.draws((runs.centred(runs.all("KerpleLog", step)), seeds))]
        old, new = [seeds_alone(s) for s in drawn], [estimate(s) for s in drawn]
        yield "its growth from 4× to 8× (C9)", str(seeds), *compared((old, before), (new, Estimate.interval))
    ours, theirs = (runs.all(strategy, {("full", 8): 1.0}) for strategy in ("KerpleLog", "ALiBi"))
    shift = (theirs[0].sum(1) / theirs[1].sum(1)).mean() - (ours[0].sum(1) / ours[1].sum(1)).mean()
    ours = (ours[0] + shift * ours[1], ours[1])
    for seeds in ((2, 2), (3, 3), (8, 8), (8, 3)):
        drawn = list(runs.draws((ours, seeds[0]), (theirs, seeds[1])))
        old, new = [paired(*pair) for pair in drawn], [difference(*pair) for pair in drawn]
        number = f"{seeds[0]} and {seeds[1]}"
        yield "KERPLE-log and ALiBi at 8×", number, *compared((old, before), (new, Estimate.interval))
    drawn = list(runs.draws((ours, 3), (theirs, 3)))
    logs = [(logarithm(*a), logarithm(*b)) for a, b in drawn]
    truth = np.mean([np.log(s[0].sum(1) / s[1].sum(1)).mean() * (-1) ** i for i, s in enumerate((ours, theirs))]) * 2
    old, new = [seeds_alone(*pair) for pair in logs], [difference(*pair) for pair in logs]
    of_truth = [lambda e, i=i: tuple(end - truth for end in i(e)) for i in (before, Estimate.interval)]
    yield "their bits per byte", "3 and 3", *compared((old, of_truth[0]), (new, of_truth[1]))


def decisions(runs: Runs) -> Iterator[tuple[str, ...]]:
    """Rows (statistic, draws, before, now) of how often a mark or a verdict is wrong."""
    columns = [runs.centred(runs.all(strategy, {("full", 8): 1.0})) for strategy in ("KerpleLog", "ALiBi", "T5")]
    marked = np.zeros((TIMES, 2))
    for i, (ours, *others) in enumerate(runs.draws(*((column, 3) for column in columns))):
        old = [2 * stats.t.sf(abs(e.mean / e.error), 2) for e in (paired(other, ours) for other in others)]
        new = [found.p() for other in others if (found := difference(other, ours))]
        marked[i] = [min(holm(p)) < ALPHA for p in (old, new)]
    yield "a † in a column in which nobody differs", "3 each", *(f"{share:.1%}" for share in marked.mean(0))
    gains = [runs.centred(runs.all("KerpleLog", {("windowed", n): 1.0, ("full", n): -1.0})) for n in (2, 4, 8, 16)]
    answers = np.zeros((TIMES, 2))
    for i, drawn in enumerate(_together(runs, gains, 3)):
        edge = [Part("", Number(estimate(s)), 0.0, True) for s in drawn]
        beyond = [Part("", Number(estimate((s + 0.5 * c, c))), 0.0, True) for s, c in drawn[1:]]
        answers[i] = verdict(edge) == "contradicted", verdict([edge[0], *beyond]) == "reproduced"
    yield "a claim on its edge at four lengths contradicted (2.5%)", "3", "–", f"{answers[:, 0].mean():.1%}"
    yield "a claim that one of four lengths has on its edge reproduced (2.5%)", "3", "–", f"{answers[:, 1].mean():.1%}"
    real = runs.all("KerpleLog", {("windowed", 8): 1.0, ("full", 8): -1.0})
    p = [[estimate(s).p() for (s,) in runs.draws((of, 3))] for of in (runs.centred(real), real)]
    families = np.concatenate([np.reshape(half, (-1, 10)) for half in p], 1)  # ten of nothing, ten of the real gain
    shares = []
    for family in families:
        told = [family < ALPHA, stats.false_discovery_control(family) < ALPHA]
        shares.append([of[:10].sum() / max(1, of.sum()) for of in told])
    yield "wrong ones among 20 told apart, of which 10 are nothing", "3", *(f"{s:.1%}" for s in np.mean(shares, 0))


def _together(runs: Runs, of: list[Sums], seeds: int) -> Iterator[list[Sums]]:
    """Draws of the same seeds and files of several numbers of the same runs."""
    together = np.concatenate([s for s, _ in of], 1), np.concatenate([c for _, c in of], 1)
    files = len(runs.counts)
    for _ in range(TIMES):
        rows, columns = (runs.generator.integers(n, size=k) for n, k in ((len(of[0][0]), seeds), (files, files)))
        at = [np.ix_(rows, columns + i * files) for i in range(len(of))]
        yield [(together[0][where], together[1][where]) for where in at]


def shares(root: Path, runs: Runs) -> tuple[str, ...]:
    """The row of intervals of a share of exact answers: of those of addition at 15 digits, by five seeds."""
    results = tiers(root)["addition"].runs.results.query("strategy == 'Coupled' and length == 15")
    values, found = results["value"].to_numpy(), []
    for _ in range(TIMES):
        drawn = values[runs.generator.integers(len(values), size=len(values))]
        found.append([stats.ttest_1samp(of, 0).confidence_interval() for of in (drawn, angle(drawn))])
    outside = [np.mean([ends[0].high > 1 for ends in found]), 0]  # the sine of an angle is not above 1
    return "an interval of a share that leaves 0 to 1", "5", *(f"{share:.1%}" for share in outside)


def page(root: Path) -> str:
    """ERRORS.md."""
    runs = Runs(root)
    rows = [*intervals(runs), *decisions(runs), shares(root, runs)]
    text = (Path(__file__).parent / "errors.md").read_text()
    return text + "\n".join(f"| {' | '.join(row)} |" for row in rows) + "\n"


if __name__ == "__main__":
    (Path(sys.argv[1]) / "ERRORS.md").write_text(page(Path(sys.argv[1])))

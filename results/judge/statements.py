"""Statements such as ``KerpleLog[n] / ALiBi[n] < 1 for n > 1x``: what they say of a tier's numbers, and how surely."""

import math
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
from scipy import special, stats

from kerple.compare.statistics import Estimate, estimate
from results.judge.evidence import LINEAR, MEASURES, Tier, Untested, Value

ALPHA = 0.05
POWER = 0.8
MOST_SEEDS = 1000
STATEMENT = re.compile(
    r"(?P<left>.+?) (?P<relation><=|>=|<|>|=) (?P<bound>\S+)(?: ± (?P<width>\S+))?(?: for (?P<run>.+))?"
)
TERM = re.compile(r"(?P<sign>[-+*/])? ?(?:(?P<measure>[^:\[\]*/+]+):)?(?P<strategy>[^\[\]]+?)\[(?P<key>[^\]]*)\] ?")


@dataclass(frozen=True)
class Part:
    """One comparison of a number with a bound.

    Args:
        at: The length it is about, empty if only one.
        found: The number over seeds and text; a logarithm unless ``linear``.
        bound: What it is compared with, on the same scale.
        least: Whether the claim is that it is at least the bound; else, at most.
        linear: Whether it is no logarithm.
        shown: The files that have it.
        strict: Whether the bound itself is outside of what the claim allows.
    """

    at: str
    found: Estimate
    bound: float
    least: bool
    linear: bool
    shown: tuple[str, ...]
    strict: bool = False

    @property
    def chances(self) -> tuple[float, float]:
        """One-sided p-values: small where the number shows that the part holds; small where it shows that it does not.

        One seed shows neither: what others would give is not known.
        """
        if self.found.seeds < 2 or not math.isfinite(self.found.mean):
            return 1.0, 1.0
        if self.found.error < 1e-12 and abs(self.found.mean - self.bound) < 1e-12:
            return (1.0, 0.0) if self.strict else (0.0, 1.0)  # the same at every seed, and on the bound
        above = self.found.above(self.bound)
        return (above, 1 - above) if self.least else (1 - above, above)

    @property
    def shows(self) -> bool:
        """Whether it is shown to hold."""
        return self.chances[0] < ALPHA / 2

    @property
    def agrees(self) -> bool:
        """Whether the mean is on the claim's side."""
        return (self.found.mean >= self.bound) == self.least

    def effect(self, seeds: int, among: int = 1) -> float:
        """Smallest distance from the bound that so many seeds show, four times in five; a logarithm unless ``linear``.

        Args:
            seeds: Number of seeds.
            among: Number of parts for which the test is corrected.
        """
        freedom = seeds - 1
        # the noncentrality at which the test's statistic is above its critical value that often
        standard_errors = special.nctdtrinc(freedom, 1 - POWER, stats.t.isf(ALPHA / 2 / among, freedom))
        spread = self.found.seed_variance * self.found.seeds
        return float(standard_errors * math.sqrt(spread / seeds + self.found.text_variance))

    def needed(self, among: int = 1) -> int | None:
        """Seeds it would take to show a distance as large as was found; None where no number of them would."""
        distance = abs(self.found.mean - self.bound)
        return next((n for n in range(2, MOST_SEEDS + 1) if self.effect(n, among) <= distance), None)

    def text(self, value: float) -> str:
        """A value on the part's scale, as a reader wants it: a signed percentage, a factor, or the number."""
        if self.linear:
            return f"{value:.3g}"
        return f"{100 * math.expm1(value):+.2f}%" if abs(value) < 1 else f"×{math.exp(value):.3g}"

    def __str__(self) -> str:
        low, high = self.found.interval()
        interval = f" [{self.text(low)}, {self.text(high)}]" if math.isfinite(low) else ""
        return f"{self.at} {self.text(self.found.mean)}{interval}".strip()


def verdict(found: Sequence[Part]) -> str:
    """What the parts of a claim come to together.

    To show that all hold, each must be shown. To show that they do not, one is enough, but the more parts there are the
    sooner one looks wrong by chance: Bonferroni's correction, the only one.
    """
    if all(part.shows for part in found):
        return "reproduced"
    return "contradicted" if refuting(found) else "not resolved"


def refuting(found: Sequence[Part]) -> list[Part]:
    """The parts of a claim that are shown not to hold."""
    return [part for part in found if len(found) * part.chances[1] < ALPHA / 2]


def parts(statement: str, tier: Tier, tie: float) -> list[Part]:
    """What a statement says, one comparison for each length and bound.

    Raises:
        Untested: If a number is not there.
        ValueError: If it is no statement.
    """
    match = STATEMENT.fullmatch(statement)
    if match is None:
        raise ValueError(f"claims: got {statement!r}, expected a statement such as 'A[1x] / B[1x] <= 1.005'")
    found, strict = [], match["relation"] in ("<", ">")
    runs = list(_run(match["run"], tier)) if match["run"] else [""]
    if not runs:
        raise Untested(f"the results have no length {match['run'].removeprefix('for ')}")
    for n in runs:
        value, linear, shown = _combined(match["left"], n, tier)
        bound = tie if match["bound"] == "tie" else float(match["bound"])
        sides = [(match["relation"].startswith(">"), bound)]
        if match["width"]:
            sides = [(False, bound + float(match["width"])), (True, bound - float(match["width"]))]
        at = f"{n // tier.trained}×" if n else ""
        found += [Part(at, value, b if linear else math.log(b), least, linear, shown, strict) for least, b in sides]
    return found


def _run(condition: str, tier: Tier) -> Iterator[int]:
    if condition == "all n":
        yield from tier.lengths
        return
    _, relation, bound = condition.split(" ")
    least = tier.trained * int(bound[:-1]) if bound.endswith("x") else int(bound)
    yield from (n for n in tier.lengths if n > least or (n == least and relation == ">="))


def _combined(expression: str, n: int | str, tier: Tier) -> tuple[Estimate, bool, tuple[str, ...]]:
    """The terms of an expression, added or multiplied, by the seeds that all of them have."""
    values: list[tuple[int, Value]] = []
    linear, position = False, 0
    while position < len(expression):
        term = TERM.match(expression, position)
        if term is None:
            raise ValueError(f"claims: got {expression[position:]!r}, expected terms such as A[1x]")
        position, measure = term.end(), (term["measure"] or "full").strip()
        linear |= measure in LINEAR
        key = str(n) if term["key"] == "n" else term["key"]
        values.append((-1 if term["sign"] in ("-", "/") else 1, MEASURES[measure](tier, term["strategy"].strip(), key)))
    seeds = sorted(set.intersection(*(set(value.of_seed.index) for _, value in values)))
    if not seeds:
        raise Untested(f"no seed is common to {expression}")
    shown = tuple(dict.fromkeys(value.shown for _, value in values))
    whole = [
        tuple(side[value.of_seed.index.get_indexer(seeds)] for side in value.blocks)
        for _, value in values
        if value.blocks is not None
    ]
    if len(whole) == len(values) and all(np.array_equal(counts, whole[0][1]) for _, counts in whole):
        sums = sum(sign * blocks[0] for (sign, _), blocks in zip(values, whole, strict=True))
        return estimate(sums, whole[0][1]), linear, shown
    total = sum(sign * value.of_seed.loc[seeds].to_numpy(dtype=np.float64) for sign, value in values)
    return estimate(total[:, None], np.ones((len(seeds), 1))), linear, shown

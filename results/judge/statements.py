"""Statements such as ``KerpleLog[n] / ALiBi[n] < 1 for n > 1x``: what they say of a tier's numbers, and how surely."""

import math
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from kerple.compare.statistics import Estimate, estimate
from results.judge.evidence import MEASURES, SHARES, Tier, Untested, Value, angle

ALPHA = 0.05
STATEMENT = re.compile(
    r"(?P<left>.+?) (?P<relation><=|>=|<|>|=) (?P<bound>\S+)(?: ± (?P<width>\S+))?(?: for (?P<run>.+))?"
)
TERM = re.compile(r"(?P<sign>[-+*/])? ?(?:(?P<measure>[^:\[\]*/+]+):)?(?P<strategy>[^\[\]]+?)\[(?P<key>[^\]]*)\] ?")


@dataclass(frozen=True)
class Number:
    """A number over seeds and text.

    Args:
        estimate: A logarithm, or an angle where ``share``.
        share: Whether it is the angle of a share, or a difference of two.
        terms: Of how many terms it is made.
        shown: The files that have it.
    """

    estimate: Estimate
    share: bool = False
    terms: int = 2
    shown: tuple[str, ...] = ()

    def text(self, value: float) -> str:
        """A value as a reader wants it: a signed percentage, a factor, a share, or the difference of two angles."""
        if self.share:
            shown = math.sin(min(max(value, 0), math.pi / 2)) ** 2 if self.terms == 1 else value
            return f"{shown:.3g}"
        return f"{100 * math.expm1(value):+.2f}%" if abs(value) < 1 else f"×{math.exp(min(value, 99)):.3g}"

    def __str__(self) -> str:
        low, high = self.estimate.interval()
        interval = f" [{self.text(low)}, {self.text(high)}]" if math.isfinite(low) else ""
        return f"{self.text(self.estimate.mean)}{interval}"


@dataclass(frozen=True)
class Part:
    """One comparison of a number with a bound.

    Args:
        at: The length it is about, empty if only one.
        number: The number.
        bound: What it is compared with, on the same scale.
        least: Whether the claim is that it is at least the bound; else, at most.
        strict: Whether the bound itself is outside of what the claim allows.
    """

    at: str
    number: Number
    bound: float
    least: bool
    strict: bool = False

    @property
    def chances(self) -> tuple[float, float]:
        """One-sided p-values: small where the number shows that the part holds; small where it shows that it does not.

        One seed shows neither: what others would give is not known.
        """
        estimate = self.number.estimate
        if estimate.seeds < 2 or not math.isfinite(estimate.mean):
            return 1.0, 1.0
        if estimate.error < 1e-12 and abs(estimate.mean - self.bound) < 1e-12:
            return (1.0, 0.0) if self.strict else (0.0, 1.0)  # the same at every seed, and on the bound
        above = estimate.above(self.bound)
        return (above, 1 - above) if self.least else (1 - above, above)

    def __str__(self) -> str:
        return f"{self.at} {self.number}".strip()


def chances(claim: Sequence[Part]) -> tuple[float, float]:
    """One-sided p-values of a claim: that all of its parts hold, and that one does not.

    To show that all hold, each must be shown. To show that they do not, one is enough, but the more parts there are the
    sooner one looks wrong by chance: Bonferroni's correction.
    """
    return max(part.chances[0] for part in claim), min(1.0, len(claim) * min(part.chances[1] for part in claim))


def verdict(claim: Sequence[Part]) -> str:
    """What the parts of a claim come to together."""
    holds, fails = chances(claim)
    return "reproduced" if holds < ALPHA / 2 else "contradicted" if fails < ALPHA / 2 else "not resolved"


def parts(statement: str, tier: Tier, tie: float) -> list[Part]:
    """What a statement says, one comparison for each length and bound.

    Raises:
        Untested: If a number is not there.
        ValueError: If it is no statement.
    """
    match = STATEMENT.fullmatch(statement)
    if match is None:
        raise ValueError(f"claims: got {statement!r}, expected a statement such as 'A[1x] / B[1x] <= 1.005'")
    comparisons, strict = [], match["relation"] in ("<", ">")
    runs = list(_run(match["run"], tier)) if match["run"] else [""]
    if not runs:
        raise Untested(f"the results have no length {match['run'].removeprefix('for ')}")
    for n in runs:
        number = combined(match["left"], tier, n)
        bound = tie if match["bound"] == "tie" else float(match["bound"])
        sides = [(match["relation"].startswith(">"), bound)]
        if match["width"]:
            sides = [(False, bound + float(match["width"])), (True, bound - float(match["width"]))]
        at = f"{n // tier.trained}×" if n else ""
        comparisons += [Part(at, number, _on_scale(number, b), least, strict) for least, b in sides]
    return comparisons


def _on_scale(number: Number, bound: float) -> float:
    if not number.share:
        return math.log(bound)
    return float(angle(bound)) if number.terms == 1 else bound


def _run(condition: str, tier: Tier) -> Iterator[int]:
    if condition == "all n":
        yield from tier.lengths
        return
    _, relation, bound = condition.split(" ")
    least = tier.trained * int(bound[:-1]) if bound.endswith("x") else int(bound)
    yield from (n for n in tier.lengths if n > least or (n == least and relation == ">="))


def combined(expression: str, tier: Tier, n: int | str = "") -> Number:
    """The terms of an expression, added or multiplied: those of one strategy by seed, those of several by Welch's test.

    Rounds of timing are paired, because the machine is the same for all strategies of a round.

    Raises:
        Untested: If a number is not there.
        ValueError: If it is no expression.
    """
    values: dict[str, list[tuple[int, Value]]] = {}
    share, position = False, 0
    while position < len(expression):
        term = TERM.match(expression, position)
        if term is None:
            raise ValueError(f"claims: got {expression[position:]!r}, expected terms such as A[1x]")
        position, measure, strategy = term.end(), (term["measure"] or "full").strip(), term["strategy"].strip()
        share |= measure in SHARES
        key = str(n) if term["key"] == "n" else term["key"]
        sign = -1 if term["sign"] in ("-", "/") else 1
        values.setdefault("" if tier.samples == "rounds" else strategy, []).append(
            (sign, MEASURES[measure](tier, strategy, key))
        )
    of_all = [value for of_strategy in values.values() for _, value in of_strategy]
    shown = tuple(dict.fromkeys(value.shown for value in of_all))
    counts = [None if value.blocks is None else value.blocks[1][0] for value in of_all]
    with_text = all(c is not None and np.array_equal(c, counts[0]) for c in counts)
    sums = [_of_strategy(terms, with_text) for terms in values.values()]
    return Number(estimate(*sums), share, len(of_all), shown)


def _of_strategy(terms: list[tuple[int, Value]], with_text: bool) -> tuple[np.ndarray, np.ndarray]:
    """The terms of one strategy, by the seeds that all of them have: sums and counts, (seeds, blocks) each."""
    seeds = sorted(set.intersection(*(set(value.of_seed.index) for _, value in terms)))
    total, counts = 0, np.ones((len(seeds), 1))
    for sign, value in terms:
        if with_text and value.blocks is not None:
            at = value.of_seed.index.get_indexer(seeds)
            total, counts = total + sign * value.blocks[0][at], value.blocks[1][at]
        else:
            total = total + sign * value.of_seed.loc[seeds].to_numpy(dtype=np.float64)[:, None]
    return np.asarray(total, dtype=np.float64), counts

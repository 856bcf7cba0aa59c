"""Tests of statements such as ``KerpleLog[n] / ALiBi[n] < 1 for n > 1x`` on the results of a tier."""

import math
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from kerple.compare.estimates import Estimate, estimate
from results.judge.evidence import FRACTIONS, MEASURES, Tier, Untested, Value, angle

ALPHA = 0.05
STATEMENT = re.compile(
    r"(?P<left>.+?) (?P<relation><=|>=|<|>|=) (?P<bound>\S+)(?: ± (?P<width>\S+))?(?: for (?P<run>.+))?"
)
TERM = re.compile(r"(?P<sign>[-+*/])? ?(?:(?P<measure>[^:\[\]*/+]+):)?(?P<strategy>[^\[\]]+?)\[(?P<key>[^\]]*)\] ?")


@dataclass(frozen=True)
class Number:
    """A combination of measured values.

    Args:
        estimate: Its mean and error over seeds and text, as a logarithm or an angle.
        is_angle: Whether it is the angle of a fraction, or a difference of two.
        terms: Number of terms.
        shown: Pages that show the values.
    """

    estimate: Estimate
    is_angle: bool = False
    terms: int = 2
    shown: tuple[str, ...] = ()

    def text(self, value: float) -> str:
        """A value as a signed percentage, a factor, a fraction, or the difference of two angles."""
        if self.is_angle:
            shown = math.sin(min(max(value, 0), math.pi / 2)) ** 2 if self.terms == 1 else value
            return f"{shown:.3g}"
        return f"{100 * math.expm1(value):+.2f}%" if abs(value) < 1 else f"×{math.exp(min(value, 99)):.3g}"

    def __str__(self) -> str:
        low, high = self.estimate.interval()
        interval = f" [{self.text(low)}, {self.text(high)}]" if math.isfinite(low) else ""
        return f"{self.text(self.estimate.mean)}{interval}"


@dataclass(frozen=True)
class Part:
    """A comparison of a number with a bound.

    Args:
        at: The length, or empty if the statement has no ``for``.
        number: The number.
        bound: The bound, on the same scale.
        least: Whether the bound is a lower bound; else, an upper bound.
        strict: Whether the bound itself violates the statement.
    """

    at: str
    number: Number
    bound: float
    least: bool
    strict: bool = False

    @property
    def chances(self) -> tuple[float, float]:
        """One-sided p-values of "the part holds" and of "it does not hold". With one seed both are 1."""
        estimate = self.number.estimate
        if estimate.seeds < 2 or not math.isfinite(estimate.mean):
            return 1.0, 1.0
        if estimate.error < 1e-12 and abs(estimate.mean - self.bound) < 1e-12:
            return (1.0, 0.0) if self.strict else (0.0, 1.0)  # equal to the bound for every seed
        above = estimate.above(self.bound)
        return (above, 1 - above) if self.least else (1 - above, above)

    def __str__(self) -> str:
        return f"{self.at} {self.number}".strip()


def chances(claim: Sequence[Part]) -> tuple[float, float]:
    """One-sided p-values of "all parts hold" and of "at least one part does not hold".

    The first is the largest p-value of the parts. The second is the smallest, with Bonferroni's correction.
    """
    return max(part.chances[0] for part in claim), min(1.0, len(claim) * min(part.chances[1] for part in claim))


def verdict(claim: Sequence[Part]) -> str:
    """The verdict on a claim by its parts."""
    holds, fails = chances(claim)
    return "reproduced" if holds < ALPHA / 2 else "contradicted" if fails < ALPHA / 2 else "not resolved"


def parts(statement: str, tier: Tier, tie: float) -> list[Part]:
    """The parts of a statement, one for each length and bound.

    Raises:
        Untested: If the results do not contain a number.
        ValueError: If the statement cannot be parsed.
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
    if not number.is_angle:
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
    """Evaluate an expression: terms of one strategy are paired by seed, those of several are compared by Welch's test.

    Rounds of timing are paired, because all strategies of a round were timed on the same machine.

    Raises:
        Untested: If the results do not contain a number.
        ValueError: If the expression cannot be parsed.
    """
    values: dict[str, list[tuple[int, Value]]] = {}
    is_angle, position = False, 0
    while position < len(expression):
        term = TERM.match(expression, position)
        if term is None:
            raise ValueError(f"claims: got {expression[position:]!r}, expected terms such as A[1x]")
        position, measure, strategy = term.end(), (term["measure"] or "full").strip(), term["strategy"].strip()
        is_angle |= measure in FRACTIONS
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
    return Number(estimate(*sums), is_angle, len(of_all), shown)


def _of_strategy(terms: list[tuple[int, Value]], with_text: bool) -> tuple[np.ndarray, np.ndarray]:
    """The sum of the terms of a strategy, over the seeds that all terms have: sums and counts, (seeds, blocks) each."""
    seeds = sorted(set.intersection(*(set(value.of_seed.index) for _, value in terms)))
    total, counts = 0, np.ones((len(seeds), 1))
    for sign, value in terms:
        if with_text and value.blocks is not None:
            at = value.of_seed.index.get_indexer(seeds)
            total, counts = total + sign * value.blocks[0][at], value.blocks[1][at]
        else:
            total = total + sign * value.of_seed.loc[seeds].to_numpy(dtype=np.float64)[:, None]
    return np.asarray(total, dtype=np.float64), counts

"""Tests of statements such as ``KerpleLog[n] / ALiBi[n] < 1 for n > 1x`` on the results of a tier."""

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import pandas as pd
from scipy import stats

from kerple.compare.estimates import Estimate, Sums, estimate, over_seeds
from kerple.compare.tables import format_estimate
from results.judge.evidence import FRACTIONS, MEASURES, Tier, Untested, Value, angle, length_in_tier

ALPHA = 0.05
STATEMENT = re.compile(
    r"(?P<left>.+?) (?P<relation><=|>=|<|>|=) (?P<bound>\S+)(?: ± (?P<width>\S+))?(?: for (?P<lengths>.+))?"
)
TERM = re.compile(r"(?P<sign>[-+*/])? ?(?:(?P<measure>[^:\[\]*/+]+):)?(?P<strategy>[^\[\]]+?)\[(?P<key>[^\]]*)\] ?")


@dataclass(frozen=True)
class Number:
    """The value of an expression: a combination of measured values."""

    estimate: Estimate  # the value with its error over seeds and text, as a logarithm or an angle
    is_angle: bool = False  # whether the value is the angle of a fraction, or the difference of two such angles
    terms: int = 2  # number of terms of the expression
    pages: tuple[str, ...] = ()  # paths of the pages that show the measured values

    def text(self, value: float) -> str:
        """Format a value of the number's kind.

        A logarithm from -1 to 1 is shown as a signed percentage, any other as a factor. A single angle is shown as its
        fraction, a difference of angles as a number.
        """
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
    """A comparison of a number with a bound."""

    length: str  # evaluation length, such as ``4×``; empty if the statement has no ``for``
    number: Number
    bound: float  # as a logarithm or an angle like the number
    is_lower: bool  # whether the bound is a lower bound instead of an upper bound
    strict: bool = False  # whether a number equal to the bound violates the statement

    @property
    def chances(self) -> tuple[float, float]:
        """One-sided p-values of "the part holds" and of "it does not hold".

        Both are 1 with one seed, or if the number is not finite.
        """
        estimate = self.number.estimate
        if estimate.seeds < 2 or not math.isfinite(estimate.mean):
            return 1.0, 1.0
        if estimate.error < 1e-12 and abs(estimate.mean - self.bound) < 1e-12:
            return (1.0, 0.0) if self.strict else (0.0, 1.0)  # equal to the bound for every seed
        above = estimate.above(self.bound)
        return (above, 1 - above) if self.is_lower else (1 - above, above)

    def __str__(self) -> str:
        return f"{self.length} {self.number}".strip()


def chances(claim: Sequence[Part]) -> tuple[float, float]:
    """One-sided p-values of "all parts hold" and of "at least one part does not hold".

    The first is the largest p-value of the parts. The second is the smallest, with Bonferroni's correction.
    """
    return max(part.chances[0] for part in claim), min(1.0, len(claim) * min(part.chances[1] for part in claim))


def verdict(claim: Sequence[Part]) -> str:
    """Return the verdict on a claim by its parts: reproduced, contradicted or not resolved."""
    holds, fails = chances(claim)
    return "reproduced" if holds < ALPHA / 2 else "contradicted" if fails < ALPHA / 2 else "not resolved"


def parts(statement: str, tier: Tier, tie: float) -> list[Part]:
    """Return the parts of a statement, one for each length and bound.

    Args:
        statement: The statement, see results/judge/claims.yaml.
        tier: The tier with the results.
        tie: Value of the bound ``tie``.

    Raises:
        Untested: If the results do not contain a number.
        ValueError: If the statement cannot be parsed.
    """
    match = STATEMENT.fullmatch(statement)
    if match is None:
        raise ValueError(f"claims: got {statement!r}, expected a statement such as 'A[1x] / B[1x] <= 1.005'")
    found = []
    strict = match["relation"] in ("<", ">")
    lengths = _lengths(match["lengths"], tier) if match["lengths"] else [""]
    if not lengths:
        raise Untested(f"the results have no length {match['lengths']}")
    for length in lengths:
        number = evaluate(match["left"], tier, length)
        bound = tie if match["bound"] == "tie" else float(match["bound"])
        bounds = [(match["relation"].startswith(">"), bound)]
        if match["width"]:
            bounds = [(False, bound + float(match["width"])), (True, bound - float(match["width"]))]
        times = f"{length // tier.trained}×" if length else ""
        found += [Part(times, number, _on_scale(number, bound), is_lower, strict) for is_lower, bound in bounds]
    return found


def _on_scale(number: Number, bound: float) -> float:
    """A bound as a logarithm or an angle like the number. A bound of a difference of angles is an angle already."""
    if not number.is_angle:
        return math.log(bound)
    return float(angle(bound)) if number.terms == 1 else bound


def _lengths(condition: str, tier: Tier) -> list[int]:
    """Return the lengths of a tier that fulfil a condition: ``all n``, or ``n > LENGTH`` or ``n >= LENGTH``."""
    if condition == "all n":
        return tier.lengths
    _, relation, bound = condition.split(" ")
    least = length_in_tier(tier, bound)
    return [n for n in tier.lengths if n > least or (n == least and relation == ">=")]


def evaluate(expression: str, tier: Tier, n: int | str = "") -> Number:
    """Evaluate an expression of terms such as ``A[8x] / B[8x]``, as the sum or difference of logarithms or angles.

    Terms of one strategy are paired by seed. Those of several strategies are compared as in Welch's test. Rounds of
    timing and parents are paired, because all strategies of a round were timed on the same machine, and all stages of a
    seed have the same parent. The argument ``n`` is the length that replaces the key ``n``.

    Raises:
        Untested: If the results do not contain a number.
        ValueError: If the expression cannot be parsed.
    """
    terms: dict[str, list[tuple[int, Value]]] = {}  # signs and values by strategy
    is_angle, position = False, 0
    while position < len(expression):
        term = TERM.match(expression, position)
        if term is None:
            raise ValueError(f"claims: got {expression[position:]!r}, expected terms such as A[1x]")
        position = term.end()
        measure = (term["measure"] or "full").strip()
        strategy = term["strategy"].strip()
        is_angle |= measure in FRACTIONS
        key = str(n) if term["key"] == "n" else term["key"]
        sign = -1 if term["sign"] in ("-", "/") else 1
        group = strategy if tier.samples == "seeds" else ""
        terms.setdefault(group, []).append((sign, MEASURES[measure](tier, strategy, key)))
    values = [value for of_strategy in terms.values() for _, value in of_strategy]
    pages = tuple(dict.fromkeys(value.page for value in values))
    counts = [None if value.blocks is None else value.blocks[1][0] for value in values]
    with_text = all(c is not None and np.array_equal(c, counts[0]) for c in counts)  # all have the same text
    sums = [_strategy_sums(of_strategy, with_text) for of_strategy in terms.values()]
    return Number(estimate(*sums), is_angle, len(values), pages)


def with_interval(mean: float, low: float, high: float) -> str:
    """Format a difference of losses in nats and the ends of its interval, or "one seed", with minus signs."""
    return format_estimate("+.3f", mean, low, high).replace("-", "−")


def correlation(x: pd.Series, y: pd.Series) -> tuple[float, float, float]:
    """Return the correlation of two values of each seed, and the ends of its 95% interval by Fisher's z."""
    r = float(np.corrcoef(x, y)[0, 1])
    half = stats.norm.isf(ALPHA / 2) / math.sqrt(len(x) - 3)
    return r, math.tanh(math.atanh(r) - half), math.tanh(math.atanh(r) + half)


def _strategy_sums(terms: list[tuple[int, Value]], with_text: bool) -> Sums:
    """The sum of the terms of a strategy, over the seeds that all terms have: sums and counts, (seeds, blocks) each.

    Args:
        terms: Signs and values.
        with_text: Whether to use sums by block. If not, there is one block.
    """
    seeds = sorted(set.intersection(*(set(value.of_seed.index) for _, value in terms)))
    if not with_text:
        return over_seeds(sum(sign * value.of_seed.loc[seeds] for sign, value in terms))
    rows = [value.of_seed.index.get_indexer(seeds) for _, value in terms]
    sums = [sign * value.blocks[0][of_term] for (sign, value), of_term in zip(terms, rows, strict=True)]
    return np.sum(sums, axis=0), terms[0][1].blocks[1][rows[0]]

"""`python -m results.judge.dilution results`: the answers to the questions D1 to D3 of PLAN-dilution.md.

PLAN-dilution-ratio.md says which runs answer D1 and D3.

`python -m results.judge.dilution results errors` prints error rates of the answers on simulated runs instead.
"""

import math
import sys
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
from numpy.typing import NDArray
from scipy import stats

from kerple.compare.estimates import Estimate
from results.judge.evidence import Tier, Untested, Value, flattest_heads
from results.judge.plan import missing_seeds
from results.judge.statements import ALPHA, correlation, evaluate, with_interval

LEVEL = ALPHA / 2  # of each one-sided test
# smallest effects of interest in nats; those of D1 are for each doubling
EQUAL_KEYS, EQUAL_RATIO, FACTOR = 0.01, 0.02, 0.02
CORRELATION = -0.5  # effect of interest of D2
LENGTHS = (64, 128, 256, 512)  # training lengths
GLOBAL = "RNoPE-SWA {}"

# Rise of the own loss from 1,024 to 4,096 keys, two doublings. The contrast is over the training length: 512 less 128,
# and 256 less 64. It is 8 times the change for each doubling of the keys and of the training length.
AT_EQUAL_KEYS = " ".join(
    f"{'*' if n > 128 else '/'} own:{GLOBAL.format(n)}[4096] {'/' if n > 128 else '*'} own:{GLOBAL.format(n)}[1024]"
    for n in LENGTHS[::-1]
).removeprefix("* ")
# Rise from 2,048 to 4,096 keys at length 2L less rise from 1,024 to 2,048 keys at length L, which is the same ratio of
# keys to the training length. The sum over L = 64, 128 and 256 is three times the change for a doubling of L.
AT_EQUAL_RATIO = " ".join(
    f"* own:{GLOBAL.format(2 * n)}[4096] / own:{GLOBAL.format(2 * n)}[2048] "
    f"/ own:{GLOBAL.format(n)}[2048] * own:{GLOBAL.format(n)}[1024]"
    for n in LENGTHS[:-1]
).removeprefix("* ")


@dataclass(frozen=True)
class Answer:
    """The answer to a question, and a line for each number behind it."""

    answer: str
    numbers: list[str]


def within(found: Estimate, bound: float) -> float:
    """Return the p-value of the hypothesis that a mean is outside of ±bound (two one-sided tests)."""
    return max(found.above(-bound), 1 - found.above(bound))


def cause_of_dilution(tier: Any) -> Answer:
    """D1. Is the rise of the own loss set by the ratio of keys to the training length, or by the number of keys?

    *Number of keys* if the change at equal keys is shown to be within ±0.01 nats. Else *ratio* if the rise at equal
    keys is shown to fall with the training length, and the change at equal ratio is shown to be within ±0.02 nats. Else
    *both* if the rise at equal keys is shown to fall, and the change at equal ratio is shown to be outside. Else
    *inconclusive*. Each is shown by one-sided tests at 2.5%, *outside* by two at 1.25%.
    """
    keys, ratio = (evaluate(expression, tier).estimate for expression in (AT_EQUAL_KEYS, AT_EQUAL_RATIO))
    falls = 1 - keys.above() < LEVEL
    outside = min(ratio.above(3 * EQUAL_RATIO), 1 - ratio.above(-3 * EQUAL_RATIO)) < LEVEL / 2
    if within(keys, 8 * EQUAL_KEYS) < LEVEL:
        answer = "number of keys"
    elif falls and within(ratio, 3 * EQUAL_RATIO) < LEVEL:
        answer = "ratio"
    else:
        answer = "both" if falls and outside else "inconclusive"
    return Answer(answer, [f"at equal keys {_nats(keys, 8)}", f"at equal ratio {_nats(ratio, 3)}"])


def flattest_head(tier: Any) -> Answer:
    """D2. Does the bias of KERPLE-log's flattest head at distance 2,047 predict its gain at 2,048 tokens?

    *Yes* if the correlation over seeds is shown to be below 0, *no* if it is shown to be above -0.5, by Fisher's z in
    one-sided tests at 2.5%, else *inconclusive*.
    """
    bias, gain = flattest_heads(tier, "KerpleLog 128")
    r, low, high = correlation(bias, gain)
    z, error = math.atanh(r), 1 / math.sqrt(len(bias) - 3)
    p_yes, p_no = stats.norm.cdf(z / error), stats.norm.sf((z - math.atanh(CORRELATION)) / error)
    answer = "yes" if p_yes < LEVEL else "no" if p_no < LEVEL else "inconclusive"
    shown = f"r = {r:+.2f} [{low:+.2f}, {high:+.2f}]".replace("-", "−")
    return Answer(answer, [f"{shown}, {len(bias)} seeds"])


def factor_at_test_time(tier: Any) -> Answer:
    """D3. Does a factor at test time lower RNoPE-SWA's own loss at 4,096 tokens, at every training length?

    *Yes* if this is shown at each training length, in one-sided tests at 2.5%. *No* if at one of them the loss is shown
    to fall by less than 0.02 nats, in a one-sided test at 2.5% with Bonferroni's correction for four. Else
    *inconclusive*.
    """
    found = [
        evaluate(f"factor:{GLOBAL.format(n)}[4096] / own:{GLOBAL.format(n)}[4096]", tier).estimate for n in LENGTHS
    ]
    shown = all(1 - each.above() < LEVEL for each in found)
    excluded = any(each.above(-FACTOR) < LEVEL / len(found) for each in found)
    answer = "yes" if shown else "no" if excluded else "inconclusive"
    return Answer(answer, [f"trained at {n}: {_nats(each)}" for n, each in zip(LENGTHS, found, strict=True)])


QUESTIONS: dict[str, tuple[str, str, Callable[[Any], Answer]]] = {  # question, comparison and rule by number
    "D1": (
        "Is dilution set by the ratio of keys to the training length, or by their number?",
        "dilution-ratio",
        cause_of_dilution,
    ),
    "D2": ("Does the flattest head predict KERPLE-log's gain from distant text?", "dilution-heads", flattest_head),
    "D3": ("Does a factor at test time lower the loss of RNoPE-SWA?", "dilution-ratio", factor_at_test_time),
}


def _nats(found: Estimate, parts: int = 1) -> str:
    return f"{with_interval(*(value / parts for value in (found.mean, *found.interval())))} nats"


def answer_to(root: Path, number: str) -> str:
    """Return the answer to a question with the numbers behind it; *not tested* if runs are missing."""
    _, name, rule = QUESTIONS[number]
    if missing := sum(map(len, missing_seeds(root, name).values())):
        return f"Not tested: of the runs of {name}, {missing} {'is' if missing == 1 else 'are'} missing."
    try:
        found = rule(Tier(root, name, [name], 128, "planned in results/PLAN-dilution.md"))
    except Untested as reason:
        return f"Not tested: {reason}."
    return f"{found.answer.capitalize()}: {'; '.join(found.numbers)}."


def answers(root: Path) -> str:
    """Return a Markdown list with the answer to each question."""
    return "\n".join(f"- **{number}. {about[0]}** {answer_to(root, number)}" for number, about in QUESTIONS.items())


class SimulatedRuns:
    """Own losses of RNoPE-SWA with normally distributed effects of four seeds and ten packages, as `Tier` returns them.

    The deviations of a rise for each doubling are those of RNoPE-SWA in `main` from 8× to 16×: 0.005 nats over seeds
    and 0.024 over packages. The effect of the factor has 0.014 and 0.022, those of the temperature in `main`. Effects
    of packages are drawn for each strategy, although they have the same text: this makes the rates conservative.

    Args:
        rise: Function from (training length, keys) to the expected rise for a doubling of the keys, in nats.
        factor: Expected effect of the factor in nats.
    """

    trained, samples = 128, "seeds"

    def __init__(self, generator: np.random.Generator, rise: Callable[[int, int], float], factor: float) -> None:
        self.values: dict[tuple[str, str, int], NDArray[np.float64]] = {}

        def effect(mean: float, seeds: float, packages: float) -> NDArray[np.float64]:
            return mean + generator.normal(0, seeds, (4, 1)) + generator.normal(0, packages, 10)

        for n in LENGTHS:
            own = np.zeros((4, 10))
            for keys in (1024, 2048, 4096):
                self.values[GLOBAL.format(n), "far_own", keys] = own
                own = own + effect(rise(n, keys), 0.005, 0.024)
            final = self.values[GLOBAL.format(n), "far_own", 4096]
            self.values[GLOBAL.format(n), "factor_own", 4096] = final + effect(factor, 0.014, 0.022)

    def losses(self, strategy: str, protocol: str, length: int) -> Value:
        """See `Tier.losses`."""
        values = self.values[strategy, protocol, length]
        return Value(pd.Series(values.mean(1)), "", (values, np.ones_like(values)))


def error_rates(times: int = 1000) -> str:
    """Return a Markdown table with the fraction of each answer to D1 and D3 for several truths, and D2's rates."""
    truths: dict[str, tuple[Callable[[int, int], float], float]] = {
        "ratio: a rise of 0.025 nats for each doubling of keys / L": (lambda n, k: 0.025 * math.log2(k / n), -0.05),
        "number of keys: the same rise, 0.06 nats, at every L": (lambda n, k: 0.06, -0.02),
        "half of each": (lambda n, k: 0.0125 * math.log2(k / n) + 0.0125 * math.log2(k / 128), 0.0),
        "no rise": (lambda n, k: 0.0, 0.02),
    }
    lines = ["| truth (D1; effect of the factor, D3) | answers to D1 | answers to D3 |", "| --- | --- | --- |"]
    for name, (rise, factor) in truths.items():
        generator, counts = np.random.default_rng(0), (Counter[str](), Counter[str]())
        for _ in range(times):
            runs = SimulatedRuns(generator, rise, factor)
            for count, rule in zip(counts, (cause_of_dilution, factor_at_test_time), strict=True):
                count[rule(runs).answer] += 1
        shown = [", ".join(f"{answer} {of / times:.1%}" for answer, of in c.most_common()) for c in counts]
        lines.append(f"| {name}; {factor:+.2f} nats | {' | '.join(shown)} |".replace("-0", "−0"))
    lines += ["", "| true correlation (D2, 12 seeds) | yes | no |", "| ---: | ---: | ---: |"]
    for truth in (0.0, CORRELATION, -0.7, -0.9):
        generator = np.random.default_rng(0)
        found = [_correlated(generator, truth) for _ in range(times)]
        rates = [np.mean([answer == kind for answer in found]) for kind in ("yes", "no")]
        lines.append(f"| {truth:.1f} | {' | '.join(f'{rate:.1%}' for rate in rates)} |".replace("-", "−", 1))
    return "\n".join(lines)


def _correlated(generator: np.random.Generator, r: float) -> str:
    """Return the answer to D2 for 12 seeds whose bias and gain are normal with this correlation."""
    bias, gain = generator.multivariate_normal([0, 0], [[1, r], [r, 1]], 12).T

    class Drawn:
        def rows(self, strategy: str, name: str) -> tuple[pd.DataFrame, str]:
            return pd.DataFrame({"seed": range(12), "distance": 2047, "bias": bias}), ""

        def losses(self, strategy: str, protocol: str, length: int) -> Value:
            return Value(pd.Series(gain if protocol == "far_none" else np.zeros(12)), "")

    return flattest_head(Drawn()).answer


if __name__ == "__main__":
    print(error_rates() if sys.argv[2:] == ["errors"] else answers(Path(sys.argv[1])))

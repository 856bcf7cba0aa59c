"""`python -m results.judge.resolution results SEEDS DOCUMENTS`: the smallest detectable differences.

The variances over seeds and documents are those of results/earlier/beyond-128 (1.3M parameters, 5M tokens of code).
"""

import sys
from dataclasses import replace
from pathlib import Path

from scipy import stats

from kerple.compare.estimates import Estimate
from results.judge.__main__ import tiers
from results.judge.statements import ALPHA, evaluate

GAIN = "windowed:KerpleLog[8x] / KerpleLog[8x]"
NUMBERS = {
    "context gain of KERPLE-log at 8×": GAIN,
    "context gain, KERPLE-log less ALiBi, at 8×": f"{GAIN} * ALiBi[8x] / windowed:ALiBi[8x]",
    "loss, KERPLE-log less ALiBi, at 16×": "KerpleLog[16x] / ALiBi[16x]",
}


def expected(known: Estimate, seeds: int, documents: float) -> Estimate:
    """Return the estimate that is expected with these numbers of seeds per strategy and documents of equal size."""
    return replace(
        known,
        seed_variance=known.seed_variance * known.seeds / seeds,
        text_variance=known.text_variance * (known.text_freedom + 1) / documents,
        seeds=seeds,
        seed_freedom=known.seed_freedom * (seeds - 1) / (known.seeds - 1),
        text_freedom=documents - 1,
    )


def resolved(found: Estimate, power: float = 0.8) -> float:
    """Return the effect in nats that a one-sided test at 2.5% with this standard error detects with this power."""
    return float((stats.t.isf(ALPHA / 2, found.freedom) + stats.t.ppf(power, found.freedom)) * found.error)


def main(root: str, seeds: str, documents: str) -> None:
    """Print the smallest detectable difference of each of `NUMBERS`."""
    for name, number in NUMBERS.items():
        found = expected(evaluate(number, tiers(Path(root))["beyond-128"]).estimate, int(seeds), float(documents))
        fraction = found.text_variance / found.error**2
        print(f"{name}: {resolved(found):.4f} nats with 80% power; {fraction:.0%} of the variance is due to documents")


if __name__ == "__main__":
    main(*sys.argv[1:])

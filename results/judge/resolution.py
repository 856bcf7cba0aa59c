"""`python -m results.judge.resolution results SEEDS DOCUMENTS`: the smallest detectable difference.

The variances over seeds and documents are those of results/earlier/beyond-128 (1.3M parameters, 5M tokens of code).
"""

import sys
from dataclasses import replace
from pathlib import Path

from scipy import stats

from kerple.compare.estimates import Estimate
from results.judge.__main__ import tiers
from results.judge.statements import ALPHA, combined

GAIN = "windowed:KerpleLog[8x] / KerpleLog[8x]"
NUMBERS = {
    "context gain of KERPLE-log at 8×": GAIN,
    "context gain, KERPLE-log less ALiBi, at 8×": f"{GAIN} * ALiBi[8x] / windowed:ALiBi[8x]",
    "loss, KERPLE-log less ALiBi, at 16×": "KerpleLog[16x] / ALiBi[16x]",
}


def expected(known: Estimate, seeds: int, documents: float) -> Estimate:
    """The estimate that is expected with these numbers of seeds of each strategy and of documents of equal size."""
    return replace(
        known,
        seed_variance=known.seed_variance * known.seeds / seeds,
        text_variance=known.text_variance * (known.text_freedom + 1) / documents,
        seeds=seeds,
        seed_freedom=known.seed_freedom * (seeds - 1) / (known.seeds - 1),
        text_freedom=documents - 1,
    )


def resolved(of: Estimate, power: float = 0.8) -> float:
    """The effect in nats that a one-sided test at 2.5% detects with this power."""
    return float((stats.t.isf(ALPHA / 2, of.freedom) + stats.t.ppf(power, of.freedom)) * of.error)


def main(root: str, seeds: str, documents: str) -> None:
    """Print a line for each number."""
    for name, number in NUMBERS.items():
        of = expected(combined(number, tiers(Path(root))["beyond-128"]).estimate, int(seeds), float(documents))
        part = of.text_variance / of.error**2
        print(f"{name}: {resolved(of):.4f} nats with 80% power; {part:.0%} of the variance is due to documents")


if __name__ == "__main__":
    main(*sys.argv[1:])

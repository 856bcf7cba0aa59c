"""`python -m results.judge.resolution results SEEDS DOCUMENTS`: the smallest detectable differences.

The variances over seeds and documents are those of results/earlier/beyond-128 (1.3M parameters, 5M tokens of code).
"""

import sys
from pathlib import Path

from results.judge.__main__ import tiers
from results.judge.statements import evaluate

GAIN = "windowed:KerpleLog[8x] / KerpleLog[8x]"
NUMBERS = {
    "context gain of KERPLE-log at 8×": GAIN,
    "context gain, KERPLE-log less ALiBi, at 8×": f"{GAIN} * ALiBi[8x] / windowed:ALiBi[8x]",
    "loss, KERPLE-log less ALiBi, at 16×": "KerpleLog[16x] / ALiBi[16x]",
}


def main(root: str, seeds: str, documents: str) -> None:
    """Print the smallest detectable difference of each of `NUMBERS`."""
    for name, number in NUMBERS.items():
        known = evaluate(number, tiers(Path(root))["beyond-128"]).estimate
        found = known.expected(int(seeds), float(documents))
        fraction = found.text_variance / found.error**2
        print(
            f"{name}: {found.detectable():.4f} nats with 80% power; {fraction:.0%} of the variance is due to documents"
        )


if __name__ == "__main__":
    main(*sys.argv[1:])

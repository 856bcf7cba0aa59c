"""Error rates of verdicts and tests are at most their level, in simulations with a known truth."""

from collections import Counter
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from scipy import stats

from kerple.compare.estimates import estimate
from results.judge.error_rates import Plan
from results.judge.questions import answers
from results.judge.statements import ALPHA, Number, Part, verdict

TIMES = 1000
# with an error rate of exactly ALPHA / 2, the counted rate is at most this in 99.9% of simulations
ALLOWED = stats.binom.ppf(0.999, TIMES, ALPHA / 2) / TIMES


def part(generator: np.random.Generator, distance: float, seeds: int, lower: bool = False, blocks: int = 1) -> Part:
    """A part with a simulated number, ``distance`` above its bound, with standard deviation 1 over seeds and blocks."""
    values = distance + generator.normal(0, 1, (seeds, 1)) + (generator.normal(0, 1, blocks) if blocks > 1 else 0)
    return Part("", Number(estimate((values, np.ones_like(values)))), 0.0, lower)


@pytest.mark.parametrize("blocks", [1, 8])
@pytest.mark.parametrize("seeds", [2, 3, 6])
def test_a_number_equal_to_its_bound_is_rarely_judged(seeds: int, blocks: int) -> None:
    generator = np.random.default_rng(0)
    found = Counter(verdict([part(generator, 0, seeds, blocks=blocks)]) for _ in range(TIMES))
    for answer in ("reproduced", "contradicted"):
        # not above the level; and without text, whose variance is overestimated, not far below it
        assert (0.3 * ALPHA / 2 if blocks == 1 else -1) < found[answer] / TIMES <= ALLOWED


HARDEST: dict[str, tuple[str, Callable[[np.random.Generator], list[Part]]]] = {
    # only the first part does not hold, because it is equal to its bound
    "every length": ("reproduced", lambda g: [part(g, 0, 3), *(part(g, -50, 3) for _ in range(5))]),
    "both sides": ("reproduced", lambda g: [part(g, 0, 3), part(g, 50, 3, lower=True)]),
    # all parts hold, because they are equal to their bounds
    "all lengths": ("contradicted", lambda g: [part(g, 0, 3) for _ in range(6)]),
    "all lengths, with text": ("contradicted", lambda g: [part(g, 0, 3, blocks=8) for _ in range(6)]),
}


@pytest.mark.slow
@pytest.mark.parametrize("case", HARDEST)
def test_the_hardest_claims_are_rarely_judged_wrongly(case: str) -> None:
    generator, (answer, simulate) = np.random.default_rng(0), HARDEST[case]
    assert sum(verdict(simulate(generator)) == answer for _ in range(TIMES)) / TIMES <= ALLOWED


@pytest.mark.slow
@pytest.mark.parametrize("of_text", [0.1, 1.0, 3.0])
@pytest.mark.parametrize("seeds", [2, 3, 5])
def test_a_comparison_over_seeds_and_text_has_at_most_its_error_rate(seeds: int, of_text: float) -> None:
    """1,000 comparisons of two equal strategies, each with new seeds and new text."""
    generator, blocks, wrong = np.random.default_rng(0), 40, 0
    for _ in range(TIMES):
        by_seed, by_block = generator.normal(0, 0.01, (seeds, 1)), generator.normal(0, of_text, blocks)
        # the variance of the mean over text is of_text² times that over seeds
        text = by_block * 0.01 / seeds**0.5 * blocks**0.5
        wrong += estimate((by_seed + text, np.ones((seeds, blocks)))).p() < ALPHA
    assert wrong <= stats.binom.ppf(0.999, TIMES, ALPHA)


def test_a_question_is_answered_yes_if_all_statements_are_shown_and_no_if_an_effect_is_small() -> None:
    plan = Plan(Path(__file__).parents[2] / "results")
    plan.draw((1, 1, 0, 0, 0, 1, 1, 0))  # RNoPE-SWA has the higher loss, and KERPLE-power gains less
    first, second, third, fourth = answers(plan).values()
    assert (first.answer, first.p, third.answer) == ("yes", max(part.chances[0] for part in first.parts), "yes")
    assert (second.answer, fourth.answer) == ("no", "no")
    plan.draw((0.02, 1, 0, 0, 0, 0, 0, 0))
    assert next(iter(answers(plan).values())).answer == "inconclusive"

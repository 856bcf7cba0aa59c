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
# a 99.9% bound on what is counted when the promise is just kept
ALLOWED = stats.binom.ppf(0.999, TIMES, ALPHA / 2) / TIMES
Simulation = Callable[[np.random.Generator], list[Part]]


def part(generator: np.random.Generator, distance: float, seeds: int, least: bool = False, blocks: int = 1) -> Part:
    """A number whose distance from its bound is in standard deviations over seeds; text has the same variance."""
    values = distance + generator.normal(0, 1, (seeds, 1)) + (generator.normal(0, 1, blocks) if blocks > 1 else 0)
    return Part("", Number(estimate((values, np.ones_like(values)))), 0.0, least)


@pytest.mark.parametrize("blocks", [1, 8])
@pytest.mark.parametrize("seeds", [2, 3, 6])
def test_a_number_on_its_bound_is_rarely_put_on_a_side(seeds: int, blocks: int) -> None:
    generator = np.random.default_rng(0)
    found = Counter(verdict([part(generator, 0, seeds, blocks=blocks)]) for _ in range(TIMES))
    for answer in ("reproduced", "contradicted"):
        # the promise is kept, and, where seeds are all the variation there is, not by never answering
        assert (0.3 * ALPHA / 2 if blocks == 1 else -1) < found[answer] / TIMES <= ALLOWED


HARDEST: dict[str, tuple[str, Simulation]] = {
    # false in the first part only just, and true in the others beyond doubt
    "every length": ("reproduced", lambda g: [part(g, 0, 3), *(part(g, -50, 3) for _ in range(5))]),
    "both sides": ("reproduced", lambda g: [part(g, 0, 3), part(g, 50, 3, least=True)]),
    # true in all parts only just
    "all lengths": ("contradicted", lambda g: [part(g, 0, 3) for _ in range(6)]),
    "over text too": ("contradicted", lambda g: [part(g, 0, 3, blocks=8) for _ in range(6)]),
}


@pytest.mark.parametrize("case", HARDEST)
def test_the_hardest_claims_are_rarely_judged_wrongly(case: str) -> None:
    generator, (answer, simulate) = np.random.default_rng(0), HARDEST[case]
    assert sum(verdict(simulate(generator)) == answer for _ in range(TIMES)) / TIMES <= ALLOWED


@pytest.mark.parametrize("of_text", [0.1, 1.0, 3.0])
@pytest.mark.parametrize("seeds", [2, 3, 5])
def test_a_comparison_over_seeds_and_text_is_wrong_as_often_as_it_says(seeds: int, of_text: float) -> None:
    """1,000 comparisons of two equal strategies, each with new seeds and new text."""
    generator, blocks, wrong = np.random.default_rng(0), 40, 0
    for _ in range(TIMES):
        by_seed, by_block = generator.normal(0, 0.01, (seeds, 1)), generator.normal(0, of_text, blocks)
        # as much variance of the mean as the seeds have, times of_text²
        text = by_block * 0.01 / seeds**0.5 * blocks**0.5
        wrong += estimate((by_seed + text, np.ones((seeds, blocks)))).p() < ALPHA
    assert wrong <= stats.binom.ppf(0.999, TIMES, ALPHA)


def test_a_question_is_yes_if_all_of_it_is_shown_and_no_if_a_part_is_shown_to_be_small() -> None:
    plan = Plan(Path(__file__).parents[2] / "results")
    plan.draw((1, 1, 0, 0, 0, 1, 1, 0))  # RNoPE-SWA's loss is the higher one, and KERPLE-power gains less
    first, second, third, fourth = answers(plan).values()
    assert (first.answer, first.p, third.answer) == ("yes", max(part.chances[0] for part in first.parts), "yes")
    assert (second.answer, fourth.answer) == ("no", "no")
    plan.draw((0.02, 1, 0, 0, 0, 0, 0, 0))
    assert next(iter(answers(plan).values())).answer == "inconclusive"

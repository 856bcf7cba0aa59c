"""Verdicts and daggers are wrong no more often than they promise: simulations in which the truth is known."""

from collections.abc import Callable

import numpy as np
import pandas as pd
import pytest
from scipy import stats

from kerple.report.statistics import against_baseline, estimate
from results.judge.evidence import ALPHA, Answer, Part, above, all_seeds, at_most, every, significantly_below, within

TIMES = 2000
# a 99.9% bound on what is counted when the promise is just kept
ALLOWED = stats.binom.ppf(0.999, TIMES, ALPHA / 2) / TIMES


def wrong(answer: Answer, simulate: Callable[[np.random.Generator], Part]) -> float:
    """Share of experiments that end with this answer."""
    generator = np.random.default_rng(0)
    return sum(simulate(generator).answer is answer for _ in range(TIMES)) / TIMES


def ratios(generator: np.random.Generator, mean: float, seeds: int) -> pd.Series:
    return pd.Series(np.exp(generator.normal(np.log(mean), 0.01, seeds)))


@pytest.mark.parametrize("answer", [Answer.YES, Answer.NO])
@pytest.mark.parametrize("seeds", [2, 3, 6])
def test_a_ratio_on_the_border_is_rarely_put_on_a_side(seeds: int, answer: Answer) -> None:
    found = wrong(answer, lambda generator: at_most(ratios(generator, 1.005, seeds), 1.005))
    assert 0.3 * ALPHA / 2 < found <= ALLOWED  # the promise is kept, and not by never answering


@pytest.mark.parametrize("answer", [Answer.YES, Answer.NO])
@pytest.mark.parametrize("seeds", [1, 2, 3, 5, 6, 8])
def test_seeds_that_toss_a_coin_rarely_agree_beyond_chance(seeds: int, answer: Answer) -> None:
    found = wrong(answer, lambda generator: all_seeds(generator.random(seeds) < 0.5))
    assert found <= ALLOWED
    assert (found > 0) == (seeds >= 6)


# each claim is false in its first part only just, and true in the others beyond doubt: the hardest case for a YES
FALSE_IN_ONE: dict[str, Callable[[np.random.Generator], Part]] = {
    "every length at most": lambda g: every(at_most(ratios(g, 1, 3)), *(at_most(ratios(g, 0.8, 3)) for _ in range(5))),
    "within": lambda g: within(ratios(g, 1.03, 3), 0.03),
    "counts": lambda g: every(all_seeds(g.random(6) < 0.5), all_seeds([True] * 6)),
    "counts and ratios": lambda g: every(all_seeds(g.random(6) < 0.5), above(ratios(g, 1.5, 6))),
    "below at each length": lambda g: significantly_below(
        pd.DataFrame({n: g.normal(0 if n == 0 else -50, 1, 4) for n in range(5)}), pd.DataFrame(0.0, range(4), range(5))
    ),
}
# each claim is true in all parts only just: the hardest case for a NO
TRUE_ONLY_JUST: dict[str, Callable[[np.random.Generator], Part]] = {
    "every length at most": lambda g: every(*(at_most(ratios(g, 1, 3)) for _ in range(6))),
    "within, nested": lambda g: every(*(within(ratios(g, 1.03, 3), 0.03) for _ in range(4))),
    "counts": lambda g: every(*(all_seeds(g.random(8) < 0.5) for _ in range(3))),
    "below at each length": lambda g: significantly_below(
        pd.DataFrame(g.normal(0, 1, (4, 5))), pd.DataFrame(0.0, range(4), range(5))
    ),
}


def slow(claim: str) -> object:
    return pytest.param(claim, marks=pytest.mark.slow) if claim == "below at each length" else claim


@pytest.mark.parametrize("claim", [slow(claim) for claim in FALSE_IN_ONE])
def test_a_conjunction_that_fails_in_one_part_is_rarely_reproduced(claim: str) -> None:
    assert wrong(Answer.YES, FALSE_IN_ONE[claim]) <= ALLOWED


@pytest.mark.parametrize("claim", [slow(claim) for claim in TRUE_ONLY_JUST])
def test_a_conjunction_that_holds_is_rarely_contradicted_by_one_of_its_parts(claim: str) -> None:
    assert wrong(Answer.NO, TRUE_ONLY_JUST[claim]) <= ALLOWED


@pytest.mark.parametrize("of_text", [0.1, 1.0, 3.0])
@pytest.mark.parametrize("seeds", [2, 3, 5])
def test_a_comparison_over_seeds_and_text_is_wrong_as_often_as_it_says(seeds: int, of_text: float) -> None:
    """Strategies that differ in nothing, other seeds and other text in each of 1,000 comparisons."""
    generator, times, blocks, wrong = np.random.default_rng(0), 1000, 40, 0
    for _ in range(times):
        by_seed, by_block = generator.normal(0, 0.01, (seeds, 1)), generator.normal(0, of_text, blocks)
        text = (
            by_block * 0.01 / seeds**0.5 * blocks**0.5
        )  # as much variance of the mean as the seeds have, times of_text²
        wrong += estimate(by_seed + text, np.ones((seeds, blocks))).p() < ALPHA
    assert wrong <= stats.binom.ppf(0.999, times, ALPHA)


@pytest.mark.slow
def test_a_column_in_which_nobody_differs_rarely_has_a_dagger() -> None:
    generator, times, daggers = np.random.default_rng(0), 400, 0
    strategies, seeds = ("baseline", "a", "b", "c", "d"), range(3)
    keys = [(s, seed, "ppl", "full", 64) for s in strategies for seed in seeds]
    for _ in range(times):
        table = pd.DataFrame(keys, columns=["strategy", "seed", "metric", "protocol", "length"])
        table["value"] = 20 + generator.normal(0, 1, len(table))
        daggers += int((against_baseline(table, "baseline")["p_holm"] < ALPHA).any())
    assert daggers <= stats.binom.ppf(0.999, times, ALPHA)

"""One comparison of a number with a bound, and what several come to together, against SciPy and simulations."""

import math
from dataclasses import replace

import numpy as np
import pytest
from scipy import stats

from kerple.compare.statistics import estimate
from results.judge.__main__ import Finding
from results.judge.statements import Part, verdict


def part(values: list[float], bound: float, least: bool = False) -> Part:
    logs = np.log(np.asarray(values))[:, None]
    return Part("", estimate(logs, np.ones_like(logs)), math.log(bound), least, False, ())


def test_a_part_is_judged_by_scipys_one_sided_tests() -> None:
    values = [0.98, 1.01, 0.99, 0.985]
    for bound in (0.97, 1.0, 1.02):
        below, above = (
            stats.ttest_1samp(np.log(values), math.log(bound), alternative=a).pvalue for a in ("less", "greater")
        )
        assert part(values, bound).chances == pytest.approx((below, above))
        assert part(values, bound, least=True).chances == pytest.approx((above, below))
    assert part([1.0, 1.0], 1.0).chances == (0.0, 1.0)  # a bound belongs to what `<=` allows, not to what `<` does
    assert replace(part([1.0, 1.0], 1.0), strict=True).chances == (1.0, 0.0)
    assert part([0.5], 1.0).chances == (1.0, 1.0)
    assert part([math.inf, math.inf], 1.0).chances == (1.0, 1.0)


def test_all_parts_must_be_shown_and_one_wrong_part_must_stand_out_among_them() -> None:
    shown, open_, wrong = (part([m, m * 1.01, m * 0.99], 1.0) for m in (0.8, 1.001, 1.06))
    assert [max(p.chances) > 0.99 for p in (shown, wrong)] == [True, True]
    assert verdict([shown, shown]) == "reproduced"
    assert verdict([shown, open_]) == "not resolved"
    assert verdict([shown, wrong]) == "contradicted"
    assert 0.025 / 8 < wrong.chances[1] < 0.025 / 2
    assert verdict([shown, wrong, *[open_] * 6]) == "not resolved"  # one of eight, by chance


def test_what_seeds_can_show_is_found_by_as_many_simulated_comparisons() -> None:
    seen = part([1.00, 1.02, 0.98, 1.01], 1.0)
    spread, generator = math.sqrt(4 * seen.found.seed_variance), np.random.default_rng(0)
    logs = generator.normal(seen.effect(6), spread, (20_000, 6))
    shown = stats.ttest_1samp(logs, 0, axis=1, alternative="greater").pvalue < 0.025
    assert shown.mean() == pytest.approx(0.8, abs=0.03)
    among = stats.ttest_1samp(
        generator.normal(seen.effect(6, 4), spread, (20_000, 6)), 0, axis=1, alternative="greater"
    )
    assert (among.pvalue < 0.025 / 4).mean() == pytest.approx(0.8, abs=0.03)
    for parts_ in (1, 4):
        wanted = seen.needed(parts_)
        assert seen.effect(wanted, parts_) <= abs(seen.found.mean) < seen.effect(wanted - 1, parts_)


def test_seeds_that_would_contradict_are_those_of_the_corrected_test() -> None:
    off, held = part([1.00, 1.02, 0.99], 1.0), part([0.8, 0.81, 0.79], 1.0)
    found = Finding("not resolved", {"a": [off], "b": [held] * 5})
    assert found.wanted == (
        f"3 seeds show {100 * math.expm1(off.effect(3, 6)):.2g}% from the bound; "
        f"to contradict by what was found takes {off.needed(6)} seeds"
    )

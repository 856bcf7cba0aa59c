"""One comparison of a number with a bound, and what several come to together, against SciPy and by hand."""

import math
from dataclasses import replace

import numpy as np
import pytest
from scipy import stats

from kerple.compare.statistics import estimate
from results.judge.evidence import angle
from results.judge.statements import Number, Part, chances, verdict


def part(values: list[float], bound: float, least: bool = False) -> Part:
    logs = np.log(np.asarray(values))[:, None]
    return Part("", Number(estimate((logs, np.ones_like(logs)))), math.log(bound), least)


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
    assert chances([shown, wrong]) == (max(shown.chances[0], wrong.chances[0]), 2 * wrong.chances[1])


def test_the_interval_of_a_share_is_that_of_its_angle_and_inside_of_0_to_1() -> None:
    shares = np.array([0.80, 0.93, 1.0, 1.0, 0.96])
    low, high = stats.ttest_1samp(angle(shares), 0).confidence_interval()
    assert low < math.pi / 2 < high  # beyond what a share can be
    number = Number(estimate((angle(shares)[:, None], np.ones((5, 1)))), share=True, terms=1)
    assert str(number) == f"{math.sin(angle(shares).mean()) ** 2:.3g} [{math.sin(low) ** 2:.3g}, 1]"

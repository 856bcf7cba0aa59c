"""What figures show of tables whose numbers are known beforehand."""

import numpy as np
import pandas as pd
import pytest

from kerple.compare.figures import figures, position_wise
from kerple.compare.statistics import summarise


def test_positions_of_different_corpora_are_drawn_by_themselves() -> None:
    rows = [
        {"strategy": strategy, "seed": 1235, "first": first, "window": 64, "part": part, "ppl_full": ppl}
        for strategy in ("KerpleLog", "ALiBi")
        for part, ppl in (("code", 3.0), ("prose", 21.0))
        for first in (0, 8, 16)
    ]
    table = pd.DataFrame(rows).assign(ppl_windowed=lambda table: table["ppl_full"])
    drawn = dict(position_wise(table, table["strategy"], "KerpleLog"))
    assert list(drawn) == ["position-wise-code", "position-wise-prose"]
    for (part, ppl), figure in zip((("code", 3.0), ("prose", 21.0)), drawn.values(), strict=True):
        (ax,) = figure.axes
        assert ax.get_title() == part
        assert [line.get_label() for line in ax.lines] == ["KerpleLog", "KerpleLog, last 64 keys", "ALiBi"]
        assert np.concatenate([line.get_ydata() for line in ax.lines]) == pytest.approx(ppl)


def test_a_comparison_of_one_corpus_has_one_figure_by_position() -> None:
    table = pd.DataFrame({"strategy": "ALiBi", "first": [0, 8], "window": 64, "ppl_full": 3.0, "ppl_windowed": 4.0})
    ((name, figure),) = position_wise(table, table["strategy"], "ALiBi")
    assert name == "position-wise"
    assert figure.axes[0].get_title() == ""


def test_perplexity_against_length_is_the_mean_of_each_strategy() -> None:
    curves = {"A": (20.0, 30.0), "B": (40.0, 50.0)}
    rows = [
        {"strategy": name, "seed": seed, "metric": "ppl", "protocol": "full", "length": length, "value": value + seed}
        for name, values in curves.items()
        for length, value in zip((64, 128), values, strict=True)
        for seed in (0, 2)
    ]
    drawn = dict(figures(summarise(pd.DataFrame(rows), "A"), {"full": 64}, "A"))
    lines = {line.get_label(): line for line in drawn["ppl-against-length"].axes[0].lines}
    assert {name: lines[name].get_ydata().tolist() for name in curves} == {"A": [21, 31], "B": [41, 51]}
    assert lines["A"].get_xdata().tolist() == [64, 128]

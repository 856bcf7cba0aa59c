"""Figures of context gain, from a table as `Extrapolation` writes it."""

import numpy as np
import pandas as pd
import pytest
from scipy import stats

from kerple.compare.context_gain import context_figures, curve


def table(seeds: int = 3) -> pd.DataFrame:
    """Losses that fall to the training length, 64, and gains that grow by 0.01 nats an octave of distance beyond it."""
    first, generator = np.arange(0, 1024, 16), np.random.default_rng(0)
    frames = []
    for strategy in ("KerpleLog", "_ALiBi$"):
        for seed in range(seeds):
            offset, beyond = generator.normal(0, 0.02), np.maximum(first - 64 + 8, 1)
            columns = {"strategy": strategy, "seed": seed, "first": first, "length": 1024, "window": 64, "segments": 40}
            columns |= {"loss": 4 - np.minimum(first, 64) / 64 + offset, "loss_error": 0.03}
            columns |= {"gain": np.where(first < 64, 0, 0.01 * np.log2(beyond)) + offset, "gain_error": 0.01}
            frames.append(pd.DataFrame(columns))
    return pd.concat(frames)


def test_points_are_means_over_seeds_with_the_spread_of_both() -> None:
    one = table()[table()["strategy"] == "KerpleLog"]
    at, estimates = curve(one, "loss")
    assert at.tolist() == [16 + 32 * i for i in range(32)]
    seeds = one[one["first"].isin([512, 528])].groupby("seed")["loss"].mean()
    assert estimates[16].mean == pytest.approx(seeds.mean())
    assert estimates[16].error == pytest.approx(np.hypot(stats.sem(seeds), 0.03))
    assert estimates[16].interval()[1] - seeds.mean() == pytest.approx(
        stats.t.isf(0.025, estimates[16].freedom) * estimates[16].error
    )


def test_gain_is_by_distance_beyond_the_window_two_points_an_octave() -> None:
    one = table(seeds=1)
    one = one[(one["strategy"] == "KerpleLog") & (one["first"] >= 64)]
    at, estimates = curve(one, "gain")
    middles = [8 + 16 * i for i in range(60)]
    spans = [[m for m in middles if 2 ** (i / 2) <= m < 2 ** ((i + 1) / 2)] for i in range(20)]
    assert at.tolist() == pytest.approx([np.mean(span) for span in spans if span])
    assert np.diff([e.mean for e in estimates]).min() > 0
    assert [e.error for e in estimates] == pytest.approx([0.01] * len(at))  # of text alone
    assert {e.blocks for e in estimates} == {40}


def test_a_figure_of_each_with_a_band_for_every_strategy() -> None:
    drawn = dict(context_figures(table(), table()["strategy"]))
    assert list(drawn) == ["loss-by-position", "context-gain"]
    for figure in drawn.values():
        (ax,) = figure.axes
        assert [line.get_label() for line in ax.lines][:2] == ["KerpleLog", r" _ALiBi\$"]
        assert len(ax.collections) == 2
    assert drawn["context-gain"].axes[0].get_xlabel() == "distance beyond the 64 tokens of the window"
    parts = pd.concat([table().assign(part="a"), table().assign(part="b")])
    assert "context-gain-b" in dict(context_figures(parts, parts["strategy"]))

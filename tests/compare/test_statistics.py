"""Statistics of a comparison agree with SciPy, the bootstrap and computations by hand."""

from itertools import product

import numpy as np
import pandas as pd
import pytest
from scipy import stats

from kerple.compare.charts import context_charts, curve
from kerple.compare.estimates import difference, estimate, logarithm, over_seeds
from kerple.compare.figures import draw, styles_of
from kerple.compare.findings import findings, power_of_the_tests
from kerple.compare.finished_runs import Runs
from kerple.compare.statistics import against_baseline, holm, summarise


@pytest.fixture
def generator() -> np.random.Generator:
    return np.random.default_rng(0)


def rows(name: str, values: list[float], metric: str = "ppl", protocol: str = "full", length: int = 64) -> pd.DataFrame:
    """Results of a strategy, one value per seed."""
    cell = {"strategy": name, "metric": metric, "protocol": protocol, "length": length}
    return pd.DataFrame([{**cell, "seed": 1235 + i, "value": v} for i, v in enumerate(values)])


def test_holm_on_the_textbook_example() -> None:
    # sorted .005 .01 .03 .04 -> ×4, ×3, ×2, ×1 = .02 .03 .06 .04, made monotone: .02 .03 .06 .06
    np.testing.assert_allclose(holm([0.01, 0.04, 0.03, 0.005]), [0.03, 0.06, 0.06, 0.02])
    np.testing.assert_allclose(holm([np.nan, 0.02, 0.9]), [np.nan, 0.04, 0.9])  # NaN is not one of the tests
    np.testing.assert_allclose(holm([0.8, 0.9]), [1.0, 1.0])


@pytest.mark.parametrize("ours", [[21.9, 22.4, 22.0, 21.7], [21.9, 22.8]])
def test_a_comparison_over_seeds_is_scipys_welch_test_of_the_loss(ours: list[float]) -> None:
    theirs = [21.5, 22.1, 21.4, 21.6, 21.5]
    results = pd.concat([rows("KerpleLog", theirs), rows("ALiBi", ours).iloc[::-1]])  # the order does not matter
    test = against_baseline(results, "KerpleLog").iloc[0]
    expected = stats.ttest_ind(np.log(ours), np.log(theirs), equal_var=False)
    assert test["fewest_seeds"] == len(ours)
    assert test["difference"] == pytest.approx(np.mean(np.log(ours)) - np.mean(np.log(theirs)))
    assert (test["t"], test["p"]) == (pytest.approx(expected.statistic), pytest.approx(expected.pvalue))
    interval = expected.confidence_interval(0.95)
    assert (test["difference_low"], test["difference_high"]) == pytest.approx((interval.low, interval.high))
    summary = summarise(results, "KerpleLog").set_index("strategy").loc["ALiBi"]
    assert summary["ratio"] == pytest.approx(stats.gmean(ours) / stats.gmean(theirs))
    assert (summary["ratio_low"], summary["ratio_high"]) == pytest.approx(np.exp([interval.low, interval.high]))


def test_accuracies_are_compared_without_logarithms() -> None:
    ours, theirs = [0.0, 0.3, 0.2], [0.4, 0.9, 0.5]
    results = pd.concat([rows("A", theirs, "exact_match", "copy"), rows("B", ours, "exact_match", "copy")])
    expected = stats.ttest_ind(ours, theirs, equal_var=False)
    assert against_baseline(results, "A").iloc[0]["p"] == pytest.approx(expected.pvalue)
    summary = summarise(results, "A")
    assert summary["ratio"].isna().all()
    assert list(summary.query("best")["strategy"]) == ["A"]  # a higher accuracy is better


def test_the_findings_say_why_no_difference_was_tested() -> None:
    for theirs, reason in (
        ([18.0], "KerpleLog, or each other strategy, has fewer than two seeds at this length"),
        ([np.inf, np.inf], "each difference is 0 or not finite"),
    ):
        summary = summarise(pd.concat([rows("KerpleLog", [17.0, 17.1]), rows("ALiBi", theirs)]), "KerpleLog")
        (text,) = findings(summary, Runs(*[pd.DataFrame()] * 3, training_lengths={"full": 64}), "KerpleLog")
        assert f"because {reason};" in text


def test_the_findings_name_strategies_that_were_not_tested() -> None:
    values = {"KerpleLog": [17, 17.1], "ALiBi": [16, 16.1], "T5": [17.1, 17], "NoPE": [18], "RoPE": [np.inf] * 2}
    summary = summarise(pd.concat(rows(name, list(of)) for name, of in values.items()), "KerpleLog")
    (text,) = findings(summary, Runs(*[pd.DataFrame()] * 3, training_lengths={"full": 64}), "KerpleLog")
    assert "ALiBi is better and none is worse" in text
    assert text.endswith(
        "; strategies without a significant difference: T5; strategies that were not tested (fewer than two seeds at "
        "this length, or a difference that is 0 or not finite): NoPE, RoPE."
    )


def test_seeds_and_text_are_two_samples(generator: np.random.Generator) -> None:
    """If a seed adds one number and a block another, the test is Welch's test of two independent samples."""
    of_seeds, of_blocks = generator.normal(0.1, 0.05, 4), generator.normal(0, 0.1, 30)
    found = estimate(((of_seeds[:, None] + of_blocks) * 64, np.full((4, 30), 64)))
    expected = stats.ttest_ind(of_seeds, -of_blocks, equal_var=False)
    assert found.mean / found.error == pytest.approx(expected.statistic)
    assert found.freedom == pytest.approx(expected.df)
    assert found.p() == pytest.approx(expected.pvalue)
    assert found.interval() == pytest.approx(tuple(expected.confidence_interval(0.95)))
    assert found.above(0.1) == pytest.approx(stats.t(expected.df, found.mean, found.error).cdf(0.1))
    assert estimate(((of_seeds[:2, None] + of_blocks), np.ones((2, 30)))).freedom == 1  # of two seeds only
    # Kish's effective number of blocks: sizes 3, 1, 1, 1 count as three of equal size
    assert estimate((np.ones((2, 4)), np.array([[3, 1, 1, 1]] * 2))).text_freedom == pytest.approx(36 / 12 - 1)


@pytest.mark.slow
def test_two_seeds_against_many_reject_a_true_hypothesis_at_most_at_the_nominal_rate() -> None:
    generator = np.random.default_rng(1)
    for seeds in (3, 8, 20):
        samples = [(generator.normal(size=(2, 1)), generator.normal(size=(seeds, 1))) for _ in range(4000)]
        p = [estimate(*((of, np.ones(of.shape)) for of in pair)).p() for pair in samples]
        assert np.mean(np.array(p) < 0.05) < 0.055, seeds  # 12% with 20 seeds by Satterthwaite's formula


def test_one_seed_or_an_infinite_loss_has_no_interval_and_no_test(generator: np.random.Generator) -> None:
    sums, counts = generator.normal(3, 0.2, (9, 40)), np.ones((9, 40))
    one, others, infinite = (sums[:1], counts[:1]), (-sums[1:], counts[1:]), ([[np.inf]] * 2, [[1]] * 2)
    for found in (estimate(one), estimate(one, others), estimate(infinite)):
        assert np.isnan([*found.interval(), found.p()]).all()
    assert estimate(one, others).text_variance > 0


def test_the_error_over_text_of_means_and_their_ratios_is_that_of_the_bootstrap(generator: np.random.Generator) -> None:
    counts = generator.integers(20, 200, 300).astype(float)
    theirs = counts * generator.normal(3, 0.2, 300)
    ours, resampled = theirs * generator.normal(1.01, 0.1, 300), generator.integers(300, size=(4000, 300))
    pair = (logarithm(sums[None], counts[None]) for sums in (ours, theirs))
    for found, statistic in (
        (estimate((ours[None], counts[None])), lambda i: ours[i].sum(-1) / counts[i].sum(-1)),
        (difference(*pair), lambda i: np.log(ours[i].sum(-1) / theirs[i].sum(-1))),
    ):
        assert found.mean == pytest.approx(statistic(np.arange(300)))
        assert found.text_variance**0.5 == pytest.approx(statistic(resampled).std(), rel=0.05)


def test_a_difference_on_the_same_text_has_no_variance_of_the_text(generator: np.random.Generator) -> None:
    hardness = generator.normal(3, 0.3, (1, 60)).repeat(3, 0)  # blocks differ far more than strategies do
    ours, counts = hardness + 0.05 + generator.normal(0, 0.01, (3, 60)), np.ones((3, 60))
    for same_runs in (False, True):
        found = difference((ours, counts), (hardness, counts), same_runs)
        assert found is not None
        assert found.interval()[0] < 0.05 < found.interval()[1] < 0.07
    assert np.diff(estimate((ours, counts)).interval()) > 0.1
    for one_seed in ([2, 1, 1], [1, 1, 2]):  # of one seed, the text is another
        other_text = counts * np.array(one_seed)[:, None]
        assert difference((ours, counts), (hardness, other_text)) is None
        assert difference((ours, other_text), (hardness, counts)) is None
    assert difference((ours, counts), (hardness, 2 * counts)) is None  # other text


def by_block(losses: dict[str, np.ndarray]) -> pd.DataFrame:
    """Sums by block, of ten losses each, from the mean losses (seeds, blocks) of each strategy."""
    cell = {"metric": "ppl", "protocol": "full", "length": 64, "count": 10}
    return pd.DataFrame(
        cell | {"strategy": strategy, "seed": 1235 + i, "block": b, "sum": 10 * of[i, b]}
        for strategy, of in losses.items()
        for i, b in np.ndindex(of.shape)
    )


def test_perplexity_and_bits_per_byte_are_tested_over_seeds_and_blocks(generator: np.random.Generator) -> None:
    """Both have the same losses on the same text. Only bits per byte are compared by the logarithm of the loss."""
    a, b = (mean + generator.normal(0, 0.002, (5, 1)) + generator.normal(0, 0.004, 20) for mean in (3, 3.004))
    frames = [rows(s, list(np.exp(of.mean(1)))) for s, of in (("A", a), ("B", b))]
    frames += [rows(s, list(of.mean(1) / np.log(2) / 4), "bits_per_byte") for s, of in (("A", a), ("B", b))]
    results, blocks = pd.concat(frames), by_block({"A": a, "B": b})
    tests, over_seeds = (against_baseline(results, "A", *of).set_index("metric") for of in ([blocks], []))
    ppl, bits = tests.loc["ppl"], tests.loc["bits_per_byte"]
    expected = estimate((b, np.ones((5, 20))), (-a, np.ones((5, 20))))
    assert (ppl["blocks"], ppl["difference"], ppl["p"]) == pytest.approx((20, expected.mean, expected.p()))
    assert (bits["blocks"], bits["p"]) == (20, pytest.approx(ppl["p"], rel=0.02))
    assert bits["difference"] == pytest.approx(np.log(b.sum(1) / a.sum(1)).mean())
    ends = ["difference_low", "difference_high"]  # a difference of logarithms is a third, because the loss is near 3
    assert bits[ends].tolist() == pytest.approx((ppl[ends] / 3).tolist(), rel=0.01)
    assert (over_seeds["p"] < tests["p"]).all()


def test_bits_per_byte_of_two_tokenizers_are_compared_by_their_values_and_not_by_losses_of_tokens(
    generator: np.random.Generator,
) -> None:
    """With blocks of a fixed number of tokens, the numbers of tokens are equal, but not those of bytes."""
    a, b = (mean + generator.normal(0, 0.002, (5, 1)) + generator.normal(0, 0.004, 20) for mean in (2.8, 3.2))
    bits = {"A": list(a.mean(1) / np.log(2) / 4), "B": list(b.mean(1) / np.log(2) / 5)}  # 4 and 5 bytes per token
    results = pd.concat(rows(name, values, "bits_per_byte") for name, values in bits.items())
    test = against_baseline(results, "A", by_block({"A": a, "B": b})).iloc[0]
    assert test["difference"] == pytest.approx(np.mean(np.log(bits["B"])) - np.mean(np.log(bits["A"])))
    expected = stats.ttest_ind(np.log(bits["B"]), np.log(bits["A"]), equal_var=False)
    assert (test["blocks"], test["p"]) == (1, pytest.approx(expected.pvalue))


def test_holms_correction_is_over_the_strategies_of_one_cell(generator: np.random.Generator) -> None:
    runs = product(("KerpleLog", "ALiBi", "T5", "NoPE"), (64, 128))
    results = pd.concat(rows(name, list(20 + generator.normal(0, 1, 3)), length=length) for name, length in runs)
    for _, cell in against_baseline(results, "KerpleLog").groupby("length"):
        np.testing.assert_allclose(cell["p_holm"], holm(cell["p"]))
        assert len(cell) == 3


def test_equal_values_of_all_seeds_have_p_zero_or_none() -> None:
    for values, nats, p in (([20.0] * 3, 0, np.nan), ([40.0] * 3, np.log(2), 0), ([20.0], 0, np.nan)):
        test = against_baseline(pd.concat([rows("A", [20.0] * 3), rows("B", values)]), "A").iloc[0]
        assert test["fewest_seeds"] == len(values)
        assert (test["difference"], test["p"]) == pytest.approx((nats, p), nan_ok=True)


def test_standard_deviation_has_n_minus_one_and_one_seed_has_none() -> None:
    results = pd.concat([rows("A", [1.0, 3.0]), rows("B", [2.0]), rows("C", [4.0])])
    summary = summarise(results, "A").set_index("strategy")
    assert summary.loc["A", "std"] == pytest.approx(np.sqrt(2))
    assert np.isnan(summary.loc["B", "std"])
    assert summary["best"].tolist() == [True, True, False]  # a tie
    assert not summarise(rows("A", [2.0]), "A")["best"].any()  # all tie


def table(seeds: int = 3) -> pd.DataFrame:
    """Losses that fall up to the training length, 64, and gains that grow by 0.01 nats per octave beyond it."""
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


def test_points_of_the_loss_are_means_over_seeds_with_the_error_over_seeds_and_text() -> None:
    one = table()[table()["strategy"] == "KerpleLog"]
    positions, estimates = map(list, zip(*curve(one, "loss"), strict=True))
    assert positions == [16 + 32 * i for i in range(32)]
    seeds = one[one["first"].isin([512, 528])].groupby("seed")["loss"].mean()
    assert estimates[16].mean == pytest.approx(seeds.mean())
    assert estimates[16].error == pytest.approx(np.hypot(stats.sem(seeds), 0.03))


def test_the_gain_has_two_points_per_octave_of_distance_beyond_the_window() -> None:
    one = table(seeds=1)
    one = one[(one["strategy"] == "KerpleLog") & (one["first"] >= 64)]
    distances, estimates = map(list, zip(*curve(one, "gain"), strict=True))
    middles = [8 + 16 * i for i in range(60)]
    spans = [[m for m in middles if 2 ** (i / 2) <= m < 2 ** ((i + 1) / 2)] for i in range(20)]
    assert distances == pytest.approx([np.mean(span) for span in spans if span])
    assert np.diff([e.mean for e in estimates]).min() > 0
    assert [e.text_variance for e in estimates] == pytest.approx([0.01**2] * len(distances))
    assert {e.blocks for e in estimates} == {40}


def test_loss_and_gain_have_a_figure_with_a_band_for_every_strategy_and_part() -> None:
    strategies = table()["strategy"]
    for chart in (*context_charts(table(), strategies, "loss"), *context_charts(table(), strategies, "gain")):
        (ax,) = draw(chart, styles_of(strategies)).axes
        assert [line.get_label() for line in ax.lines][:2] == ["KerpleLog", r" _ALiBi\$"]
        assert len(ax.collections) == 2
    assert chart.panels[0].across == "distance beyond the 64 tokens of the window"
    windows = table().assign(window=lambda rows: rows["window"] + 64 * (rows["strategy"] == "KerpleLog"))
    (loss,), (gain,) = (context_charts(windows, strategies, column) for column in ("loss", "gain"))
    assert (loss.panels[0].mark, gain.panels[0].across) == (None, "distance beyond the tokens of the window")
    parts = pd.concat([table().assign(part="a"), table().assign(part="b")])
    assert [chart.name for chart in context_charts(parts, strategies, "gain")] == ["context-gain-a", "context-gain-b"]


def test_a_test_detects_the_detectable_difference_with_the_stated_power() -> None:
    generator = np.random.default_rng(0)
    known = estimate(over_seeds(pd.Series([1.0, 3.0])), over_seeds(pd.Series([0.0, 2.0])))  # variance 2 of each
    expected = known.expected(6)
    assert expected.seed_variance == pytest.approx(2 * 2 / 6)
    shifted = generator.normal(expected.detectable(), np.sqrt(2), (6, 20_000))
    p = stats.ttest_ind(shifted, generator.normal(0, np.sqrt(2), (6, 20_000))).pvalue
    assert (p < 0.05).mean() == pytest.approx(0.8, abs=0.03)


def test_the_needed_seeds_are_those_of_equal_numbers_of_seeds_of_both_strategies() -> None:
    a, b = 1.5 + np.sin(np.arange(8.0)), np.array([-0.05, 0.0, 0.05])
    results = pd.concat([rows("A", list(np.exp(a))), rows("B", list(np.exp(b)))])
    variances, needed = np.array([a.var(ddof=1), b.var(ddof=1)]), 2
    while True:
        freedom = variances.sum() ** 2 / (variances**2 / (needed - 1)).sum()
        units = stats.t.isf(0.025, freedom) + stats.t.ppf(0.8, freedom)
        if units * np.sqrt(variances.sum() / needed) <= a.mean() - b.mean():
            break
        needed += 1
    runs = Runs(results, by_block({}).reindex(columns=[*results, "block", "sum", "count"]), pd.DataFrame())
    (text, *_) = power_of_the_tests(summarise(results, "A"), runs, "A")
    assert f"so many seeds of each strategy: {needed} (B)." in text

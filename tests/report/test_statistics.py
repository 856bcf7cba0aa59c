"""Statistics against SciPy, by hand, and on the numbers of the paper's Table 3."""

import numpy as np
import pandas as pd
import pytest
from scipy import stats

from kerple.report.statistics import against_baseline, holm, interval, mean_reciprocal_rank, summarise

LENGTHS = (512, 1024, 2048, 4096, 8192, 16384)
TABLE_3 = {  # OpenWebText2, mean of 5 seeds: KERPLE (Chi et al. 2022), Table 3
    "KerpleLog": (23.9, 22.0, 21.6, 21.2, 21.3, 21.4),
    "KerplePower": (23.9, 22.1, 21.9, 21.5, 21.6, 21.6),
    "ALiBi": (23.9, 22.4, 22.5, 22.2, 22.3, 22.5),
    "T5": (23.7, 21.9, 21.7, 22.5, 25.5, 31.4),
    "RoPE": (24.2, 32.8, 62.4, 111, 185, 269),
    "Sinusoidal": (33, 750, 5507, 14039, 22621, 30046),
}


def rows(
    strategy: str, values: list[float], metric: str = "ppl", protocol: str = "full", length: int = 64
) -> pd.DataFrame:
    cell = {"strategy": strategy, "metric": metric, "protocol": protocol, "length": length}
    return pd.DataFrame([{**cell, "seed": 1235 + i, "value": v} for i, v in enumerate(values)])


@pytest.fixture
def table_3() -> pd.DataFrame:
    """The paper's means with what its text says of their spread: a seed moves all strategies together (the test text
    differs), and each strategy a little (1% of its own value)."""
    generator = np.random.default_rng(0)
    shared = generator.normal(0, 0.02, 5)
    frames = []
    for strategy, means in TABLE_3.items():
        for length, mean in zip(LENGTHS, means, strict=True):
            own = generator.normal(0, 0.002, 5)
            factors = 1 + shared + own
            frames.append(rows(strategy, list(mean * factors / factors.mean()), length=length))
    return pd.concat(frames, ignore_index=True)


def test_holm_on_the_textbook_example() -> None:
    # sorted .005 .01 .03 .04 -> ×4, ×3, ×2, ×1 = .02 .03 .06 .04, made monotone: .02 .03 .06 .06
    np.testing.assert_allclose(holm([0.01, 0.04, 0.03, 0.005]), [0.03, 0.06, 0.06, 0.02])


def test_holm_leaves_out_what_was_not_tested_and_never_exceeds_one() -> None:
    np.testing.assert_allclose(holm([np.nan, 0.02, 0.9]), [np.nan, 0.04, 0.9])
    np.testing.assert_allclose(holm([0.8, 0.9]), [1.0, 1.0])


def test_paired_t_test_is_scipys_and_pairs_by_seed() -> None:
    ours, theirs = [21.9, 22.4, 22.0, 21.7], [21.5, 22.1, 21.4, 21.6]
    results = pd.concat(
        [rows("KerpleLog", theirs), rows("ALiBi", ours).iloc[::-1]]
    )  # the order of rows must not matter

    test = against_baseline(results, "KerpleLog").iloc[0]

    expected = stats.ttest_rel(ours, theirs)
    assert test["pairs"] == 4
    assert test["difference"] == pytest.approx(0.35)
    assert (test["t"], test["p"]) == (pytest.approx(expected.statistic), pytest.approx(expected.pvalue))
    by_hand = 0.35 / (np.std(np.subtract(ours, theirs), ddof=1) / 2)  # mean difference over its standard error, n = 4
    assert test["t"] == pytest.approx(by_hand)


def test_only_seeds_both_have_are_paired() -> None:
    results = pd.concat([rows("KerpleLog", [1.0, 2.0, 3.0]), rows("ALiBi", [1.1, 2.3])])
    test = against_baseline(results, "KerpleLog").iloc[0]
    assert test["pairs"] == 2
    assert test["p"] == pytest.approx(stats.ttest_rel([1.1, 2.3], [1.0, 2.0]).pvalue)


def test_holm_is_over_the_strategies_of_one_cell() -> None:
    generator = np.random.default_rng(1)
    results = pd.concat(
        rows(strategy, list(20 + generator.normal(0, 1, 3)), length=length)
        for strategy in ("KerpleLog", "ALiBi", "T5", "NoPE")
        for length in (64, 128)
    )
    for _, cell in against_baseline(results, "KerpleLog").groupby("length"):
        np.testing.assert_allclose(cell["p_holm"], holm(cell["p"]))
        assert len(cell) == 3


def test_degenerate_differences() -> None:
    same, shifted, one = [20.0, 21.0, 22.0], [21.0, 22.0, 23.0], [20.0]
    equal = against_baseline(pd.concat([rows("A", same), rows("B", same)]), "A").iloc[0]
    assert equal["difference"] == 0
    assert np.isnan(equal["p"])
    assert against_baseline(pd.concat([rows("A", same), rows("B", shifted)]), "A").iloc[0]["p"] == 0
    assert np.isnan(against_baseline(pd.concat([rows("A", one), rows("B", [21.0])]), "A").iloc[0]["p"])


def test_summary_of_the_papers_table_3(table_3: pd.DataFrame) -> None:
    summary = summarise(table_3, "KerpleLog").set_index(["strategy", "length"])

    for strategy, means in TABLE_3.items():
        np.testing.assert_allclose(summary.loc[strategy]["mean"], means)
    best = {length: set(g.index.get_level_values(0)) for length, g in summary[summary["best"]].groupby("length")}
    # as the paper's bold: T5 to twice the training length, log from there on
    assert best == {512: {"T5"}, 1024: {"T5"}, **{length: {"KerpleLog"} for length in LENGTHS[2:]}}
    marks = {s: {length for length in LENGTHS if summary.loc[(s, length), "significant"]} for s in TABLE_3}
    assert marks["KerpleLog"] == set()
    assert marks["Sinusoidal"] == set(LENGTHS)
    assert marks["RoPE"] >= set(LENGTHS[1:])
    assert marks["ALiBi"] == set(LENGTHS[1:])  # equal to log at 512, behind by 2% and more after it
    assert {4096, 8192, 16384} <= marks["T5"]
    assert 512 not in marks["KerplePower"]


def test_standard_deviation_has_n_minus_one_and_one_seed_has_none() -> None:
    results = pd.concat([rows("A", [1.0, 3.0]), rows("B", [2.0]), rows("C", [4.0])])
    summary = summarise(results, "A").set_index("strategy")
    assert summary.loc["A", "std"] == pytest.approx(np.sqrt(2))
    assert np.isnan(summary.loc["B", "std"])
    assert summary.loc["A", "best"]
    assert summary.loc["B", "best"]  # a tie is marked twice


def test_where_all_tie_none_is_best() -> None:
    assert not summarise(pd.concat([rows("A", [2.0]), rows("B", [2.0])]), "A")["best"].any()


def test_more_is_better_for_accuracies() -> None:
    results = pd.concat([rows("A", [0.2, 0.3], "exact_match", "copy"), rows("B", [0.8, 0.9], "exact_match", "copy")])
    assert list(summarise(results, "A").query("best")["strategy"]) == ["B"]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda r: (r, "KerpleLgo"), "baseline: got 'KerpleLgo', expected one of A"),
        (lambda r: (pd.concat([r, r]), "A"), "occurs twice"),
        (lambda r: (r.assign(metric="furlongs"), "A"), "metric: got 'furlongs'"),
    ],
)
def test_mistakes_are_named(change, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        summarise(*change(rows("A", [1.0, 2.0])))


def test_bootstrap_interval_of_one_seed_is_scipys_on_the_blocks() -> None:
    losses = np.random.default_rng(0).normal(3, 0.2, 40)

    low, high = interval(losses[None] * 64, np.full((1, 40), 64), resamples=999, seed=3)

    # equal counts: the mean of block means; exp is monotone, so its percentile interval is the exp of the mean's
    expected = stats.bootstrap((losses,), np.mean, n_resamples=999, method="percentile", rng=np.random.default_rng(3))
    np.testing.assert_allclose((low, high), np.exp(expected.confidence_interval))


def test_bootstrap_weighs_blocks_by_their_counts() -> None:
    sums, counts = np.array([[10.0, 40.0]]), np.array([[10, 20]])  # resamples: 1 (a, a), 50/30 (mixed), 2 (b, b)
    low, high = interval(sums, counts, np.asarray, level=0.2, resamples=4000)
    assert low == high == pytest.approx(50 / 30)
    assert interval(sums, counts, np.asarray, resamples=4000) == (pytest.approx(1), pytest.approx(2))


def test_ratio_of_paired_blocks_is_sharper_than_its_parts() -> None:
    generator = np.random.default_rng(0)
    hardness = generator.normal(3, 0.3, (1, 60)).repeat(3, 0)  # blocks differ far more than strategies do
    ours, theirs = hardness + 0.05 + generator.normal(0, 0.01, (3, 60)), hardness
    counts = np.ones_like(ours)
    low, high = interval(ours, counts, against=(theirs, counts))
    assert low < np.exp(0.05) < high
    assert high - low < 0.02
    alone = interval(ours, counts)
    assert alone[1] - alone[0] > 2


def test_one_block_has_no_interval_and_shapes_must_agree() -> None:
    assert np.isnan(interval([[1.0]], [[1]])).all()
    with pytest.raises(ValueError, match=r"expected \(seeds, blocks\)"):
        interval([[1.0, 2.0]], [[1, 2, 3]])


def test_mean_reciprocal_rank_by_hand() -> None:
    scores = pd.DataFrame({"copy": [0.9, 0.5, 0.1], "reverse": [0.2, 0.2, 0.0]}, index=["NoPE", "T5", "Sinusoidal"])
    expected = {
        "NoPE": (1 + 1 / 1.5) / 2,
        "T5": (1 / 2 + 1 / 1.5) / 2,
        "Sinusoidal": 1 / 3,
    }  # a tie shares ranks 1 and 2
    assert mean_reciprocal_rank(scores, "exact_match").to_dict() == pytest.approx(expected)
    with pytest.raises(ValueError, match="T5 lacks copy"):
        mean_reciprocal_rank(scores.mask(scores == 0.5), "exact_match")

"""Verdicts on hand-made results: the paper's own numbers, their opposite, too much noise, nothing at all."""

from pathlib import Path

import numpy as np
import pandas as pd
import pytest
from scipy import stats

from results.judge.__main__ import CLAIMS, judge, main, markdown
from results.judge.evidence import Answer, Evidence, Part, above, all_seeds, at_most, every, within

LENGTHS = (512, 1024, 2048, 4096, 8192, 16384)
SEEDS = (1235, 1236, 1237, 1238, 1239, 1240)  # fewer cannot agree on a count beyond chance
PAPER = {  # OpenWebText2: KERPLE (Chi et al. 2022), Tables 3, 5 and 6, completed where REFERENCE has no number
    "KerpleLog": (23.9, 22.0, 21.6, 21.2, 21.3, 21.4),
    "KerpleLog3": (23.85, 21.95, 21.6, 21.25, 21.3, 21.4),
    "KerplePower": (23.9, 22.1, 21.9, 21.5, 21.6, 21.6),
    "ALiBi": (23.9, 22.4, 22.5, 22.2, 22.3, 22.5),
    "T5": (23.7, 21.9, 21.7, 22.5, 25.5, 31.4),
    "RoPE": (24.2, 32.8, 62.4, 111, 185, 269),
    "Sinusoidal": (33, 750, 5507, 14039, 22621, 30046),
    "NoPE": (24.8, 26, 32, 60, 150, 400),
}
MORE = {
    "KerpleLog": PAPER["KerpleLog"],
    "KerpleBiasWeight": (24.1, 22.3, 21.9, 21.6, 21.6, 21.7),
    "KerpleBias3": (24.2, 75, 2500, 40000, 189216, 250000),
    "KerpleWeight2": (24.8, 23.5, 22.8, 22.6, 22.9, 23.2),
    "KerpleLog per layer": (23.9, 22.2, 22.5, 23.5, 25.5, 28.0),
}

SETTINGS = {
    "KerpleLog": PAPER["KerpleLog"],
    "KerpleLog 2x tokens": (22.9, 21.2, 21.1, 21.1, 21.5, 22.0),
    "Shaw clip 0": (30, 31, 32, 33, 34, 35),
    "Shaw clip 2": (24.0, 24, 25, 26, 27, 28),
    "Shaw clip 16": (24.1, 24, 25, 26, 27, 28),
    "Sinusoidal at 128": (34, 33, 700, 5000, 9000, 15000),
    "RoPE at 128": (24.5, 24.0, 31, 60, 110, 180),
    "T5 at 128": (23.9, 23.5, 21.8, 21.6, 21.9, 23.0),
}


def results(root: Path, comparison: str, curves: dict[str, tuple[float, ...]], noise: float = 0.0005) -> None:
    """A results.csv whose seeds move all strategies together by 2%, and each alone by ``noise``."""
    generator = np.random.default_rng(0)
    shared = 1 + generator.normal(0, 0.02, len(SEEDS))
    rows = [
        (strategy, seed, "ppl", "full", length, value * shared[i] * (1 + generator.normal(0, noise)))
        for strategy, curve in curves.items()
        for length, value in zip(LENGTHS, curve, strict=False)
        for i, seed in enumerate(SEEDS)
    ]
    folder = root / comparison
    folder.mkdir(parents=True, exist_ok=True)
    columns = ["strategy", "seed", "metric", "protocol", "length", "value"]
    pd.DataFrame(rows, columns=columns).to_csv(folder / "results.csv", index=False)


def analyses(root: Path) -> None:
    """Position-wise losses, kernels, shifts, terms and costs as the paper and the lecture describe them."""
    demo, generator = root / "adamw", np.random.default_rng(1)
    first = np.arange(0, 4096, 64)
    falling = 3.2 - 0.1 * np.log2(1 + first / 64)  # log with all context
    curves = {
        "KerpleLog": (falling, np.maximum(falling, falling[8])),
        "ALiBi": (np.maximum(falling, falling[8]) + 0.05, np.maximum(falling, falling[8]) + 0.05),
        "T5": (falling + 0.02, np.maximum(falling, falling[8])),
    }
    parts, kernels = [], []
    for strategy, (full, windowed) in curves.items():
        for seed in SEEDS:
            wobble = generator.normal(0, 1e-4, len(first))
            columns = {"first": first, "window": 512, "targets": 1000}
            columns |= {"nll_full": 1000 * (full + wobble), "nll_windowed": 1000 * (windowed + wobble)}
            parts.append(pd.DataFrame(columns).assign(strategy=strategy, seed=seed))
    pd.concat(parts).to_csv(demo / "position_wise.csv", index=False)
    for strategy, farthest in {
        "KerpleLog": (-1, -2, -9, -20),
        "KerplePower": (-30,) * 4,
        "ALiBi": (-9, -40, -90, -99),
    }.items():
        kernels += [(strategy, s, h, d, b * d / 2047) for s in SEEDS for h, b in enumerate(farthest) for d in (1, 2047)]
    pd.DataFrame(kernels, columns=["strategy", "seed", "head", "distance", "bias"]).to_csv(
        demo / "kernels.csv", index=False
    )
    for comparison, shifts in (
        ("adamw", {"Sinusoidal": 1.4, "RoPE": 1, "T5": 1, "ALiBi": 1, "KerpleLog": 1}),
        ("claims", {"Learned": 1.3}),
    ):
        rows = [
            (strategy, seed, shift, 20 * (factor if shift else 1) * (1 + generator.normal(0, 1e-6)))
            for strategy, factor in shifts.items() for seed in SEEDS for shift in (0, 48, 100)
        ]  # fmt: skip
        table = pd.DataFrame(rows, columns=["strategy", "seed", "shift", "ppl"])
        table.to_csv(root / comparison / "shift.csv", index=False)
    deviations = {"word-word": 1.0, "word-position": 0.2, "position-word": 0.1, "position-position": 1.4}
    rows = [("Sinusoidal", s, h, t, v + 0.01 * h) for s in SEEDS for h in range(4) for t, v in deviations.items()]
    columns = ["strategy", "seed", "head", "term", "standard_deviation"]
    pd.DataFrame(rows, columns=columns).to_csv(demo / "four_terms.csv", index=False)
    rows = [(s, seed, 26_000 / f) for s, f in {"NoPE": 1, "KerpleLog": 1.015}.items() for seed in SEEDS]
    pd.DataFrame(rows, columns=["strategy", "seed", "tokens_per_second"]).to_csv(demo / "costs.csv", index=False)


@pytest.fixture
def paper(tmp_path: Path) -> Path:
    results(tmp_path, "adamw", PAPER)
    results(tmp_path, "claims", MORE)
    results(tmp_path, "settings", SETTINGS)
    analyses(tmp_path)
    results(tmp_path, "sliding", {"ALiBi": PAPER["ALiBi"]})
    sliding = pd.read_csv(tmp_path / "sliding" / "results.csv")
    also = sliding.assign(protocol="sliding32", value=18 + sliding["length"] / 1e5 + sliding["seed"] / 1e5)
    pd.concat([sliding, also]).to_csv(tmp_path / "sliding" / "results.csv", index=False)
    accuracy = {"NoPE": 0.986, "T5": 0.771, "ALiBi": 0.289, "RoPE": 0.0, "Sinusoidal": 0.0}
    rows = [
        (s, seed, "exact_match", "repeated copy", n, v) for s, v in accuracy.items() for seed in SEEDS for n in (30, 40)
    ]
    (tmp_path / "tasks").mkdir()
    columns = ["strategy", "seed", "metric", "protocol", "length", "value"]
    pd.DataFrame(rows, columns=columns).to_csv(tmp_path / "tasks" / "results.csv", index=False)
    return tmp_path


def verdicts(root: Path) -> dict[str, str]:
    return {finding.claim.number: finding.verdict for finding in judge(Evidence(root))}


def test_the_papers_own_numbers_reproduce_its_claims(paper: Path) -> None:
    found = verdicts(paper)
    assert found.pop("C24") == "not tested"  # no strategy rounds its angles
    assert found == {f"C{n}": "reproduced" for n in range(1, 24)}


def test_there_are_24_claims_and_a_row_for_each(paper: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert [claim.number for claim in CLAIMS] == [f"C{n}" for n in range(1, 25)]
    assert all(claim.how for claim in CLAIMS)
    main([str(paper)])
    text = (paper / "CLAIMS.md").read_text()
    assert text == markdown(judge(Evidence(paper)))
    rows = [line for line in text.splitlines() if line.startswith("| C")]
    assert len(rows) == 24
    assert "23 reproduced, 0 contradicted, 0 not resolved, 1 not tested." in text
    assert rows[0].endswith("| [demo/table.md](demo/table.md) |")
    assert capsys.readouterr().out.strip() == text.strip()


def test_the_opposite_is_contradicted(paper: Path) -> None:
    swapped = PAPER | {"KerpleLog": PAPER["T5"], "T5": PAPER["KerpleLog"], "RoPE": PAPER["ALiBi"]}
    results(paper, "adamw", swapped)
    found = verdicts(Path(str(paper)))
    assert {c: found[c] for c in ("C1", "C2", "C3", "C4", "C5", "C6", "C16")} == dict.fromkeys(
        ("C1", "C2", "C3", "C4", "C5", "C6", "C16"), "contradicted"
    )


def test_noise_resolves_nothing(paper: Path) -> None:
    results(paper, "adamw", PAPER, noise=0.2)
    found = verdicts(paper)
    assert {found[c] for c in ("C2", "C3", "C4", "C6")} == {"not resolved"}


def test_one_seed_resolves_nothing(paper: Path) -> None:
    path = paper / "adamw" / "results.csv"
    table = pd.read_csv(path)
    table[table["seed"] == SEEDS[0]].to_csv(path, index=False)
    assert {verdicts(paper)[c] for c in ("C1", "C2", "C3", "C5", "C16")} == {"not resolved"}


def test_what_is_not_there_is_not_tested_and_says_why(tmp_path: Path) -> None:
    results(tmp_path, "adamw", {"KerpleLog": PAPER["KerpleLog"]})
    findings = {f.claim.number: f for f in judge(Evidence(tmp_path))}
    assert findings["C1"].verdict == "reproduced"
    assert findings["C2"].verdict == "not tested"
    assert findings["C2"].found == "no KerplePower in demo/results.csv"
    assert findings["C22"].found == "tasks/results.csv is not there"


def test_lengths_that_a_claim_is_about_and_that_are_not_there_leave_it_untested(paper: Path) -> None:
    results(paper, "adamw", {strategy: curve[:1] for strategy, curve in PAPER.items()})
    found = verdicts(paper)
    assert {found[c] for c in ("C1", "C2", "C4", "C5")} == {"not tested"}


def test_a_part_is_judged_by_its_interval() -> None:
    below = pd.Series([0.98, 0.981, 0.979])
    assert [x.answer for x in (at_most(below), above(below), within(below, 0.03), within(below, 0.01))] == [
        Answer.YES, Answer.NO, Answer.YES, Answer.NO,
    ]  # fmt: skip
    # mean log ratio -0.0100, standard deviation 0.0100, n = 3: half width 4.303 · 0.0100 / √3 = 0.0248: 0 is inside
    around = pd.Series(np.exp([-0.02, -0.01, 0.0]))
    assert at_most(around).answer is Answer.UNCLEAR
    assert at_most(around, 1.0150).answer is Answer.YES  # log 1.0150 = 0.0149 > -0.0100 + 0.0248
    assert at_most(around, 1.0145).answer is Answer.UNCLEAR  # 0.0144 is not
    test = stats.ttest_1samp([-0.02, -0.01, 0.0], 0, alternative="less")
    assert at_most(around).wrong == pytest.approx(test.pvalue)
    assert at_most(pd.Series([0.5])).answer is Answer.UNCLEAR
    assert at_most(pd.Series([1.0, 1.0])).answer is Answer.YES


def test_all_parts_must_be_shown_and_one_wrong_part_must_stand_out_among_them() -> None:
    shown, open_, wrong = Part(0.01, 0.99), Part(0.4, 0.6), Part(0.99, 0.01)
    assert every(shown, shown).answer is Answer.YES
    assert every(shown, open_).answer is Answer.UNCLEAR
    assert every(shown, wrong).answer is Answer.NO
    assert every(shown, wrong, open_).answer is Answer.UNCLEAR  # 3 · 0.01 > 0.025: one of three, by chance
    counts = ([True] * 6, [False] * 6, [True] * 5, [False] * 5, [True] * 6 + [False], [])
    assert [all_seeds(x).answer for x in counts] == [Answer.YES, Answer.NO, *[Answer.UNCLEAR] * 4]
    assert (all_seeds([True] * 6).wrong, all_seeds([False] * 6).right) == (1 / 64, 1 / 64)


def test_a_folder_that_is_not_there_is_named(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"results: got .*nowhere"):
        main([str(tmp_path / "nowhere")])


COMMITTED = Path(__file__).parents[2] / "results"


@pytest.mark.skipif(not (COMMITTED / "CLAIMS.md").exists(), reason="no results are committed")
def test_the_committed_verdicts_follow_from_the_committed_numbers() -> None:
    assert (COMMITTED / "CLAIMS.md").read_text() == markdown(judge(Evidence(COMMITTED)))

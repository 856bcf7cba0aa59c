"""Verdicts on runs with known numbers (the paper's, exchanged, noisy and missing ones), and the tests behind them."""

import math
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from scipy import stats

from kerple.compare.estimates import estimate
from kerple.measure import results_table
from kerple.measure.results_table import Row
from results.judge import challenge, copying, extension, interventions, plan
from results.judge.__main__ import TABLE, deciding, findings_page, judge, judge_all, markdown, tiers
from results.judge.evidence import Tier, angle
from results.judge.statements import Number, Part, chances, evaluate, parts, verdict

LENGTHS = (64, 128, 256, 512, 1024, 2048)  # with the paper's perplexities at 512 to 16,384
SEEDS = (1235, 1236, 1237, 1238, 1239, 1240)
PAPER = {  # OpenWebText2: KERPLE (Chi et al. 2022), Tables 3, 5 and 6; missing numbers are invented
    "KerpleLog": (23.9, 22.0, 21.6, 21.2, 21.3, 21.4),
    "KerpleLog3": (23.85, 21.95, 21.6, 21.25, 21.3, 21.4),
    "KerplePower": (23.9, 22.1, 21.9, 21.5, 21.6, 21.6),
    "ALiBi": (23.9, 22.4, 22.5, 22.2, 22.3, 22.5),
    "T5": (23.7, 21.9, 21.7, 22.5, 25.5, 31.4),
    "RoPE": (24.2, 32.8, 62.4, 111, 185, 269),
    "Sinusoidal": (33, 750, 5507, 14039, 22621, 30046),
    "NoPE": (24.8, 26, 32, 60, 150, 400),
}


def write(folder: Path, rows: list[Row], **config: object) -> None:
    """Write the record of a run with this configuration of its data."""
    results_table.add_to_results(folder, "extrapolation", rows, {})
    _, about = results_table.read(folder)
    about["run"] = {"config": {"data.init_args." + key: value for key, value in config.items()}, "cost": {}}
    about["run"]["config"]["trainer.max_steps"] = 1
    results_table.write_about(folder, about)


def runs(root: Path, name: str, curves: dict[str, tuple[float, ...]], noise: float = 0.0005, seeds: int = 6) -> Path:
    """Write records of runs on two blocks of text, and return ``root``.

    The losses of each run have independent errors with the standard deviation ``noise``.
    """
    generator = np.random.default_rng(0)
    for strategy, curve in curves.items():
        for seed in SEEDS[:seeds]:
            rows = [
                Row("ppl", "full", n, None, block, 100 * (loss + (0.1 if block else -0.1)), 100)
                for n, loss in zip(LENGTHS, np.log(curve) + generator.normal(0, noise, len(curve)), strict=False)
                for block in (0, 1)
            ]
            write(root / name / "runs" / strategy / f"seed-{seed}", rows, length=64)
    return root


def verdicts(root: Path, *claims: str) -> dict[str, str]:
    tier = tiers(root)["table3"]
    return {number: judge(TABLE["claims"][number], tier).verdict for number in claims}


@pytest.mark.slow  # .ci/run runs it
def test_the_papers_own_numbers_reproduce_its_claims(tmp_path: Path) -> None:
    runs(tmp_path, "earlier/table3", PAPER, seeds=3)
    assert set(verdicts(tmp_path, "C1", "C2", "C3", "C5", "C6", "C16", "C21").values()) == {"reproduced"}
    assert judge_all(tmp_path)["C26"]["table3"].missing == "no DAPE in results of earlier/table3, earlier/since-2023"
    assert "**reproduced**, 3 seeds" in markdown(tmp_path)


def test_exchanged_numbers_contradict_noisy_ones_resolve_nothing_missing_ones_are_not_tested(tmp_path: Path) -> None:
    exchanged = {"KerpleLog": "NoPE", "ALiBi": "T5", "RoPE": "KerplePower", "Sinusoidal": "KerpleLog3"}
    runs(tmp_path / "a", "earlier/table3", {strategy: PAPER[other] for strategy, other in exchanged.items()}, seeds=3)
    assert set(verdicts(tmp_path / "a", "C1", "C3", "C5").values()) == {"contradicted"}
    names = ("KerpleLog", "KerpleLog3", "KerplePower", "ALiBi")
    runs(tmp_path / "b", "earlier/table3", {name: PAPER[name] for name in names}, noise=0.5, seeds=3)
    assert set(verdicts(tmp_path / "b", "C2", "C3", "C6").values()) == {"not resolved"}
    runs(tmp_path / "c", "earlier/table3", {name: PAPER[name][:1] for name in ("KerplePower", *exchanged)}, seeds=1)
    assert set(verdicts(tmp_path / "c", "C1", "C2", "C5").values()) == {"not tested"}


@pytest.mark.parametrize(("learned", "expected"), [(0.99, "contradicted"), (0.3, "not tested")])
def test_a_claim_is_not_tested_if_its_condition_is_not_shown(tmp_path: Path, learned: float, expected: str) -> None:
    for seed in SEEDS:
        right = {5: 1000 * learned + seed % 5, 15: 100 + seed % 5}
        rows = [Row("exact_match", "addition", n, None, None, value, 1000) for n, value in right.items()]
        write(tmp_path / f"addition/runs/Abacus/seed-{seed}", rows, train_length=5)
    assert judge(TABLE["claims"]["C28b"], tiers(tmp_path)["addition"]).verdict == expected


def test_terms_of_a_strategy_are_paired_by_seed_and_strategies_are_independent(tmp_path: Path) -> None:
    tier = tiers(runs(tmp_path, "earlier/table3", {"A": PAPER["T5"], "B": PAPER["ALiBi"]}))["table3"]
    value = np.log(tier.runs.results.pivot(index="seed", columns=["strategy", "length"], values="value"))
    ours, theirs = value["A"][512] - value["A"][64], value["B"][64] - value["B"][512]
    (part,) = parts("A[8x] / A[1x] * B[1x] / B[512] <= tie", tier, 1.005)
    found = part.number.estimate
    assert (found.seeds, found.blocks, found.mean) == (6, 2, pytest.approx(ours.mean() + theirs.mean()))
    assert found.seed_variance == pytest.approx(stats.sem(ours) ** 2 + stats.sem(theirs) ** 2)
    assert (part.is_lower, part.bound) == (False, math.log(1.005))
    second_half = evaluate("position:A[4x..8x]", tier).estimate.mean
    assert second_half == pytest.approx(2 * value["A"][512].mean() - value["A"][256].mean())
    with pytest.raises(ValueError, match="expected a statement"):
        parts("A is worse", tier, 1.005)


def test_a_tier_leaves_out_seeds_and_documents_and_the_first_tested_tier_decides(tmp_path: Path) -> None:
    runs(tmp_path, "narrow", {name: PAPER[name] for name in ("KerpleLog", "ALiBi", "T5")})
    about = {"comparisons": ["narrow"], "trained": 64, "what": ""}
    whole = Tier(tmp_path, "table3", **about)
    part = Tier(tmp_path, "beyond-128", **about, first_seed=1238, left_out=[1])
    of_whole, of_part = (tier.losses("T5", "full", 64) for tier in (whole, part))
    assert list(of_part.of_seed.index) == [1238, 1239, 1240]
    assert of_part.of_seed.to_numpy() == pytest.approx(of_whole.of_seed.loc[1238:] - 0.1)  # the first block
    claim, missing = TABLE["claims"]["C3"], Tier(tmp_path, "main", ["main"], 64, "")
    found = {"table3": judge(claim, whole), "beyond-128": judge(claim, part), "main": judge(claim, missing)}
    assert deciding(claim, found) == "beyond-128"  # before the runs of main
    assert deciding(claim, found | {"main": found["table3"]}) == "main"


@pytest.mark.slow
def test_no_planned_result_is_read_before_all_runs_of_the_questions_are_finished(tmp_path: Path) -> None:
    finished = plan.seeds("main") | {"FoX": [1300]}  # of four seeds
    folders = [tmp_path / "main/runs" / name / f"seed-{seed}" for name, seeds in finished.items() for seed in seeds]
    for folder in sorted(folders, key=lambda folder: folder.parts[-2:] == ("KerplePower", "seed-1303")):
        assert plan.readable_runs(tmp_path, "main") == []
        results_table.write_about(folder, {})
    assert {run.strategy for run in plan.readable_runs(tmp_path, "main")} == finished.keys() - {"FoX"}
    assert "38 are finished. Missing seeds: `FoX` 1301, 1302, 1303; `KerpleLog` on rfc 1300" in plan.progress(tmp_path)


COMMITTED = Path(__file__).parents[2] / "results"
# .ci/run runs the slow tests of this file
SLOW_PAGES = {
    "CLAIMS.md": markdown,
    "README.md": findings_page,
    "challenge/README.md": challenge.page,
    "extend-by-training/answers.md": extension.page,
}
PAGES = {"copying/README.md": copying.committed_page, "interventions/README.md": interventions.committed_page}


@pytest.mark.parametrize("name", [*(pytest.param(name, marks=pytest.mark.slow) for name in SLOW_PAGES), *PAGES])
def test_a_committed_page_follows_from_the_committed_numbers(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(COMMITTED.parent)  # paths in comparison files are relative to the current folder
    assert (SLOW_PAGES | PAGES)[name](COMMITTED) == (COMMITTED / name).read_text()


def part(values: list[float], bound: float, lower: bool = False) -> Part:
    """The comparison with a bound of a number that has these values, one for each seed."""
    logs = np.log(np.asarray(values))[:, None]
    return Part("", Number(estimate((logs, np.ones_like(logs)))), math.log(bound), lower)


def test_a_part_is_judged_by_scipys_one_sided_tests() -> None:
    values = [0.98, 1.01, 0.99, 0.985]
    for bound in (0.97, 1.0, 1.02):
        below = stats.ttest_1samp(np.log(values), math.log(bound), alternative="less").pvalue
        assert part(values, bound).chances == pytest.approx((below, 1 - below))
        assert part(values, bound, lower=True).chances == pytest.approx((1 - below, below))
    assert part([1.0, 1.0], 1.0).chances == (0.0, 1.0)  # `<=` allows a number equal to the bound, `<` does not
    assert replace(part([1.0, 1.0], 1.0), strict=True).chances == (1.0, 0.0)
    assert part([0.5], 1.0).chances == (1.0, 1.0)
    assert part([math.inf, math.inf], 1.0).chances == (1.0, 1.0)


def test_all_parts_must_be_shown_and_a_contradicted_part_is_corrected_for_their_number() -> None:
    shown, unresolved, wrong = (part([m, m * 1.01, m * 0.99], 1.0) for m in (0.8, 1.001, 1.06))
    assert [max(p.chances) > 0.99 for p in (shown, wrong)] == [True, True]
    assert verdict([shown, shown]) == "reproduced"
    assert verdict([shown, unresolved]) == "not resolved"
    assert verdict([shown, wrong]) == "contradicted"
    assert 0.025 / 8 < wrong.chances[1] < 0.025 / 2
    assert verdict([shown, wrong, *[unresolved] * 6]) == "not resolved"  # Bonferroni over eight parts
    assert chances([shown, wrong]) == (max(shown.chances[0], wrong.chances[0]), 2 * wrong.chances[1])


def test_the_interval_of_a_fraction_is_that_of_its_angle_and_ends_at_1() -> None:
    fractions = np.array([0.80, 0.93, 1.0, 1.0, 0.96])
    low, high = stats.ttest_1samp(angle(fractions), 0).confidence_interval()
    assert low < math.pi / 2 < high  # π/2 is the angle of the fraction 1
    number = Number(estimate((angle(fractions)[:, None], np.ones((5, 1)))), is_angle=True, terms=1)
    assert str(number) == f"{math.sin(angle(fractions).mean()) ** 2:.3g} [{math.sin(low) ** 2:.3g}, 1]"

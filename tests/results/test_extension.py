"""The answers to D4 on made-up losses with known answers, and on records of main that stand for those of stages."""

import shutil
from collections.abc import Mapping
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
from numpy.typing import NDArray
from scipy import stats

from kerple.compare.run_discovery import recorded_runs
from kerple.measure import results_table
from results.judge import questions
from results.judge.evidence import Value
from results.judge.extension import LONGER, STAGES, WITH_ROPE, answers, conclusion, stage_answers
from results.judge.plan import readable_runs

RESULTS = Path(__file__).parents[2] / "results"
SEEDS = (1600, 1601, 1602)
OF_PARENTS = np.array([0.0, 0.5, -0.6])  # effects of the parents, which all stages of a seed share
# own loss, windowed and full loss at 2,048 tokens, and full loss at 128 tokens
CELLS = (("far_own", 2048), ("windowed", 2048), ("full", 2048), ("full", 128))
MAIN = {"KerpleLog": (2.3, 2.5, 2.4, 2.8), "RNoPE-SWA temperature": (2.3, 2.5, 2.4, 2.7)}
PARENTS = {"parent": (4.5, 2.5, 4.2, 2.8), "RoPE 128": (4.4, 2.5, 4.1, 2.82)}
STAGE = (2.5, 2.6, 2.5, 2.8)  # extends, with the loss of the parent at 128 tokens
MADE = MAIN | PARENTS | dict.fromkeys(STAGES, STAGE)


class Made:
    """Runs with these losses, in place of a `Tier`. Those of main have no effect of a parent."""

    trained = 128

    def __init__(self, losses: Mapping[str, tuple[float, ...]], samples: str, spread: float = 0.001) -> None:
        self.samples, generator = samples, np.random.default_rng(0)
        self.values: dict[tuple[str, str, int], NDArray[np.float64]] = {}
        for label, of_label in losses.items():
            for cell, loss in zip(CELLS, of_label, strict=True):
                noise = generator.normal(0, spread, 3)
                self.values[label, *cell] = loss + noise + OF_PARENTS * (label not in MAIN)

    def losses(self, strategy: str, protocol: str, length: int) -> Value:
        return Value(pd.Series(self.values[strategy, protocol, length], SEEDS), "")


def found(changes: Mapping[str, tuple[float, ...]], spread: float = 0.001) -> pd.DataFrame:
    of_parents, with_main = (Made(MADE | changes, samples, spread) for samples in ("parents", "seeds"))
    return stage_answers(of_parents, with_main)


def test_stages_are_compared_with_the_parent_of_their_seed_by_scipys_paired_tests() -> None:
    made = Made(MADE, "parents")
    for stage, answer in questions.answers(made, LONGER).items():
        pairs = [("parent", "far_own", stage, "far_own"), ("RoPE 128", "far_own", stage, "far_own")]
        pairs += [(stage, "windowed", stage, "full")]
        p = [
            stats.ttest_rel(made.values[more, a, 2048], made.values[less, b, 2048], alternative="greater").pvalue
            for more, a, less, b in pairs
        ]
        assert answer.p == pytest.approx(max(p), rel=1e-6)
        assert answer.answer == "yes"  # the parents differ by more than 1 nat, but not their differences from a stage


def test_each_column_has_its_own_answer() -> None:
    table = found(
        {
            "KerpleLog 128": (4.4, 2.6, 2.5, 2.8),  # not below RoPE 128
            "NoPE 512": (2.5, 2.5, 2.5, 2.8),  # no gain
            "RNoPE-SWA 128": (2.3, 2.6, 2.5, 2.83),  # 1.1% above the parent at 128 tokens
        }
    )
    assert list(table["longer"]) == ["yes", "no", "yes", "no", "yes", "yes"]
    assert list(table["short"]) == ["yes", "yes", "no", "yes", "yes", "yes"]
    # 2.1 nats above main; the others are 0 or 0.2 nats above it, which is less than the differences between parents
    others = "inconclusive"
    assert list(table["from scratch"]) == ["not tested", "no", others, "not tested", others, others]
    assert conclusion(table) == "yes (NoPE 128, KerpleLog 512, RNoPE-SWA 512)"
    assert set(found({}, spread=0.3)["longer"]) == {"inconclusive"}


def test_stages_are_compared_with_main_over_independent_seeds(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tests.results.test_extension.OF_PARENTS", np.zeros(3))
    table = found({"KerpleLog 128": (2.34, 2.6, 2.5, 2.8), "KerpleLog 512": (2.36, 2.6, 2.5, 2.8)})
    # 0.04, 0.2, 0.06 and 0.2 nats above main; the bound is 0.05
    assert list(table["from scratch"]) == ["not tested", "yes", "no", "not tested", "no", "no"]


@pytest.mark.parametrize(
    ("longer", "short", "expected"),
    [
        (["no", "yes", "yes"], ["yes", "no", "yes"], "yes (c)"),
        (["no", "yes", "yes"], ["yes", "no", "inconclusive"], "at a price (b)"),
        (["no", "no", "no"], ["yes", "yes", "no"], "no"),
        (["no", "no", "inconclusive"], ["yes", "yes", "no"], "inconclusive"),
        (["no", "no", "yes"], ["yes", "yes", "inconclusive"], "inconclusive"),
    ],
)
def test_the_answer_to_d4_is_that_of_one_stage_or_of_all(longer: list[str], short: list[str], expected: str) -> None:
    assert conclusion(pd.DataFrame({"longer": longer, "short": short}, index=["a", "b", "c"])) == expected


def test_missing_runs_are_named_in_one_line_in_place_of_an_answer(tmp_path: Path) -> None:
    line = answers(tmp_path)
    assert line.startswith("D4 is not answered: 33 of 33 runs are missing: parent 1600, 1601, 1602; RoPE 128 1600, ")
    assert "\n" not in line


def test_runs_that_are_not_planned_are_not_read(tmp_path: Path) -> None:
    for label, seed in (("parent", 1600), ("parent", 1), ("mine", 1600)):
        results_table.write_about(tmp_path / f"extend-by-training/runs/{label}/seed-{seed}", {})
    assert [(run.strategy, run.seed) for run in readable_runs(tmp_path, "extend-by-training")] == [("parent", 1600)]


@pytest.mark.slow
def test_records_of_main_in_place_of_those_of_stages_have_the_differences_of_main(tmp_path: Path) -> None:
    of_stage = {"NoPE": "ALiBi", "KerpleLog": "KerpleLog", "RNoPE-SWA": "RNoPE-SWA temperature"}
    replaced = {stage: of_stage[stage.rpartition(" ")[0]] for stage in STAGES}
    replaced |= dict.fromkeys(("parent", "RoPE 128", *WITH_ROPE), "RoPE")
    (tmp_path / "main").symlink_to(RESULTS / "main")
    folders = {(run.strategy, run.seed): run.folder for run in recorded_runs(RESULTS / "main")}
    for stage, name in replaced.items():
        for seed in SEEDS:
            target = tmp_path / f"extend-by-training/runs/{stage}/seed-{seed}"
            shutil.copytree(folders[name, seed - 300], target)
    first, *lines = answers(tmp_path).splitlines()
    assert first.endswith("** at a price (KerpleLog 128, KerpleLog 512)")
    stages, main = "\n".join(lines).split("\n\n")
    rows = {row.split(" | ")[0].strip("| "): row.strip("| ").split(" | ")[1:] for row in stages.splitlines()}
    assert rows["RNoPE-SWA 512"][6] == "+0.091 [+0.049, +0.133]"  # the gain in main/table.md, of the same three seeds
    assert rows["YaRN 512"][:6] == ["–", "–", "–", *["+0.000 [+0.000, +0.000]"] * 3]
    own = {}
    for name in ("KerpleLog", "RoPE"):
        tables = [results_table.read(folders[name, seed - 300])[0] for seed in SEEDS]
        far = [table[(table["protocol"] == "far_own64") & (table["length"] == 2048)] for table in tables]
        own[name] = np.mean([table["sum"].sum() / table["count"].sum() for table in far])
    assert rows["KerpleLog 128"][3].startswith(f"−{own['RoPE'] - own['KerpleLog']:.3f} [−")
    assert "| parent minus RoPE | +0.000 [" in main

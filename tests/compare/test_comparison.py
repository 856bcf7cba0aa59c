"""What follows from a comparison file, without running anything."""

from pathlib import Path
from typing import Any

import pytest

from kerple.compare.comparison import Comparison, Strategy, as_flags


@pytest.fixture
def base(tmp_path: Path) -> str:
    path = tmp_path / "base.yaml"
    path.write_text("{}")
    return str(path)


def comparison(path: str, **changes: Any) -> Comparison:
    per_layer = Strategy("KerpleLog", {"floor": 0.05}, {"data.length": 128})
    settings: dict[str, Any] = {"name": "small", "base": [path], "seeds": [1, 2], "baseline": "KerpleLog"}
    settings["strategies"] = {"KerpleLog": None, "per layer": per_layer}
    return Comparison(**settings | changes)


def test_every_strategy_and_seed_is_one_run_with_its_own_flags(base: str) -> None:
    jobs = comparison(base, flags={"trainer.max_steps": 9}, test={"config": base}).jobs()

    assert [(job.label, job.seed) for job in jobs] == [
        ("KerpleLog", 1),
        ("per layer", 1),
        ("KerpleLog", 2),
        ("per layer", 2),
    ]
    assert jobs[3].fit == (
        f"--config={base}",
        "--trainer.max_steps=9",
        "--data.length=128",
        "--seed_everything=2",
        "--data.seed=2",
        "--run_dir=logs/compare/small/per layer/seed-2",
        "--model.position=KerpleLog",
        "--model.position.floor=0.05",
    )
    assert jobs[3].test == (f"--config={base}", "--run_dir=logs/compare/small/per layer/seed-2/test")
    assert str(jobs[0].beside(".json")) == "logs/compare/small/KerpleLog/seed-1.json"


def test_parts_have_runs_of_their_own(base: str) -> None:
    jobs = comparison(base, parts={"copy": [base], "reverse": [base]}, test_folder="again").jobs()
    assert [(job.part, job.label, job.seed) for job in jobs[:3]] == [
        ("copy", "KerpleLog", 1),
        ("copy", "per layer", 1),
        ("reverse", "KerpleLog", 1),
    ]
    assert len(jobs) == 8
    assert jobs[2].fit[:2] == (f"--config={base}", f"--config={base}")
    assert str(jobs[2].test_folder) == "logs/compare/small/reverse/KerpleLog/seed-1/again"
    assert jobs[2].name == "reverse KerpleLog seed 1"


def test_flags_of_every_type() -> None:
    assert as_flags({"a": "text", "b": 1e-3, "c": None, "d": True, "e": [1, 2], "f": {"g": "h"}}) == [
        "--a=text", "--b=0.001", "--c=null", "--d=true", "--e=[1, 2]", '--f={"g": "h"}',
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"seeds": [1, 1]}, r"seeds: got \[1\] twice"),
        ({"seeds": []}, "seeds: got none"),
        ({"strategies": {}}, "strategies: got none"),
        ({"seeded": []}, "seeded: got none"),
        ({"baseline": "KerpleLgo"}, "baseline: got 'KerpleLgo', expected one of the strategies: KerpleLog, per layer"),
        ({"base": ["missing.yaml"]}, r"base: got .missing\.yaml., which is no file"),
        ({"test": {"config": "missing.yaml"}}, r"config: got .missing\.yaml., which is no file"),
        (
            {"strategies": {"KerpleLog": None, "a/b": None}},
            "strategies: got 'a/b', expected the plain name of a folder",
        ),
        ({"strategies": {"KerpleLog": None, "..": None}}, r"strategies: got '\.\.'"),
        ({"parts": {"/tmp": []}}, "parts: got '/tmp'"),
        ({"test_folder": "."}, r"test_folder: got '\.'"),
        (
            {"flags": {"seed_everything": 7}},
            r"^compare: flags: got seed_everything, .* use seeds instead, or take it out of seeded$",
        ),
        ({"flags": {"data.init_args.seed": 7}}, r"flags: got data\.init_args\.seed, .* use seeds instead"),
        ({"flags": {"model.seed": 7}, "seeded": ["model.seed"]}, r"flags: got model\.seed, .* use seeds instead"),
        (
            {"strategies": {"KerpleLog": Strategy(flags={"data.seed": 7})}},
            r"strategies: KerpleLog: flags: got data\.seed, .* use seeds instead",
        ),
        ({"flags": {"run_dir": "here"}}, "flags: got run_dir, .* use runs instead"),
        ({"flags": {"ckpt_path": "last"}}, "flags: got ckpt_path, .* stopped runs are resumed without it"),
        ({"flags": {"model.position": "T5"}}, "flags: got model.position, .* use position and options of a strategy"),
        ({"flags": {"model.position.clip": 2}}, r"flags: got model\.position\.clip, .* use position and options"),
        (
            {"strategies": {"KerpleLog": Strategy(seeds=3)}},
            r"strategies: KerpleLog: seeds: got 3, expected 1\.\.2, how many",
        ),
        ({"test": {"run_dir": "here"}}, "test: got run_dir, .* use test_folder instead"),
        ({"test": {"ckpt_path": "a.ckpt"}}, "test: got ckpt_path, .* each run's last checkpoint is tested"),
    ],
)
def test_mistakes_are_named_before_anything_runs(base: str, changes: dict, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        comparison(base, **changes)


def test_a_strategy_may_have_the_first_seeds_only(base: str) -> None:
    jobs = comparison(base, seeds=[3, 1, 2], strategies={"KerpleLog": None, "T5": Strategy(seeds=2)}).jobs()
    assert [(job.label, job.seed) for job in jobs] == [
        ("KerpleLog", 3), ("T5", 3), ("KerpleLog", 1), ("T5", 1), ("KerpleLog", 2),
    ]  # fmt: skip


def test_a_pretrained_model_is_tested_once_and_fitted_never(base: str) -> None:
    yarn = Strategy(hf="folder/model", options={"scaling": "yarn", "factor": 2}, flags={"data.length": 9})
    jobs = comparison(base, strategies={"KerpleLog": None, "YaRN": yarn}, test={"config": base}).jobs()
    assert [(job.label, job.seed, job.pretrained) for job in jobs] == [
        ("KerpleLog", 1, False),
        ("YaRN", 1, True),
        ("KerpleLog", 2, False),
    ]
    assert jobs[1].test == (
        "--hf=folder/model",
        "--model.scaling=yarn",
        "--model.factor=2",
        "--data.length=9",
        f"--config={base}",
        "--run_dir=logs/compare/small/YaRN/seed-1/test",
    )
    alone = comparison(base, base=[], strategies={"YaRN": yarn}, baseline="YaRN")
    assert len(alone.jobs()) == 1
    with pytest.raises(ValueError, match="compare: base: got none"):
        comparison(base, base=[])

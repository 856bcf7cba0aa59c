"""The comparisons that come with the project: every run of theirs parses, and runs that are shared are the same."""

from pathlib import Path

import pytest
import yaml
from kerple.cli.resolve import check_test, resolve
from kerple.compare.flat import flat

from kerple.base.errors import UserError
from kerple.cli import compare
from kerple.compare.comparison import Comparison, Strategy

ROOT = Path(__file__).parents[2]
COMPARISONS = sorted(
    p for p in (ROOT / "configs/compare").glob("*.yaml") if "strategies" in yaml.safe_load(p.read_text())
)


def load(path: Path) -> Comparison:
    settings = yaml.safe_load(path.read_text())
    settings["strategies"] = {label: Strategy(**(what or {})) for label, what in settings["strategies"].items()}
    return Comparison(**settings)


@pytest.fixture(autouse=True)
def _root(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)  # paths in comparisons are relative to where the command is typed


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A tiny Llama, for models that another command installs or makes first."""
    pytest.importorskip("transformers")
    from tests.hf.tiny import saved

    return str(saved(tmp_path_factory.mktemp("model"), "llama"))


def with_model(comparison: Comparison, model: str) -> Comparison:
    """The comparison with this model in place of every pretrained one."""
    for strategy in filter(None, comparison.strategies.values()):
        strategy.hf = strategy.hf and model
    if "weights" in comparison.flags:
        comparison.flags["weights"] = model
    return comparison


PARSED: set[str] = set()  # strategies, over all comparisons


@pytest.mark.parametrize("path", COMPARISONS, ids=lambda path: path.stem)
def test_every_run_parses_and_has_a_folder_of_its_own(path: Path, model: str) -> None:
    comparison = with_model(load(path), model)
    jobs = comparison.jobs()
    assert len({job.directory for job in jobs}) == len(jobs)
    parts = set(comparison.parts) or {""}
    for job in (job for job in jobs if job.seed == comparison.seeds[0]):
        wanted = comparison.strategies[job.label] or Strategy()
        if repr((job.label, wanted)) in PARSED and job.part not in parts:
            continue  # each part of a comparison once, and each strategy: the configs below it know of none
        parts.discard(job.part)
        PARSED.add(repr((job.label, wanted)))
        config = resolve(job)
        if job.pretrained:
            assert {"path": model, **wanted.options}.items() <= config["model"].items()
            continue
        assert config["model"]["position"]["class_path"].endswith(f".{wanted.position or job.label}")
        assert config["seed_everything"] == job.seed
    if not jobs[0].pretrained:
        check_test(jobs[0], resolve(jobs[0]))


def test_runs_that_comparisons_share_are_the_same_runs() -> None:
    seen: dict[Path, dict] = {}
    shared = 0
    for path in COMPARISONS:
        for job in (job for job in load(path).jobs() if job.label == "KerpleLog" and job.seed == 1236):
            config = flat(resolve(job))
            shared += job.directory in seen
            assert seen.setdefault(job.directory, config) == config, path
    assert shared >= 2  # claims and sliding test those of adamw


def test_a_flag_that_does_not_exist_is_named(tmp_path: Path) -> None:
    comparison = load(ROOT / "configs/compare/demo.yaml")
    comparison.flags["model.leyers"] = 3
    with pytest.raises(ValueError, match=r"(?s)compare: KerpleLog seed 1235: .*model\.leyers"):
        resolve(comparison.jobs()[0])


@pytest.mark.parametrize("mistake", ["trainer.precison: 32-true", "config: CONFIG"])
def test_a_mistake_in_the_flags_of_a_test_is_named_before_anything_is_fitted(tmp_path: Path, mistake: str) -> None:
    config = tmp_path / "test.yaml"
    config.write_text("trainer: {precison: 32-true}")
    settings = yaml.safe_load((ROOT / "configs/compare/quick.yaml").read_text())
    settings["test"] = yaml.safe_load(mistake.replace("CONFIG", str(config)))
    (tmp_path / "compare.yaml").write_text(yaml.safe_dump(settings | {"runs": str(tmp_path / "runs")}))
    with pytest.raises(UserError, match=r"compare: test: .*precison"):
        compare.main(["--config", str(tmp_path / "compare.yaml")])
    assert not (tmp_path / "runs").exists()

"""Every configuration in configs/ parses and builds what it says."""

import csv
import json
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from jsonargparse import ArgumentParser, Namespace
from pytorch_lightning import LightningDataModule
from pytorch_lightning.strategies import Strategy
from torch.distributed.fsdp.wrap import ModuleWrapPolicy

from kerple.base.precision import AutoTrainer
from kerple.cli.lightning import CLI, StoreConfig
from kerple.training.language_model import LanguageModel

CONFIGS = Path(__file__).parents[1] / "configs"
PAPER = sorted((CONFIGS / "paper").glob("*.yaml"))
POSITIONS = sorted((CONFIGS / "position").glob("*.yaml"))


class Parsed(CLI):
    """The command line up to the point where the data, the model and the trainer would be built."""

    def instantiate_classes(self) -> None: ...

    def _run_subcommand(self, subcommand: str) -> None: ...


def parsed(*arguments: str) -> Any:
    cli = Parsed(
        LanguageModel,
        LightningDataModule,
        trainer_class=AutoTrainer,
        subclass_mode_data=True,
        save_config_callback=StoreConfig,
        auto_configure_optimizers=False,
        args=["fit", *arguments],
    )
    return cli.config.fit


def build_on_meta(config: Namespace) -> LanguageModel:
    parser = ArgumentParser()
    parser.add_class_arguments(LanguageModel, "model")
    with torch.device("meta"):
        return parser.instantiate_classes(parser.parse_object({"model": config.model.as_dict()})).model


@pytest.mark.parametrize("path", PAPER, ids=lambda path: path.stem)
def test_the_paper_s_model_has_the_paper_s_size(path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    # its size does not depend on the corpus
    for position, extra in (("NoPE", 0), ("KerpleLog", 24)) if path == PAPER[0] else (("KerpleLog", 24),):
        model = build_on_meta(parsed("--config", str(path), "--model.position", position))
        assert sum(p.numel() for p in model.parameters()) == 162_322_944 + extra


def test_the_paper_s_configs_cover_its_corpora_and_use_their_data() -> None:
    assert {path.stem for path in PAPER} == {"openwebtext2", "github", "arxiv"}
    for path in PAPER:
        alone = yaml.safe_load((CONFIGS / "data" / path.name).read_text())
        assert yaml.safe_load(path.read_text())["data"] == alone["data"]


@pytest.mark.parametrize("path", PAPER, ids=lambda path: path.stem)
def test_the_paper_s_recipe(path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    config = parsed("--config", str(path))
    data, model, trainer = config.data.init_args, config.model, config.trainer
    assert data.batch_size * data.length * trainer.max_steps == 819_200_000
    assert (model.lr, tuple(model.betas), model.adam_eps, model.weight_decay) == (6e-4, (0.9, 0.999), 1e-8, 0)
    assert (model.warmup, trainer.gradient_clip_val, model.dropout) == (0.01, 1.0, 0)
    assert tuple(data.shares) == (0.949, 0.05, 0.001)
    extrapolation = next(c for c in trainer.callbacks if c.class_path.endswith("Extrapolation"))
    assert extrapolation.init_args.lengths == [512 * 2**i for i in range(6)]


def test_the_demo_s_config_says_what_the_demo_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    config = parsed("--config", str(CONFIGS / "demo.yaml"))
    data = config.data.init_args
    assert (data.vocabulary, data.length) == (2048, 64)
    assert data.batch_size * data.length * config.trainer.max_steps <= 2_500_000
    assert sum(p.numel() for p in build_on_meta(config).parameters()) == pytest.approx(1.3e6, rel=0.05)


def test_the_demo_s_recipe_is_one_that_the_search_has_run() -> None:
    demo = yaml.safe_load((CONFIGS / "demo.yaml").read_text())
    values = {f"model.{key}": value for key, value in demo["model"].items()}
    values |= {f"data.{key}": value for key, value in demo["data"]["init_args"].items()}
    with (CONFIGS.parent / "benchmarks/recipe/runs.csv").open(newline="") as file:
        tried = [json.loads(row["settings"]) for row in csv.DictReader(file) if row["stage"] == "confirm"]
    assert any(all(values[key] == value for key, value in settings.items()) for settings in tried)


def test_the_committed_comparisons_keep_the_recipe_their_runs_were_trained_with() -> None:
    """What `results/adamw/` was made with, so that a run added to it differs by its strategy alone."""
    stored = yaml.safe_load((CONFIGS / "adamw.yaml").read_text())
    assert stored["model"] == {"optimizer": "adamw", "lr": 3e-3, "betas": [0.9, 0.999]}
    assert stored["data"]["init_args"] == {"batch_size": 128}
    assert stored["trainer"]["max_steps"] == 305
    for name in ("adamw", "claims", "settings", "sliding"):
        assert yaml.safe_load((CONFIGS / "compare" / f"{name}.yaml").read_text())["base"][-1] == "configs/adamw.yaml"


@pytest.mark.parametrize("path", POSITIONS, ids=lambda path: path.stem)
def test_a_position_s_config_is_laid_over_the_demo_s(path: Path, tmp_path: Path, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    config = parsed("--config", str(CONFIGS / "demo.yaml"), "--config", str(path))
    asked, network = yaml.safe_load(path.read_text())["model"]["position"], build_on_meta(config).network

    assert {type(p).__name__ for p in network.positions} == {asked["class_path"]}
    if asked["class_path"] == "Layers":
        kinds, windows = zip(*((type(p.position).__name__, p.window) for p in network.positions), strict=True)
        options = asked["init_args"]
        assert kinds == (options["near"],) * 3 + (options["far"],)
        assert windows == (options.get("window", network.shape.length),) * 3 + (None,)


def test_a_part_that_is_no_strategy_is_named(capsys) -> None:
    together = ["--model.position", "Together", '--model.position.parts=["SSMaxx"]']
    with pytest.raises(SystemExit) as ended:
        parsed("--config", str(CONFIGS / "demo.yaml"), *together)

    assert ended.value.code == 2
    assert "SSMaxx" in capsys.readouterr().err


LAID_OVER = sorted(path for folder in ("model", "trainer") for path in (CONFIGS / folder).glob("*.yaml"))


@pytest.mark.parametrize("path", LAID_OVER, ids=lambda path: f"{path.parent.name}/{path.stem}")
def test_a_model_or_a_machine_goes_on_top_of_the_demo(path: Path, tmp_path: Path, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    config = parsed("--config", str(CONFIGS / "demo.yaml"), f"--{path.parent.name}", str(path))
    asked, found = yaml.safe_load(path.read_text()), config[path.parent.name].as_dict()
    for key in asked.keys() - {"position", "strategy", "callbacks"}:
        if asked[key] == "auto" and key == "precision":  # it is chosen for this machine
            assert found[key] in ("32-true", "bf16-mixed")
        else:
            assert json.dumps(found[key]) == json.dumps(asked[key]), key


def test_fsdp_wraps_block_by_block(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    config = parsed("--config", str(CONFIGS / "demo.yaml"), "--trainer", str(CONFIGS / "trainer" / "fsdp.yaml"))
    parser = ArgumentParser()
    parser.add_subclass_arguments(Strategy, "strategy")
    given = parser.parse_object({"strategy": config.trainer.strategy.as_dict()})
    strategy = parser.instantiate_classes(given).strategy
    assert isinstance(strategy.kwargs["auto_wrap_policy"], ModuleWrapPolicy)


@pytest.mark.parametrize("name", ["gpu", "gpu-toy", "small"])
def test_a_whole_configuration_builds(name: str, tmp_path: Path, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    build_on_meta(parsed("--config", str(CONFIGS / f"{name}.yaml")))

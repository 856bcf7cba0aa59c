"""Every configuration that is shipped parses, alone or laid over the one that it belongs to."""

from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from jsonargparse import ArgumentParser
from pytorch_lightning.strategies import Strategy

from kerple.base.errors import UserError
from kerple.cli.lightning import CLI
from kerple.training.language_model import LanguageModel
from kerple.training.sharding import ShardedBlocks
from tests.parsers import build_parsers_once

CONFIGS = Path(__file__).parents[1] / "configs"
ALONE = ("demo", "gpu", "nope", "paper", "small")


def files(folder: str) -> list[str]:
    return sorted(str(path) for path in (CONFIGS / folder).glob("*.yaml"))


class Parsed(CLI):
    """The command line up to the point where the data, the model and the trainer would be built."""

    def instantiate_classes(self) -> None: ...

    def _run_subcommand(self, subcommand: str) -> None: ...


@pytest.fixture(autouse=True)
def _in_a_folder_of_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    build_parsers_once(monkeypatch)
    monkeypatch.chdir(tmp_path)


def parsed(*arguments: str) -> Any:
    return Parsed(LanguageModel, ["fit", *arguments], "").config.fit


@cache
def model_parser() -> ArgumentParser:
    parser = ArgumentParser()
    parser.add_class_arguments(LanguageModel, "model")
    return parser


def built(model: dict[str, Any]) -> LanguageModel:
    """The model that a configuration describes, without numbers."""
    with torch.device("meta"):
        return model_parser().instantiate_classes(model_parser().parse_object({"model": model})).model


def test_every_configuration_parses_and_builds_a_model() -> None:
    """Each file is checked as it is read, and one parse takes a second: overlays are laid over each other."""
    for name in ALONE:
        built(parsed("--config", str(CONFIGS / f"{name}.yaml")).model.as_dict())
    demo, tasks = str(CONFIGS / "demo.yaml"), str(CONFIGS / "tasks" / "base.yaml")
    overlays = [*CONFIGS.glob("retrofit*.yaml"), *files("analyses")]
    parsed("--config", demo, *(f"--config={path}" for path in overlays))
    parsed("--config", tasks, *(f"--config={path}" for path in files("tasks") if path != tasks))
    parsed("--config", demo, *(f"--{section}={path}" for section in ("model", "trainer") for path in files(section)))
    for path in files("position"):
        model = yaml.safe_load(Path(path).read_text())["model"]
        built({"vocabulary": 20, "length": 64, "layers": 4, "dim": 16, "heads": 2} | model)


def test_a_wrong_name_in_a_configuration_below_others_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "wrong.yaml").write_text("model: { layer: 3 }")
    demo = str(CONFIGS / "demo.yaml")
    with pytest.raises(UserError):
        parsed("--config", demo, "--config", "wrong.yaml", "--config", demo)


def test_the_paper_s_model_has_the_paper_s_size() -> None:
    config = parsed("--config", str(CONFIGS / "paper.yaml"), "--model.position", "KerpleLog")
    assert sum(p.numel() for p in built(config.model.as_dict()).parameters()) == 162_322_944 + 24
    data = config.data.init_args
    assert data.batch_size * data.length * config.trainer.max_steps == 819_200_000


def test_a_seed_may_be_a_date() -> None:
    flags = ("--model.position=RandomizedPositions", "--model.position.seed=20251123")
    model = built(parsed("--config", str(CONFIGS / "demo.yaml"), *flags).model.as_dict())
    assert model.network.positions[0].seed == 20251123


def test_fsdp_is_that_which_keeps_strategies_in_fp32() -> None:
    config = parsed("--config", str(CONFIGS / "demo.yaml"), "--trainer", str(CONFIGS / "trainer" / "fsdp.yaml"))
    parser = ArgumentParser()
    parser.add_subclass_arguments(Strategy, "strategy")
    strategy = parser.instantiate_classes(parser.parse_object({"strategy": config.trainer.strategy.as_dict()}))
    assert isinstance(strategy.strategy, ShardedBlocks)

"""Every configuration that is shipped parses, alone or laid over the one that it belongs to."""

from pathlib import Path
from typing import Any

import pytest
import torch
from jsonargparse import ArgumentParser
from pytorch_lightning.strategies import Strategy
from torch.distributed.fsdp.wrap import ModuleWrapPolicy

from kerple.base.errors import UserError
from kerple.cli.lightning import CLI
from kerple.training.language_model import LanguageModel
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


def parameters(config: Any) -> int:
    """Size of the model that a configuration describes."""
    parser = ArgumentParser()
    parser.add_class_arguments(LanguageModel, "model")
    with torch.device("meta"):
        model = parser.instantiate_classes(parser.parse_object({"model": config.model.as_dict()})).model
    return sum(p.numel() for p in model.parameters())


def test_every_configuration_parses() -> None:
    """Each file is checked as it is read, and one parse takes a second: overlays are laid over each other."""
    for name in ALONE:
        parameters(parsed("--config", str(CONFIGS / f"{name}.yaml")))
    demo, tasks = str(CONFIGS / "demo.yaml"), str(CONFIGS / "tasks" / "base.yaml")
    overlays = [*CONFIGS.glob("retrofit*.yaml"), *files("analyses")]
    parsed("--config", demo, *(f"--config={path}" for path in overlays))
    parsed("--config", tasks, *(f"--config={path}" for path in files("tasks") if path != tasks))
    parsed("--config", demo, *(f"--{section}={path}" for section in ("model", "trainer") for path in files(section)))


def test_every_combination_of_strategies_builds_a_model() -> None:
    for path in files("position"):
        parameters(parsed("--config", str(CONFIGS / "demo.yaml"), "--config", path))


def test_a_wrong_name_in_a_configuration_below_others_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "wrong.yaml").write_text("model: { layer: 3 }")
    demo = str(CONFIGS / "demo.yaml")
    with pytest.raises(UserError):
        parsed("--config", demo, "--config", "wrong.yaml", "--config", demo)


@pytest.mark.parametrize(("position", "more"), [("NoPE", 0), ("KerpleLog", 24)])
def test_the_paper_s_model_has_the_paper_s_size(position: str, more: int) -> None:
    config = parsed("--config", str(CONFIGS / "paper.yaml"), "--model.position", position)
    assert parameters(config) == 162_322_944 + more
    data = config.data.init_args
    assert data.batch_size * data.length * config.trainer.max_steps == 819_200_000


def test_the_published_model_of_tasks_has_its_size_and_another_task_is_chosen_by_flags() -> None:
    config = parsed("--config", str(CONFIGS / "nope.yaml"))
    other = parsed(
        "--config", str(CONFIGS / "nope.yaml"), "--data.task", "kerple.tasks.Addition", "--data.task.order", "plain"
    )
    vocabulary = config.model.vocabulary
    blocks, norm, embeddings = 12 * (12 * 768**2 + 13 * 768), 2 * 768, 2 * vocabulary * 768
    assert parameters(config) == blocks + norm + embeddings
    assert other.data.init_args.task.class_path.endswith("Addition")
    assert other.data.init_args.test_examples == 250


def test_fsdp_wraps_block_by_block() -> None:
    config = parsed("--config", str(CONFIGS / "demo.yaml"), "--trainer", str(CONFIGS / "trainer" / "fsdp.yaml"))
    parser = ArgumentParser()
    parser.add_subclass_arguments(Strategy, "strategy")
    strategy = parser.instantiate_classes(parser.parse_object({"strategy": config.trainer.strategy.as_dict()}))
    assert isinstance(strategy.strategy.kwargs["auto_wrap_policy"], ModuleWrapPolicy)

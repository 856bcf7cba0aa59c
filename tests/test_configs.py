"""Every configuration of the package is valid, alone or after the one that it extends."""

from inspect import unwrap
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from jsonargparse import ArgumentParser
from pytorch_lightning import Trainer

import tests.parsers  # noqa: F401
from kerple.base.errors import UserError
from kerple.cli.lightning import CLI
from kerple.training.language_model import LanguageModel
from kerple.training.trainer import put_integers_first

CONFIGS = Path(__file__).parents[1] / "configs"
ALONE = ("demo", "gpu", "nope", "paper", "small")


def files(folder: str) -> list[str]:
    return sorted(str(path) for path in (CONFIGS / folder).glob("*.yaml"))


class Parsed(CLI):
    """The command line without building data, model and trainer."""

    def instantiate_classes(self) -> None: ...

    def _run_subcommand(self, subcommand: str) -> None: ...


def parsed(*arguments: str) -> Any:
    return Parsed(["fit", *arguments]).config.fit


def build(model: dict[str, Any]) -> None:
    """Build the model of a configuration on the meta device."""
    parser = ArgumentParser()
    parser.add_class_arguments(LanguageModel, "model")
    with torch.device("meta"):
        parser.instantiate_classes(parser.parse_object({"model": model}))


@pytest.mark.slow
def test_every_configuration_parses_and_builds_a_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A parse takes a second and checks each of its files, so several files are parsed together."""
    monkeypatch.chdir(tmp_path)
    for name in ALONE:
        build(parsed("--config", str(CONFIGS / f"{name}.yaml")).model.as_dict())
    demo, tasks = str(CONFIGS / "demo.yaml"), str(CONFIGS / "tasks" / "base.yaml")
    parsed("--config", demo, *(f"--config={path}" for path in files("analyses")))
    parsed("--config", tasks, *(f"--config={path}" for path in files("tasks") if path != tasks))
    sections = (f"--{section}={path}" for section in ("model", "trainer") for path in files(section))
    strategy = parsed("--config", demo, *sections).trainer.strategy  # of the last file, fsdp.yaml
    assert strategy.class_path == "kerple.training.sharding.ShardedBlocks"
    for path in files("position"):
        model = yaml.safe_load(Path(path).read_text())["model"]
        build({"vocabulary": 20, "length": 64, "layers": 4, "dim": 16, "heads": 2} | model)
    (tmp_path / "wrong.yaml").write_text("model: { layer: 3 }")
    with pytest.raises(UserError):  # an invalid file among valid ones is an error
        parsed("--config", demo, "--config", "wrong.yaml", "--config", demo)


@pytest.mark.slow
def test_the_configuration_of_a_corpus_keeps_the_training_length() -> None:
    small = str(CONFIGS / "small.yaml")
    for path in files("data"):
        assert parsed("--config", small, "--config", path).data.init_args.length == 128


def test_a_seed_may_be_a_date() -> None:
    flags = ("--model.position=RandomizedPositions", "--model.position.seed=20251123")
    assert parsed("--config", str(CONFIGS / "demo.yaml"), *flags).model.position.init_args.seed == 20251123


def test_a_number_of_batches_is_an_integer_in_every_order_of_types(monkeypatch: pytest.MonkeyPatch) -> None:
    """A float 1.0 would be all batches."""
    hints = unwrap(Trainer.__init__).__annotations__
    for name in ("limit_train_batches", "limit_val_batches"):
        monkeypatch.setitem(hints, name, float | int | None)
    put_integers_first(Trainer.__init__)
    numbers = {"limit_train_batches": 1, "limit_val_batches": 0.5, "val_check_interval": "00:00:15:00"}
    flags = (f"--trainer.{name}={number}" for name, number in numbers.items())
    trainer = parsed("--config", str(CONFIGS / "demo.yaml"), *flags).trainer
    assert {name: repr(trainer[name]) for name in numbers} == {name: repr(number) for name, number in numbers.items()}

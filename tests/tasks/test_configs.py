from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import yaml
from jsonargparse import ArgumentParser
from pytorch_lightning import LightningDataModule

import kerple.positions
import kerple.tasks
from kerple.training.language_model import LanguageModel

ROOT = Path(__file__).parents[2] / "configs"
FILES = sorted((ROOT / "tasks").glob("*.yaml"))
TASKS = [path for path in FILES if path.name != "base.yaml"]


def merged(path: Path) -> dict[str, Any]:
    base, own = (yaml.safe_load(p.read_text()) for p in (path.with_name("base.yaml"), path))
    return base | own | {key: base[key] | own.get(key, {}) for key in ("model", "trainer")}


@cache
def built(path: Path) -> Any:
    parser = ArgumentParser()
    parser.add_class_arguments(LanguageModel, "model")
    parser.add_subclass_arguments(LightningDataModule, "data")
    parser.link_arguments("data.init_args.vocabulary", "model.vocabulary")
    parser.link_arguments("data.init_args.length", "model.length")
    config = parser.parse_object({key: merged(path)[key] for key in ("model", "data")})
    with torch.device("meta"):
        return parser.instantiate_classes(config)


@pytest.mark.parametrize("path", TASKS, ids=lambda path: f"{path.parent.name}/{path.stem}")
def test_the_stated_length_holds_the_longest_training_sequence(path: Path) -> None:
    data, rng = built(path).data, np.random.default_rng(0)
    drawn = [data.task.example(data.train_length, rng) for _ in range(500)]
    longest = max(len(example.tokens()) - 1 for example in drawn)
    assert longest <= data.length
    if len({len(example.text) for example in drawn}) == 1:
        assert longest == data.length
    times = 3 if path.stem == "long_addition" else 2
    assert data.test_lengths[-1] == times * data.train_length


@pytest.mark.parametrize("path", [path for path in FILES if path.name == "base.yaml"], ids=lambda p: p.parent.name)
def test_the_shared_settings_do_not_favour_a_strategy(path: Path) -> None:
    assert isinstance(merged(path)["model"]["position"], str)
    assert merged(path)["model"]["position"] in kerple.positions.names()

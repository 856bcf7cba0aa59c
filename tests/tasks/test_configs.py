"""Configurations of tasks: their stated length in tokens is the one that their problems need."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml
from jsonargparse import ArgumentParser
from pytorch_lightning import LightningDataModule

import kerple.tasks  # noqa: F401 (its data module has a short name once it is imported)

ROOT = Path(__file__).parents[2] / "configs"
TASKS = [path for path in sorted((ROOT / "tasks").glob("*.yaml")) if path.name != "base.yaml"]


@pytest.mark.parametrize("path", TASKS, ids=lambda path: path.stem)
def test_the_stated_length_holds_the_longest_training_sequence(path: Path) -> None:
    parser = ArgumentParser()
    parser.add_subclass_arguments(LightningDataModule, "data")
    config = parser.parse_object({"data": yaml.safe_load(path.read_text())["data"]})
    data: Any = parser.instantiate_classes(config).data
    rng = np.random.default_rng(0)
    lengths = {len(data.task.example(data.train_length, rng).tokens()) - 1 for _ in range(500)}
    assert max(lengths) <= data.length
    if len(lengths) == 1:
        assert max(lengths) == data.length
    times = 3 if path.stem == "long_addition" else 2
    assert data.test_lengths[-1] == times * data.train_length

"""Configurations that checkpoints of older versions hold."""

from functools import partial
from typing import Any

import jsonargparse
import pytest
import torch
import yaml

from kerple.base.compatibility import as_today, unread
from kerple.model import Transformer
from kerple.positions import FIRE, T5, Abacus, Shape
from kerple.training.language_model import LanguageModel

# as `fit` wrote it at 064a975
STORED = """
position:
  class_path: kerple.positions.{name}
  init_args: {options}
vocabulary: 20
length: 16
layers: 3
dim: 16
heads: 2
"""


@pytest.mark.parametrize(
    ("name", "options", "strategies"),
    [
        ("KerpleLog", "{r1: null, r2: null, floor: 0.01, share_across_layers: null}", 1),
        ("KerpleLog", "{r1: null, r2: null, floor: 0.01, share_across_layers: false}", 3),
        ("Shaw", "{clip: 16, share_across_layers: true}", 1),
        ("CoPE", "{rows: 64, share_across_layers: null}", 3),
        ("FIRE", "{hidden: 32, threshold: null, share_across_layers: false}", 3),
        (
            "RandomizedPositions",
            "{position: {class_path: kerple.positions.FoX, init_args: {start: 0.0, share_across_layers: true}}}",
            1,
        ),
        ("Learned", "{beyond: clamp}", 1),
    ],
)
def test_sharing_across_layers_is_an_option_of_the_model_now(name: str, options: str, strategies: int) -> None:
    config = as_today({"model": yaml.safe_load(STORED.format(name=name, options=options))})
    parser = jsonargparse.ArgumentParser()
    parser.add_class_arguments(LanguageModel, "model")
    model = parser.instantiate_classes(parser.parse_object(config)).model

    assert len(model.network.positions) == strategies
    assert type(model.network.positions[0]).__name__ == name


def test_tables_that_later_layers_never_read_are_left_out() -> None:
    torch.manual_seed(0)
    network = Transformer(Shape(16, 2, 8), 3, 20, partial(Abacus, position=FIRE)).eval()
    stored = {name: value.clone() for name, value in network.state_dict().items()}
    old = stored | {f"positions.{i}.table": torch.ones(128, 16) for i in (1, 2)}
    assert unread(old, stored) == ["positions.1.table", "positions.2.table"]
    network.load_state_dict(old)
    with pytest.raises(RuntimeError, match=r"positions\.3\.rows"):
        network.load_state_dict(old | {"positions.3.rows": torch.ones(1)})
    per_layer = Transformer(Shape(16, 2, 8), 2, 20, T5, per_layer=True)
    assert not unread(per_layer.state_dict(), per_layer.state_dict())


def test_tasks_name_their_validation_problems_in_full() -> None:
    config = {"data": {"class_path": "kerple.tasks.TaskData", "init_args": {"length": 9, "val_examples": 7}}}
    assert as_today(config)["data"]["init_args"] == {"length": 9, "validation_examples": 7}


@pytest.mark.parametrize("config", [{}, {"model": None}, {"model": {"position": "KerpleLog"}}, {"data": "TaskData"}])
def test_other_configurations_are_left_alone(config: dict[str, Any]) -> None:
    assert as_today(yaml.safe_load(yaml.safe_dump(config))) == config

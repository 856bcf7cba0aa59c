"""A stranger's checkpoint as the model that `fit --weights` starts from."""

from pathlib import Path
from typing import Any

import pytest
import torch

from kerple.base.errors import UserError
from kerple.cli.classes import classes
from kerple.hf.weights import read

CONFIG = {"model": {"position": "NoPE"}, "data": {"class_path": "TokenShards"}, "trainer": {"callbacks": []}}
WHOLE = {
    "hyper_parameters": {"length": 16},
    "state_dict": {"network.embedding.weight": torch.zeros(9, 4)},
}


def saved(folder: Path, content: dict[str, Any]) -> str:
    torch.save({"config": CONFIG, **content}, folder / "last.ckpt")
    return str(folder / "last.ckpt")


def test_the_sizes_are_those_of_the_checkpoint(tmp_path):
    path = Path(saved(tmp_path, WHOLE)).rename(tmp_path / "best")  # whatever its name
    model = read(str(path), classes()).model
    assert (model["length"], model["vocabulary"]) == (16, 9)


@pytest.mark.parametrize(
    "content",
    [
        {},
        WHOLE | {"state_dict": {}},
        WHOLE | {"state_dict": WHOLE["state_dict"] | {"network.norm.weight": "x"}},
        WHOLE | {"hyper_parameters": {"length": "x"}},
    ],
)
def test_a_checkpoint_without_a_model_is_none(content, tmp_path):
    with pytest.raises(UserError, match=r"last\.ckpt is not a checkpoint"):
        read(saved(tmp_path, content), classes())

"""The extrapolation test on real token shards: whole stream, and inside documents only."""

import json
from pathlib import Path

import numpy as np
import pytest
from pytorch_lightning import Trainer

from kerple.data import TokenShards
from kerple.evaluation.extrapolation import Extrapolation
from kerple.positions import NoPE
from kerple.training.language_model import LanguageModel


@pytest.mark.parametrize("inside", [False, True])
def test_extrapolation_scores_what_the_shards_hold(prepared: Path, tmp_path: Path, inside: bool) -> None:
    data = TokenShards(None, vocabulary=300, directory=str(prepared), length=8, batch_size=4)
    model = LanguageModel(NoPE, vocabulary=300, length=8, layers=1, dim=16, heads=2)
    callback = Extrapolation([8, 32], documents=inside)
    options = {"enable_progress_bar": False, "enable_model_summary": False, "logger": False}
    Trainer(callbacks=[callback], accelerator="cpu", default_root_dir=tmp_path, **options).test(model, data)
    result = json.loads((tmp_path / "extrapolation.json").read_text())

    stream, begins = data.stream("test"), data.documents("test")
    tokens = stream.read(0, len(stream))
    end_of_text = data.manifest.end_of_text
    # oracle of the documents: a new one begins behind each end-of-text token
    assert begins.tolist() == [0, *(np.flatnonzero(tokens[:-1] == end_of_text) + 1)]
    sizes = np.diff([*begins, len(stream)])
    blocks = sum((size - 1) // 32 for size in sizes) if inside else (len(stream) - 1) // 32
    assert blocks > 0
    for row in result["rows"]:
        assert row["targets"] == blocks * 32
        assert row["block_targets"] == [32] * blocks
    if not inside:  # oracle of the bytes: the text, whole again where the last target is no part of a character
        scored = tokens[1 : blocks * 32 + 1]
        text = data.decode([int(token) for token in scored if token != end_of_text])
        assert abs(result["rows"][0]["bytes"] - len(text.encode())) <= 2 * 3  # U+FFFD for a part of one at either end

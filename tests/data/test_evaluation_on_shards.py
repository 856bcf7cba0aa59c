"""The extrapolation test on real token shards: whole stream, and inside documents only."""

import numpy as np
import pytest
from pytorch_lightning import Trainer

from kerple.data import TokenShards
from kerple.evaluation import results
from kerple.evaluation.extrapolation import Extrapolation
from kerple.positions import NoPE
from kerple.training.language_model import LanguageModel


@pytest.mark.parametrize("inside", [False, True])
def test_extrapolation_scores_what_the_shards_hold(prepared, tmp_path, inside):
    data = TokenShards(None, vocabulary=300, directory=str(prepared), length=8, batch_size=4)
    model = LanguageModel(NoPE, vocabulary=300, length=8, layers=1, dim=16, heads=2)
    callback = Extrapolation([8, 32], documents=inside)
    options = {"enable_progress_bar": False, "enable_model_summary": False, "logger": False}
    Trainer(callbacks=[callback], accelerator="cpu", default_root_dir=tmp_path, **options).test(model, data)
    table, _ = results.read(tmp_path)

    stream, begins = data.stream("test"), data.documents("test")
    tokens = stream.read(0, len(stream))
    end_of_text = data.manifest.end_of_text
    # oracle of the documents: a new one begins behind each end-of-text token
    assert begins.tolist() == [0, *(np.flatnonzero(tokens[:-1] == end_of_text) + 1)]
    sizes = np.diff([*begins, len(stream)])
    # a row holds a block, or all blocks of a document
    targets = [(size - 1) // 32 * 32 for size in sizes if size > 32] if inside else [32] * ((len(stream) - 1) // 32)
    assert targets
    for _, cell in table[table["metric"] == "ppl"].groupby(["protocol", "length"]):
        assert cell["count"].tolist() == targets
    if not inside:  # oracle of the bytes: the text, whole again where the last target is no part of a character
        scored = tokens[1 : sum(targets) + 1]
        text = data.decode([int(token) for token in scored if token != end_of_text])
        scored_bytes = table[table["metric"] == "bits_per_byte"]["count"].iloc[0]
        assert abs(scored_bytes - len(text.encode())) <= 2 * 3  # U+FFFD for a part of one at either end

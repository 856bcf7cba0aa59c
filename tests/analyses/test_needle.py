"""The callback `Needle`: the heat map of a stand-in model that remembers a known part of what it reads."""

import re
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
import torch
from pytorch_lightning import LightningModule

from kerple.analyses.needle import ANSWER, Needle, continuation, draw, prompt
from kerple.data import TokenShards
from kerple.evaluation import results
from kerple.positions import Shape
from tests.toy import small_model, trainer


class Reader(LightningModule):
    """Finds what is asked for among the last ``memory`` tokens."""

    strategy, max_length = "Reader", 800

    def __init__(self, data: TokenShards, memory: int) -> None:
        super().__init__()
        self.data, self.memory, self.shape = data, memory, Shape(8, 2, 64)
        self.texts: list[str] = []

    @property
    def network(self) -> "Reader":
        return self

    def test_step(self, batch, index) -> None:
        pass

    def continued(self, tokens: torch.Tensor, steps: int) -> list[int]:
        text = self.data.decode(tokens[0])
        self.texts.append(text)
        key = re.search(r"special magic numbers? for (\S+) mentioned", text).group(1)
        seen = self.data.decode(tokens[0, -self.memory :])
        return self.data.encode(" ".join(re.findall(rf"numbers for {key} is: (\d+)\.", seen)))


@pytest.fixture(scope="module")
def data(corpus: Path, tmp_path_factory: pytest.TempPathFactory) -> TokenShards:
    folder = str(tmp_path_factory.mktemp("needle"))
    shards = TokenShards(str(corpus), vocabulary=270, directory=folder, shares=(0.3, 0.2, 0.5), length=64)
    shards.prepare_data()
    return shards


def run(data: TokenShards, folder: Path, memory: int, kind: str) -> tuple[pd.DataFrame, list[str]]:
    """The table that is written, and the problems that were read."""
    callback, reader = Needle(kind, lengths=[500, 700, 900], depths=[0.0, 0.5, 1.0], problems=2), Reader(data, memory)
    trainer(folder, callback, limit_test_batches=1).test(reader, datamodule=data, verbose=False)
    return pd.read_csv(folder / f"{kind}.csv"), reader.texts


@pytest.mark.parametrize("kind", ["niah_single_1", "niah_single_2", "niah_multikey_1"])
def test_found_is_what_lies_within_memory(data: TokenShards, tmp_path: Path, kind: str) -> None:
    cells, problems = run(data, tmp_path, 420, kind)
    noise = kind == "niah_single_1"
    table, about = results.read(tmp_path)
    content = about["evaluations"][kind]
    assert content["haystack"] == ("noise" if noise else "corpus")
    assert all(("The grass is green" in text, "far is near" in text) == (noise, not noise) for text in problems)
    assert len(set(problems)) == len(problems) == 2 * 3 * 2  # lengths, depths, problems
    assert (tmp_path / f"{kind}.png").exists()
    assert set(cells["length"]) == {500, 700}  # the reader has 800 positions
    assert content["skipped"][0]["length"] == 900
    recalls = cells.set_index(["length", "depth"])["recall"]
    assert recalls[500, 1.0] == recalls[700, 1.0] == 1
    assert recalls[700, 0.0] == 0
    totals = results.totals(table).set_index("length")
    assert totals.loc[700, ["metric", "count", "value"]].tolist() == ["accuracy", 6, recalls[700].mean()]


def test_many_values_are_all_sought(data: TokenShards, tmp_path: Path) -> None:
    cells, _ = run(data, tmp_path, 2000, "niah_multivalue")
    assert set(cells["recall"]) == {1.0}


def test_both_kinds_of_networks_write_greedily() -> None:
    pytest.importorskip("transformers")
    from kerple.hf.adapter import HuggingFaceNetwork
    from tests.hf.tiny import text, tiny

    model, tokens = tiny("llama"), text(1, 20)
    written, expected = HuggingFaceNetwork(model).continued(tokens, 6), tokens
    with torch.inference_mode():
        for _ in range(6):
            expected = torch.cat([expected, model(expected).logits[:, -1:].argmax(-1)], 1)
    assert written == expected[0, 20:].tolist()
    assert len(continuation(small_model(vocabulary=96).eval().network, tokens, 6)) == 6


def encode(text: str) -> list[int]:
    return list(text.encode())


@pytest.mark.parametrize(
    ("kind", "sentences", "sought"),
    [("niah_single_1", 1, 1), ("niah_single_2", 1, 1), ("niah_multikey_1", 4, 1), ("niah_multivalue", 4, 4)],
)
@pytest.mark.parametrize("depth", [0.0, 0.3, 1.0])
def test_the_needle_lies_at_its_depth_and_the_rest_is_haystack(kind, sentences, sought, depth) -> None:
    problem = draw(kind, depth, np.random.default_rng(1))
    tokens = prompt(problem, 900, [0] * 900, encode)
    text = bytes(tokens).decode()
    assert len(tokens) == 900 - ANSWER * sought
    needles = re.findall(r"One of the special magic numbers for ([a-z]+-[a-z]+) is: (\d{7})\.", text)
    assert len(needles) == sentences
    key = re.search(r"special magic numbers? for (\S+) mentioned", text).group(1)
    assert {value for k, value in needles if k == key} == set(problem.values)
    assert len(problem.values) == sought
    before = text[: text.index(problem.needles[0][1])].count("\0")
    assert before == round(depth * text.count("\0"))
    assert text.endswith(problem.question)
    with pytest.raises(ValueError, match="lengths: got 100, of which needles, question and answer take"):
        prompt(problem, 100, [0] * 100, encode)

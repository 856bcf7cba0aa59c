"""The callback `Needle`: the heat map of a stand-in model that remembers a known part of what it reads."""

import csv
import re
from pathlib import Path

import numpy as np
import pytest
import torch
from pytorch_lightning import LightningModule, Trainer

from kerple.analyses.needle import ANSWER, Needle, continuation, draw, prompt
from kerple.data import TokenShards
from kerple.evaluation import results
from kerple.model import Transformer
from kerple.positions import Shape


class Reader:
    """Finds what is asked for among the last ``memory`` tokens."""

    strategy, max_length = "Reader", 800

    def __init__(self, data: TokenShards, memory: int) -> None:
        self.data, self.memory, self.shape = data, memory, Shape(8, 2, 64)
        self.read: list[str] = []

    def continued(self, tokens: torch.Tensor, steps: int) -> list[int]:
        whole = self.data.decode(tokens[0])
        self.read.append(whole)
        key = re.search(r"special magic numbers? for (\S+) mentioned", whole).group(1)
        seen = self.data.decode(tokens[0, -self.memory :])
        return self.data.encode(" ".join(re.findall(rf"numbers for {key} is: (\d+)\.", seen)))


class Module(LightningModule):
    def __init__(self, network) -> None:
        super().__init__()
        self.network = network

    def test_step(self, batch, index) -> None:
        pass


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> TokenShards:
    folder = tmp_path_factory.mktemp("needle")
    (folder / "corpus").mkdir()
    for i in range(20):
        (folder / "corpus" / f"{i}.txt").write_text(f"{i} " + "the quick brown fox. " * 60)
    made = TokenShards(
        str(folder / "corpus"), vocabulary=270, directory=str(folder / "shards"), shares=(0.3, 0.2, 0.5), length=64
    )
    made.prepare_data()
    return made


def run(data: TokenShards, folder: Path, memory: int, **options) -> tuple[list[dict], list[str]]:
    """Rows of the table, and the problems that were read."""
    callback = Needle(lengths=[500, 700, 900], depths=[0.0, 0.5, 1.0], problems=2, **options)
    trainer = Trainer(
        accelerator="cpu",
        logger=False,
        callbacks=[callback],
        enable_progress_bar=False,
        enable_model_summary=False,
        default_root_dir=folder,
        limit_test_batches=1,
    )
    reader = Reader(data, memory)
    trainer.test(Module(reader), datamodule=data, verbose=False)
    with (folder / f"{callback.kind}.csv").open() as file:
        return list(csv.DictReader(file)), reader.read


@pytest.mark.parametrize("kind", ["niah_single_1", "niah_single_2", "niah_multikey_1"])
def test_found_is_what_lies_within_memory(data: TokenShards, tmp_path: Path, kind: str) -> None:
    rows, problems = run(data, tmp_path, memory=420, kind=kind)
    noise = kind == "niah_single_1"
    table, about = results.read(tmp_path)
    content = about["evaluations"][kind]
    assert content["haystack"] == ("noise" if noise else "corpus")
    assert all(("The grass is green" in text, "quick brown fox" in text) == (noise, not noise) for text in problems)
    assert len(set(problems)) == len(problems) == 2 * 3 * 2  # lengths, depths, problems
    assert (tmp_path / f"{kind}.png").exists()
    assert {int(row["length"]) for row in rows} == {500, 700}  # the reader has 800 positions
    found = {(int(row["length"]), float(row["depth"])): float(row["found"]) for row in rows}
    assert found[500, 1.0] == found[700, 1.0] == 2
    assert found[700, 0.0] == 0
    cells = results.totals(table).set_index("length")
    assert [(skipped["length"], skipped["reason"]) for skipped in content["skipped"]] == [
        (900, "the strategy has only 800 positions")
    ]
    right = sum(n for (length, _), n in found.items() if length == 700)
    assert cells.loc[700, ["metric", "count", "value"]].tolist() == ["accuracy", 6, right / 6]


def test_many_values_are_all_sought(data: TokenShards, tmp_path: Path) -> None:
    rows, _ = run(data, tmp_path, memory=2000, kind="niah_multivalue")
    assert {float(row["found"]) for row in rows} == {2.0}


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
    from kerple.positions import KerpleLog

    own = Transformer(Shape(16, 2, 32), 2, 96, KerpleLog).eval()
    assert len(continuation(own, tokens, 6)) == 6


@pytest.mark.parametrize(
    ("options", "told"),
    [
        ({"lengths": []}, "at least one of each"),
        ({"depths": [1.5]}, r"depths in 0..1"),
    ],
)
def test_options_are_checked(options: dict, told: str) -> None:
    with pytest.raises(ValueError, match=told):
        Needle(**options)


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
    found = re.findall(r"One of the special magic numbers for ([a-z]+-[a-z]+) is: (\d{7})\.", text)
    assert len(found) == sentences
    key = re.search(r"special magic numbers? for (\S+) mentioned", text).group(1)
    assert {value for k, value in found if k == key} == set(problem.values)
    assert len(problem.values) == sought
    room = text.count("\0")
    place = text[: text.index(problem.needles[0][1])].count("\0")
    assert place == round(depth * room)
    assert text.endswith(problem.question)


def test_a_length_that_leaves_no_room_is_refused() -> None:
    with pytest.raises(ValueError, match="lengths: got 100, of which needles, question and answer take"):
        prompt(draw("niah_single_1", 0.5, np.random.default_rng(0)), 100, [0] * 100, encode)

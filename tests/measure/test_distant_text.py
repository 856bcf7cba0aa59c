"""LongPPL with a tiny evaluator and the same key tokens for all models; Needle."""

import json
import math
import re
from itertools import accumulate
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
import torch
import yaml
from tokenizers import Tokenizer

from kerple.cli.main import main
from kerple.data import TokenShards
from kerple.data.tokenizer import load_tokenizer, train_tokenizer
from kerple.hf.adapter import hugging_face_network
from kerple.measure import results
from kerple.measure.long_perplexity import LongPerplexity, byte_spans, carry_over, key_targets, token_spelling
from kerple.measure.needle import ANSWER, Needle, draw_problem, problem_tokens
from kerple.model.network import Generation, Limited
from tests.hf.tiny import hf, saved, text, tiny
from tests.toy import small_model

LONG = {"lengths": [16, 48], "short": 8, "stride": 4, "blocks": 3, "gain": 0.2, "likely": -50.0}
FRACTIONS = (0.3, 0.2, 0.5)


@pytest.fixture(scope="module")
def place(corpus: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("longppl")
    saved(folder / "evaluator", "llama", max_position_embeddings=512)
    saved(folder / "model", "gpt_neox")
    config = {
        "data": {"class_path": "TokenShards", "init_args": {"corpus": str(corpus), "split_fractions": [*FRACTIONS]}},
        "trainer": {"accelerator": "cpu", "logger": False}
        | {"callbacks": [{"class_path": "LongPerplexity", "init_args": LONG | {"evaluator": "evaluator"}}]},
    }
    (folder / "long.yaml").write_text(yaml.safe_dump(config))
    return folder


def run(model: str, *flags: str) -> pd.DataFrame:
    main(["test", "--hf", model, "--config", "long.yaml", "--run_dir", f"runs/{model}/test", *flags])
    return results.totals(results.read(Path(f"runs/{model}/test"))[0])


def test_models_are_scored_on_the_same_key_tokens(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(place)
    first = run("evaluator", "--data.directory", "shards")
    assert not list(Path("shards").glob("keys-*"))  # a checkpoint may name the shards; nothing is written there
    (path,) = Path("data/.keys").glob("keys-*.json")
    keys = json.loads(path.read_text())["keys"]
    before = path.stat().st_mtime_ns
    second = run("model", "--data.directory", "shards", "--data.corpus", "null")
    assert path.stat().st_mtime_ns == before  # the choice is read, not made again
    count = sum(map(len, keys))
    for cells in (first, second):
        assert (cells["length"].tolist(), cells["count"].tolist()) == ([16, 48], [count, count])
        assert cells["value"][0] != cells["value"][1]
    stream = TokenShards(corpus=None, directory="shards").text("test").stream
    model = hf.AutoModelForCausalLM.from_pretrained("model").eval()
    total = 0.0
    for block, places in enumerate(keys):
        tokens = torch.from_numpy(stream.read(48 * block, 49).astype("int64"))
        for t in places:
            with torch.inference_mode():
                start = t // 16 * 16
                logits = model(tokens[None, start : t + 1]).logits[0, -1].double()
            total -= float(logits.log_softmax(-1)[tokens[t + 1]])
    assert second["value"][0] == pytest.approx(math.exp(total / count), rel=1e-6)


def test_keys_of_another_tokenizer_are_found_through_the_bytes(corpus: Path, place: Path, monkeypatch) -> None:
    """A model of merged tokens: each covers bytes, one of which the evaluator, reading bytes, judged to be key."""
    monkeypatch.chdir(place)
    merged = TokenShards(str(corpus), vocabulary=300, directory="merged", split_fractions=FRACTIONS, length=16)
    merged.prepare_data()
    merged.setup()
    callback = LongPerplexity(**LONG | {"evaluator": "evaluator", "keys": "kept"})
    keys = callback._keys(merged.text("test"))
    assert sum(map(len, keys)) > 0
    tokenizer = load_tokenizer("merged")
    evaluator = hugging_face_network(hf.AutoModelForCausalLM.from_pretrained("evaluator").eval())
    reader = hf.AutoTokenizer.from_pretrained("evaluator")  # a token for each byte
    for i, targets in enumerate(keys):
        block = merged.blocks("test", 48, 3)[i].tolist()
        spelt = [token_spelling(tokenizer, token, merged.manifest.end_of_text) for token in block]
        text = b"".join(spelt).decode()
        character = [n for n, letter in enumerate(text) for _ in letter.encode()]  # that each byte belongs to
        ids = reader(text, add_special_tokens=False)["input_ids"]
        assert len(ids) == len(character)
        with torch.inference_mode():
            (judged,) = key_targets(evaluator, torch.tensor([ids]), short=8, stride=4, gain=0.2, likely=-50.0).tolist()
        # a character is key if one of its bytes is
        key = {character[t + 1] for t, is_key in enumerate(judged) if is_key}
        ends = [0, *accumulate(map(len, spelt))]
        assert targets == [j - 1 for j in range(1, len(spelt)) if key & set(character[ends[j] : ends[j + 1]])]
    assert callback._keys(merged.text("test")) == keys  # read from the file


def test_an_evaluator_is_not_read_past_its_training_length(
    place: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(place)
    saved(place / "short", "llama", max_position_embeddings=32)
    with pytest.raises(SystemExit):
        run("evaluator", "--data.directory", "shards", "--trainer.callbacks.evaluator", "short")
    assert "got 48 tokens, which are 48 tokens of short; expected at most 32" in capsys.readouterr().err


BLOCK, SHORT, STRIDE = 24, 8, 3


class Copier:
    """Finds a token likely if it was among its inputs so far: a network for which far context matters."""

    name, training_length = "Copier", None

    def losses(self, tokens, last=None):
        inputs, targets = tokens[:, :-1], tokens[:, 1:]
        seen = torch.stack([(inputs[:, : t + 1] == targets[:, t, None]).any(1) for t in range(targets.shape[1])], 1)
        losses = torch.where(seen, 0.5, 6.0) + 0.01 * targets
        return losses if last is None else losses[:, -last:]


def test_keys_are_what_the_formula_says() -> None:
    tokens = torch.randint(30, (3, BLOCK + 1), generator=torch.Generator().manual_seed(0))
    options = {"short": SHORT, "stride": STRIDE}
    keys, network = key_targets(Copier(), tokens, **options, gain=2.0, likely=-0.705), Copier()
    expected = torch.zeros(3, BLOCK, dtype=torch.bool)
    for row in range(3):
        for t in range(SHORT, BLOCK):
            end = SHORT
            while end <= t:
                end += STRIDE
            end = min(end, BLOCK)  # the short context whose step scores t
            long = -float(network.losses(tokens[row : row + 1, : t + 2])[0, -1])
            short = -float(network.losses(tokens[row : row + 1, end - SHORT : t + 2])[0, -1])
            expected[row, t] = long - short > 2.0 and long > -0.705
    assert torch.equal(keys, expected)
    assert keys.any()
    assert not key_targets(Copier(), tokens, **options, likely=-0.4).any()
    # the targets of the first short context are never key: both contexts are the same for them
    assert not key_targets(Copier(), tokens, **options, gain=-1.0, likely=-9.0)[:, :SHORT].any()


def test_tokens_are_spelt_in_the_bytes_they_were_made_of() -> None:
    text = "def ünï(x):\n\treturn 'čau 🙂' # \x00\x7f\xad"
    tokenizer = train_tokenizer([text], 300)
    ids = tokenizer.encode(text).ids
    ending = tokenizer.token_to_id("<|endoftext|>")
    assert b"".join(token_spelling(tokenizer, token, ending) for token in ids) == text.encode()
    assert token_spelling(tokenizer, ending, ending) == b""
    words = Tokenizer.from_str(tokenizer.to_str())
    words.add_tokens(["two words"])
    with pytest.raises(ValueError, match=r"the bytes of token \d+ \('two words'\) are not known"):
        token_spelling(words, words.token_to_id("two words"), ending)


def test_spans_of_characters_are_spans_of_bytes_also_where_a_block_cuts_one() -> None:
    text = "aéb🙂".encode()[:-2].decode("utf-8", "surrogateescape")
    assert len(text) == 5
    assert byte_spans(text, [(0, 1), (1, 2), (2, 3), (3, 5)]) == [(0, 1), (1, 3), (3, 4), (4, 6)]


def test_a_token_is_key_if_it_shares_a_byte_with_a_key_token() -> None:
    spans = [(0, 1), (1, 3), (1, 3), (3, 4)]  # two tokens of one character have its span
    assert carry_over([1, 1, 2], spans, [False, True, False, False]) == [False, True, True]


# Needle, with a model that remembers the last tokens


class Reader(Generation, Limited):
    """Retrieves numbers from the last ``memory`` tokens."""

    name, training_length, max_length = "Reader", 64, 800

    def __init__(self, data: TokenShards, memory: int) -> None:
        self.data, self.memory = data, memory
        self.texts: list[str] = []

    def continued(self, tokens: torch.Tensor, steps: int) -> list[int]:
        text = self.data.decode(tokens[0].tolist())
        self.texts.append(text)
        key = re.search(r"special magic numbers? for (\S+) mentioned", text).group(1)
        seen = self.data.decode(tokens[0, -self.memory :].tolist())
        return self.data.encode(" ".join(re.findall(rf"numbers for {key} is: (\d+)\.", seen)))


@pytest.fixture(scope="module")
def data(corpus: Path, tmp_path_factory: pytest.TempPathFactory) -> TokenShards:
    folder = str(tmp_path_factory.mktemp("needle"))
    shards = TokenShards(str(corpus), vocabulary=270, directory=folder, split_fractions=(0.3, 0.2, 0.5), length=64)
    shards.prepare_data()
    return shards


def found(data: TokenShards, folder: Path, memory: int, kind: str) -> tuple[pd.DataFrame, list[str]]:
    """The written table, and the problems that the model read."""
    needle, reader = Needle(kind, lengths=[500, 700, 900], depths=[0.0, 0.5, 1.0], problems=2), Reader(data, memory)
    needle.run(reader, data.text("test")).write(folder)
    return pd.read_csv(folder / f"{kind}.csv"), reader.texts


@pytest.mark.parametrize("kind", ["niah_single_1", "niah_single_2", "niah_multikey_1"])
def test_found_is_what_lies_within_memory(data: TokenShards, tmp_path: Path, kind: str) -> None:
    cells, problems = found(data, tmp_path, 420, kind)
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
    cells, _ = found(data, tmp_path, 2000, "niah_multivalue")
    assert set(cells["recall"]) == {1.0}


def test_both_kinds_of_networks_write_greedily() -> None:
    model, tokens = tiny("llama"), text(1, 20)
    written, expected = hugging_face_network(model).continued(tokens, 6), tokens
    with torch.inference_mode():
        for _ in range(6):
            expected = torch.cat([expected, model(expected).logits[:, -1:].argmax(-1)], 1)
    assert written == expected[0, 20:].tolist()
    assert len(small_model(vocabulary=96).eval().network.continued(tokens, 6)) == 6


def encode(text: str) -> list[int]:
    return list(text.encode())


@pytest.mark.parametrize(
    ("kind", "sentences", "sought"),
    [("niah_single_1", 1, 1), ("niah_single_2", 1, 1), ("niah_multikey_1", 4, 1), ("niah_multivalue", 4, 4)],
)
@pytest.mark.parametrize("depth", [0.0, 0.3, 1.0])
def test_the_needle_lies_at_its_depth_and_the_rest_is_haystack(kind, sentences, sought, depth) -> None:
    problem = draw_problem(kind, depth, np.random.default_rng(1))
    tokens = problem_tokens(problem, 900, [0] * 900, encode)
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
    with pytest.raises(ValueError, match=r"lengths: got 100, expected more than \d+, the tokens of needles"):
        problem_tokens(problem, 100, [0] * 100, encode)

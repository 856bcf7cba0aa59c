"""LongPerplexity with a tiny evaluator, and Needle with a model that remembers the last tokens."""

import json
import math
import re
from itertools import accumulate, pairwise
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
import torch
import yaml
from tokenizers import Tokenizer

from kerple.base.errors import UserError
from kerple.cli.main import main
from kerple.data import TokenShards
from kerple.data.tokenizer import load_tokenizer, train_tokenizer
from kerple.hf.adapter import hugging_face_network
from kerple.measure import results_table
from kerple.measure.longppl import LongPerplexity, byte_spans, key_targets, token_spelling, translate_keys
from kerple.measure.needle import ANSWER, Needle, draw_problem, problem_tokens
from kerple.model.network import HasLengthLimit, SupportsGeneration
from tests.hf.tiny import hf, saved

LONG = {"lengths": [16, 48], "short": 8, "stride": 4, "blocks": 3, "gain": 0.2, "likely": -50.0}
FRACTIONS = (0.3, 0.2, 0.5)


@pytest.fixture(scope="module")
def folder(corpus: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder with an evaluator, a model and a configuration of LongPerplexity."""
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


def totals(model: str, *flags: str) -> pd.DataFrame:
    """Test a model, and return the results of each length."""
    main(["test", "--hf", model, "--config", "long.yaml", "--output", f"runs/{model}/test", *flags])
    return results_table.totals(results_table.read(Path(f"runs/{model}/test"))[0])


def test_models_are_scored_on_the_same_key_tokens(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(folder)
    first = totals("evaluator", "--data.directory", "shards")
    assert not list(Path("shards").glob("keys-*"))  # nothing is written there, because a checkpoint may determine it
    (path,) = Path("data/.keys").glob("keys-*.json")
    keys, written = json.loads(path.read_text())["keys"], path.stat().st_mtime_ns
    second = totals("model", "--data.directory", "shards", "--data.corpus", "null")
    assert path.stat().st_mtime_ns == written  # the key tokens are read, and not chosen again
    count = sum(map(len, keys))
    for cells in (first, second):
        assert (cells["length"].tolist(), cells["count"].tolist()) == ([16, 48], [count, count])
        assert cells["value"][0] != cells["value"][1]
    stream = TokenShards(corpus=None, directory="shards").text("test").stream
    model, total = hf.AutoModelForCausalLM.from_pretrained("model").eval(), 0.0
    for block, targets in enumerate(keys):
        tokens = torch.from_numpy(stream[48 * block : 48 * block + 49].astype("int64"))
        for t in targets:
            with torch.inference_mode():
                logits = model(tokens[None, t // 16 * 16 : t + 1]).logits[0, -1].double()
            total -= float(logits.log_softmax(-1)[tokens[t + 1]])
    assert second["value"][0] == pytest.approx(math.exp(total / count), rel=1e-6)


def test_key_tokens_of_another_tokenizer_share_a_character_with_the_evaluators(corpus, folder, monkeypatch):
    """The evaluator has a token for each byte. Tokens of the model have several bytes."""
    monkeypatch.chdir(folder)
    merged = TokenShards(str(corpus), vocabulary=300, directory="merged", split_fractions=FRACTIONS, length=16)
    merged.prepare_data()
    merged.setup()
    measure = LongPerplexity(**LONG | {"evaluator": "evaluator", "keys": "keys"})
    keys = measure._keys(merged.text("test"))
    assert sum(map(len, keys)) > 0
    tokenizer = load_tokenizer("merged")
    evaluator = hugging_face_network(hf.AutoModelForCausalLM.from_pretrained("evaluator").eval())
    reader = hf.AutoTokenizer.from_pretrained("evaluator")
    for i, targets in enumerate(keys):
        block = merged.text("test").blocks(48, 3)[i].tolist()
        spelling = [token_spelling(tokenizer, token, merged.manifest.end_of_text) for token in block]
        text = b"".join(spelling).decode()
        character = [n for n, letter in enumerate(text) for _ in letter.encode()]  # index of the character of each byte
        ids = reader(text, add_special_tokens=False)["input_ids"]
        assert len(ids) == len(character)
        with torch.inference_mode():
            (is_key,) = key_targets(evaluator, torch.tensor([ids]), short=8, stride=4, gain=0.2, likely=-50.0).tolist()
        key_characters = {character[t + 1] for t, key in enumerate(is_key) if key}
        ends = [0, *accumulate(map(len, spelling))]
        characters = [set(character[start:end]) for start, end in pairwise(ends)]  # of each token
        assert targets == [t for t, of_target in enumerate(characters[1:]) if key_characters & of_target]
    assert measure._keys(merged.text("test")) == keys  # read from the file


def test_blocks_above_the_training_length_of_the_evaluator_are_an_error(folder, monkeypatch, capsys):
    monkeypatch.chdir(folder)
    saved(folder / "short", "llama", max_position_embeddings=32)
    with pytest.raises(SystemExit):
        totals("evaluator", "--data.directory", "shards", "--trainer.callbacks.evaluator", "short")
    expected = "got 48 tokens, or 48 with the tokenizer of short, expected at most the evaluator's training length, 32"
    assert expected in capsys.readouterr().err


BLOCK, SHORT, STRIDE = 24, 8, 3


class Copier:
    """A network for which a token is likely if its inputs contain it, so that far context matters."""

    name, training_length = "Copier", None

    def losses(self, tokens, last=None):
        inputs, targets = tokens[:, :-1], tokens[:, 1:]
        seen = torch.stack([(inputs[:, : t + 1] == targets[:, t, None]).any(1) for t in range(targets.shape[1])], 1)
        losses = torch.where(seen, 0.5, 6.0) + 0.01 * targets
        return losses if last is None else losses[:, -last:]


def test_key_tokens_satisfy_both_bounds() -> None:
    tokens = torch.randint(30, (3, BLOCK + 1), generator=torch.Generator().manual_seed(0))
    options = {"short": SHORT, "stride": STRIDE}
    keys, network = key_targets(Copier(), tokens, **options, gain=2.0, likely=-0.705), Copier()
    expected = torch.zeros(3, BLOCK, dtype=torch.bool)
    for row in range(3):
        for t in range(SHORT, BLOCK):
            end = SHORT
            while end <= t:
                end += STRIDE
            end = min(end, BLOCK)  # of the short context that scores t
            long = -float(network.losses(tokens[row : row + 1, : t + 2])[0, -1])
            short = -float(network.losses(tokens[row : row + 1, end - SHORT : t + 2])[0, -1])
            expected[row, t] = long - short > 2.0 and long > -0.705
    assert torch.equal(keys, expected)
    assert keys.any()
    assert not key_targets(Copier(), tokens, **options, gain=2.0, likely=-0.4).any()
    assert LongPerplexity([64], 32, 8)._is_key(Copier(), torch.arange(20)) == [False] * 19  # not longer than `short`
    # the targets of the first short context are never key tokens, because both contexts are equal
    assert not key_targets(Copier(), tokens, **options, gain=-1.0, likely=-9.0)[:, :SHORT].any()


def test_spellings_of_tokens_add_up_to_the_bytes_of_the_text() -> None:
    text = "def ünï(x):\n\treturn 'čau 🙂' # \x00\x7f\xad"
    tokenizer = train_tokenizer([text], 300)
    ids, end = tokenizer.encode(text).ids, tokenizer.token_to_id("<|endoftext|>")
    assert b"".join(token_spelling(tokenizer, token, end) for token in [*ids, end]) == text.encode()
    words = Tokenizer.from_str(tokenizer.to_str())
    words.add_tokens(["two words"])
    with pytest.raises(ValueError, match=r"got the token \d+ \('two words'\), expected known bytes"):
        token_spelling(words, words.token_to_id("two words"), end)


def test_byte_spans_of_characters_if_the_text_ends_inside_a_character() -> None:
    text = "aéb🙂".encode()[:-2].decode("utf-8", "surrogateescape")
    assert len(text) == 5
    assert byte_spans(text, [(0, 1), (1, 2), (2, 3), (3, 5)]) == [(0, 1), (1, 3), (3, 4), (4, 6)]


def test_a_token_is_key_if_it_shares_a_byte_with_a_key_token() -> None:
    spans = [(0, 1), (1, 3), (1, 3), (3, 4)]  # two tokens of one character have its span
    assert translate_keys([1, 1, 2], spans, [False, True, False, False]) == [False, True, True]


# Needle


class Reader(SupportsGeneration, HasLengthLimit):
    """A network that answers from the last ``memory`` tokens."""

    name, training_length, max_length = "Reader", 64, 800

    def __init__(self, data: TokenShards, memory: int) -> None:
        self.data, self.memory = data, memory
        self.texts: list[str] = []

    def continued(self, tokens: torch.Tensor, steps: int) -> list[int]:
        text = self.data.decode(tokens[0].tolist())
        self.texts.append(text)
        key = re.search(r"special magic numbers? for (\S+) mentioned", text).group(1)
        remembered = self.data.decode(tokens[0, -self.memory :].tolist())
        return self.data.encode(" ".join(re.findall(rf"numbers for {key} is: (\d+)\.", remembered)))


@pytest.fixture(scope="module")
def data(corpus: Path, tmp_path_factory: pytest.TempPathFactory) -> TokenShards:
    folder = str(tmp_path_factory.mktemp("needle"))
    shards = TokenShards(str(corpus), vocabulary=270, directory=folder, split_fractions=(0.3, 0.2, 0.5), length=64)
    shards.prepare_data()
    return shards


def recalls_of(reader: Reader, folder: Path, kind: str) -> pd.Series:
    """Write the results of a reader, and return its recall by length and depth."""
    needle = Needle(kind, lengths=[500, 700, 900], depths=[0.0, 0.5, 1.0], problems=2)
    result = needle.run(reader, reader.data.text("test"))
    assert result.report.splitlines()[-1] == f"{kind} at 900: skipped, {reader.name} has only 800 positions"
    result.write(folder)
    recalls = pd.read_csv(folder / f"{kind}.csv").set_index(["length", "depth"])["recall"]
    for length, mean in recalls.groupby("length").mean().items():
        assert f"{kind} at {length}: recall {mean:.0%} in 6 problems\n" in result.report
    return recalls


@pytest.mark.parametrize("kind", ["niah_single_1", "niah_single_2", "niah_multikey_1"])
def test_numbers_in_the_memory_of_a_model_are_found(data: TokenShards, tmp_path: Path, kind: str) -> None:
    reader, noise = Reader(data, 420), kind == "niah_single_1"
    recalls = recalls_of(reader, tmp_path, kind)
    table, about = results_table.read(tmp_path)
    description = about["evaluations"][kind]
    assert description["haystack"] == ("noise" if noise else "corpus")
    assert all(("The grass is green" in text, "far is near" in text) == (noise, not noise) for text in reader.texts)
    assert len(set(reader.texts)) == len(reader.texts) == 2 * 3 * 2  # lengths, depths, problems
    assert (tmp_path / f"{kind}.png").exists()
    assert set(recalls.index.levels[0]) == {500, 700}  # the reader has 800 positions
    assert description["skipped"][0]["length"] == 900
    assert recalls[500, 1.0] == recalls[700, 1.0] == 1
    assert recalls[700, 0.0] == 0
    accuracy = results_table.totals(table).set_index("length")
    assert accuracy.loc[700, ["metric", "count", "value"]].tolist() == ["accuracy", 6, recalls[700].mean()]


def test_an_answer_with_all_values_has_recall_1(data: TokenShards, tmp_path: Path) -> None:
    assert set(recalls_of(Reader(data, 2000), tmp_path, "niah_multivalue")) == {1.0}


def test_options_out_of_range_are_an_error_before_the_measurement(data: TokenShards) -> None:
    with pytest.raises(UserError, match="Needle: lengths: got 100, expected more than"):
        Needle("niah_single_2", [100, 500]).check(Reader(data, 2000), data.text("test"))
    with pytest.raises(UserError, match="Needle: seed: got -1, expected 0 or more"):
        Needle(seed=-1)


def encode(text: str) -> list[int]:
    return list(text.encode())


@pytest.mark.parametrize(
    ("kind", "sentences", "count"),
    [("niah_single_1", 1, 1), ("niah_single_2", 1, 1), ("niah_multikey_1", 4, 1), ("niah_multivalue", 4, 4)],
)
@pytest.mark.parametrize("depth", [0.0, 0.3, 1.0])
def test_the_first_needle_is_at_its_depth_in_the_haystack(kind, sentences, count, depth) -> None:
    problem = draw_problem(kind, depth, np.random.default_rng(1))
    tokens = problem_tokens(problem, 900, [0] * 900, encode)
    text = bytes(tokens).decode()
    assert len(tokens) == 900 - ANSWER * count
    needles = re.findall(r"One of the special magic numbers for ([a-z]+-[a-z]+) is: (\d{7})\.", text)
    assert len(needles) == sentences
    key = re.search(r"special magic numbers? for (\S+) mentioned", text).group(1)
    assert {value for k, value in needles if k == key} == set(problem.values)
    assert len(problem.values) == count
    assert text[: text.index(problem.needles[0][1])].count("\0") == round(depth * text.count("\0"))
    assert text.endswith(problem.question)
    with pytest.raises(ValueError, match=r"lengths: got 100, expected more than \d+, the tokens of needles"):
        problem_tokens(problem, 100, [0] * 100, encode)

"""LongPPL end to end: a tiny evaluator, models with its tokenizer and with another, one choice for all."""

import json
import math
from itertools import accumulate
from pathlib import Path

import pytest
import torch
import yaml

from kerple.analyses.key_perplexity import _row
from kerple.analyses.key_tokens import Criterion, key_targets, spelling
from kerple.cli.main import main
from kerple.data import TokenShards
from kerple.data.tokenizer import load_tokenizer
from kerple.evaluation.metrics import TokenLoss
from kerple.hf.adapter import HuggingFaceNetwork
from tests.hf.tiny import saved

LONG = {"lengths": [16, 48], "short": 8, "stride": 4, "blocks": 3, "gain": 0.2, "likely": -50.0}


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("longppl")
    (folder / "corpus").mkdir()
    for i in range(30):
        (folder / "corpus" / f"{i}.txt").write_text(f"döcument {i}: " + "what was far is near. " * 8)
    saved(folder / "evaluator", "llama", max_position_embeddings=512)
    saved(folder / "model", "gpt_neox")
    config = {
        "data": {"class_path": "TokenShards", "init_args": {"corpus": "corpus", "shares": [0.3, 0.2, 0.5]}},
        "trainer": {
            "accelerator": "cpu",
            "logger": False,
            "enable_progress_bar": False,
            "enable_model_summary": False,
            "callbacks": [{"class_path": "LongPerplexity", "init_args": LONG | {"evaluator": "evaluator"}}],
        },
    }
    (folder / "long.yaml").write_text(yaml.safe_dump(config))
    return folder


def run(model: str, *flags: str) -> dict:
    main(["test", "--hf", model, "--config", "long.yaml", "--run_dir", f"runs/{model}/test", *flags])
    return json.loads(Path(f"runs/{model}/test/longppl.json").read_text())


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
    for content in (first, second):
        assert [(row["length"], row["targets"]) for row in content["rows"]] == [(16, count), (48, count)]
        assert content["rows"][0]["ppl"] != content["rows"][1]["ppl"]

    import transformers as hf

    stream = TokenShards(corpus=None, directory="shards").stream("test")
    model = hf.AutoModelForCausalLM.from_pretrained("model").eval()
    total = 0.0
    for block, places in enumerate(keys):
        tokens = torch.from_numpy(stream.read(48 * block, 49).astype("int64"))
        for t in places:
            with torch.inference_mode():
                start = t // 16 * 16
                logits = model(tokens[None, start : t + 1]).logits[0, -1].double()
            total -= float(logits.log_softmax(-1)[tokens[t + 1]])
    assert second["rows"][0]["ppl"] == pytest.approx(math.exp(total / count), rel=1e-6)


def test_another_tokenizer_is_told_through_the_bytes(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A model of merged tokens: each covers bytes, one of which the evaluator, reading bytes, found to be key."""
    monkeypatch.chdir(place)
    merged = TokenShards("corpus", vocabulary=300, directory="merged", shares=(0.3, 0.2, 0.5), length=16)
    merged.prepare_data()
    merged.setup()
    from kerple.analyses.key_perplexity import LongPerplexity

    class Trainer:
        datamodule = merged

    callback = LongPerplexity(**LONG | {"evaluator": "evaluator", "keys": "kept"})
    keys = callback._keys(Trainer())
    assert sum(map(len, keys)) > 0

    import transformers as hf

    spell = spelling(load_tokenizer("merged"), merged.manifest.end_of_text)
    evaluator = HuggingFaceNetwork(hf.AutoModelForCausalLM.from_pretrained("evaluator").eval())
    reader = hf.AutoTokenizer.from_pretrained("evaluator")  # a token for each byte
    for i, found in enumerate(keys):
        own = [spell(token) for token in merged.blocks("test", 48, 3)[i]["tokens"].tolist()]
        text = b"".join(own).decode()
        of_byte = [n for n, character in enumerate(text) for _ in character.encode()]
        ids = reader(text, add_special_tokens=False)["input_ids"]
        assert len(ids) == len(of_byte)
        with torch.inference_mode():
            judged = key_targets(evaluator, torch.tensor(ids)[None], Criterion(8, 4, 0.2, -50.0))[0].tolist()
        # a character is key if one of its bytes is
        key = {of_byte[t + 1] for t, is_key in enumerate(judged) if is_key}
        ends = [0, *accumulate(map(len, own))]
        assert found == [j - 1 for j in range(1, len(own)) if key & set(of_byte[ends[j] : ends[j + 1]])]

    (path,) = Path("kept").glob("keys-*.json")
    assert callback._keys(Trainer()) == keys
    path.write_text(path.read_text().replace('"gain": 0.2', '"gain": 0.3'))
    with pytest.raises(ValueError, match="does not fit its name; remove it"):
        callback._keys(Trainer())
    path.write_text("{")
    with pytest.raises(ValueError, match="is no file of key tokens"):
        callback._keys(Trainer())


def test_an_evaluator_is_not_read_past_its_training_length(
    place: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(place)
    saved(place / "short", "llama", max_position_embeddings=32)
    with pytest.raises(SystemExit):
        run("evaluator", "--data.directory", "shards", "--trainer.callbacks.evaluator", "short")
    assert "got 48 tokens, which are 48 of the evaluator, expected at most 32" in capsys.readouterr().err


def test_an_infinite_loss_is_strict_json() -> None:
    loss = TokenLoss(2)
    loss.nll, loss.targets = torch.tensor([float("inf"), 1.0], dtype=torch.float64), torch.tensor([3, 2])
    row = json.loads(json.dumps(_row(64, loss), allow_nan=False))
    assert (row["nll_sum"], row["ppl"], row["block_nll"]) == (None, None, [None, 1.0])

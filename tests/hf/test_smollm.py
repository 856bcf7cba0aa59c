"""The 135M model that a package carries: imported, the same logits and losses; key tokens and needles."""

import argparse
import csv
import json
import math
from pathlib import Path

import pytest
import torch

from kerple.cli.main import main
from kerple.data import TokenShards
from kerple.evaluation import results
from kerple.hf.adapter import HuggingFaceNetwork
from kerple.hf.families import read_family
from kerple.hf.source import locate, read_model, read_model_config, read_tokenizer
from kerple.hf.weights import fill, transformer

pytestmark = pytest.mark.slow


@torch.inference_mode()
def test_our_import_reads_text_as_transformers_does():
    source = locate("smollm2-135m")
    model = read_model(source, read_model_config(source))
    theirs = HuggingFaceNetwork(model)
    assert (theirs.shape.length, theirs.strategy, theirs.in_pieces) == (8192, "RoPE", True)
    read = read_family(model.config, model.state_dict())
    ours = transformer(read.model).eval()
    assert not fill(ours, read).new
    text = "def add(a, b):\n    return a + b\n\n\ndef subtract(a, b):\n    return a - b\n" * 6
    tokens = torch.tensor([read_tokenizer(source).encode(text, add_special_tokens=False).ids])
    expected = theirs(tokens)
    torch.testing.assert_close(ours(tokens), expected, atol=1e-4 * float(expected.abs().max()), rtol=1e-4)
    losses = ours.losses(tokens)
    torch.testing.assert_close(losses, theirs.losses(tokens), atol=1e-3, rtol=1e-3)
    assert float(losses[0, -100:].mean()) < 0.5  # what was written five times before is no surprise
    cache = ours.new_cache()
    parts = torch.cat([ours(part, cache=cache) for part in tokens.split(50, 1)], 1)
    torch.testing.assert_close(parts, expected, atol=1e-4 * float(expected.abs().max()), rtol=1e-4)


@pytest.fixture(scope="module")
def shards(tmp_path_factory):
    """argparse.py in the model's tokens, all of it the test split."""
    folder = str(tmp_path_factory.mktemp("smollm") / "shards")
    given = {"corpus": argparse.__file__, "directory": folder, "shares": (0.0, 0.0, 1.0), "prepare_workers": 1}
    TokenShards(tokenizer="hf:smollm2-135m", vocabulary=49152, **given).prepare_data()
    return folder


def run(shards: str, callback: str, **options: object) -> None:
    given = json.dumps([{"class_path": callback, "init_args": options}])
    data = ["--data", "TokenShards", "--data.corpus", "null", "--data.directory", shards]
    quiet = ["--trainer.logger", "false", "--trainer.accelerator", "cpu", "--run_dir", "out"]
    main(["test", "--hf", "smollm2-135m", *data, *quiet, "--trainer.callbacks", given])


def test_key_tokens_are_those_that_its_far_context_tells(shards, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    run(shards, "LongPerplexity", lengths=[128, 512, 2048], short=128, stride=64, blocks=1)
    ppl = results.totals(results.read(Path("out"))[0]).set_index("length")["value"]
    assert ppl[2048] < math.exp(2)  # the evaluator is the model: what it was chosen by is what it says
    assert ppl[128] > ppl[512] > ppl[2048]
    (path,) = Path(shards).glob("keys-*.json")
    (keys,) = json.loads(path.read_text())["keys"]
    assert 5 < len(keys) < 500


def test_it_finds_needles(shards, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    run(shards, "Needle", lengths=[256, 512], depths=[0.0, 0.5, 1.0], problems=2)
    with Path("out/niah_single_1.csv").open() as file:
        found = {(int(row["length"]), float(row["depth"])): float(row["found"]) for row in csv.DictReader(file)}
    assert len(found) == 6
    assert sum(found.values()) > 6  # of 12
    assert Path("out/niah_single_1.png").exists()

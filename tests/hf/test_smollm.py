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


def test_key_tokens_are_those_that_its_far_context_tells_and_it_finds_needles(tmp_path, monkeypatch):
    """In argparse.py, all of which is the test split."""
    monkeypatch.chdir(tmp_path)
    options = {"corpus": argparse.__file__, "directory": "shards", "shares": (0.0, 0.0, 1.0), "prepare_workers": 1}
    TokenShards(tokenizer="hf:smollm2-135m", vocabulary=49152, **options).prepare_data()
    keys = {"lengths": [128, 512, 2048], "short": 128, "stride": 64, "blocks": 1}
    needle = {"lengths": [256, 512], "depths": [0.0, 0.5, 1.0], "problems": 2}
    callbacks = [{"class_path": "LongPerplexity", "init_args": keys}, {"class_path": "Needle", "init_args": needle}]
    data = ["--data", "TokenShards", "--data.corpus", "null", "--data.directory", "shards"]
    quiet = ["--trainer.logger", "false", "--trainer.accelerator", "cpu", "--run_dir", "out"]
    main(["test", "--hf", "smollm2-135m", *data, *quiet, "--trainer.callbacks", json.dumps(callbacks)])

    ppl = results.totals(results.read(Path("out"))[0]).query("metric == 'ppl'").set_index("length")["value"]
    assert ppl[2048] < math.exp(2)  # the evaluator is the model: what it was chosen by is what it says
    assert ppl[128] > ppl[512] > ppl[2048]
    with Path("out/niah_single_1.csv").open() as file:
        recalls = {(int(row["length"]), float(row["depth"])): float(row["recall"]) for row in csv.DictReader(file)}
    assert len(recalls) == 6
    assert sum(recalls.values()) > 3  # of 6
    assert Path("out/niah_single_1.png").exists()

"""lm-evaluation-harness on a checkpoint: its perplexity of a local task is that of `sliding`."""

import json
import math
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import yaml

from kerple.base.errors import UserError
from kerple.cli.lm_eval import Checkpoint
from kerple.cli.main import main
from kerple.cli.predict import load
from kerple.evaluation.protocols import sliding
from kerple.model.generation import generate

ROOT = Path(__file__).parents[2]
TEXTS = ["all work and no play. " * 9, "no play", "document 7: work and work and all. " * 4]
TASK = {
    "task": "local_text",
    "dataset_path": "json",
    "dataset_kwargs": {"data_files": {"test": "texts.jsonl"}},
    "test_split": "test",
    "output_type": "loglikelihood_rolling",
    "doc_to_text": "",
    "doc_to_target": "{{text}}",
    "metric_list": [{"metric": "word_perplexity"}, {"metric": "byte_perplexity"}, {"metric": "bits_per_byte"}],
}


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("harness")
    (folder / "corpus").mkdir()
    for i in range(20):
        (folder / "corpus" / f"{i}.txt").write_text(f"document {i}: " + "all work and no play. " * 12)
    config = {
        "model": {"position": "KerpleLog", "layers": 1, "dim": 16, "heads": 2, "lr": 0.01, "init": 0.2},
        "data": {
            "class_path": "TokenShards",
            "init_args": {
                "corpus": str(folder / "corpus"),
                "directory": str(folder / "shards"),
                "vocabulary": 270,
                "length": 16,
                "batch_size": 4,
            },
        },
        "trainer": {
            "max_steps": 3,
            "accelerator": "cpu",
            "precision": "32-true",
            "enable_progress_bar": False,
            "enable_model_summary": False,
            "limit_val_batches": 0,
            "logger": False,
        },
    }
    (folder / "base.yaml").write_text(yaml.safe_dump(config))
    main(["fit", "--config", str(folder / "base.yaml"), "--run_dir", str(folder / "run")])
    return folder


def asked(*arguments) -> SimpleNamespace:
    return SimpleNamespace(args=arguments)


@pytest.fixture(scope="module")
def model(place: Path) -> Checkpoint:
    return Checkpoint(str(place / "run" / "checkpoints" / "last.ckpt"), length=16, stride=5)


def test_rolling_is_sliding(model: Checkpoint) -> None:
    got = model.loglikelihood_rolling([asked(text) for text in TEXTS])
    for text, sum_ in zip(TEXTS, got, strict=True):
        ids = [model.start, *model.data.encode(text)]
        total = 0.0
        for t in range(len(ids) - 1):  # target by target: a step ends at 16, 21, 26, … and at the last
            end = min(16, len(ids) - 1)
            while end <= t:
                end += 5
            end = min(end, len(ids) - 1)
            with torch.inference_mode():
                logits = model.network(torch.tensor([ids[max(0, end - 16) : t + 1]]))[0, -1].double()
            total += float(logits.log_softmax(-1)[ids[t + 1]])
        assert sum_ == pytest.approx(total, rel=1e-5)
    assert model.loglikelihood_rolling([asked("")]) == [0.0]


def test_a_continuation_is_scored_after_its_context(model: Checkpoint, monkeypatch: pytest.MonkeyPatch) -> None:
    ((score, greedy),) = model.loglikelihood([asked("all work", " and")])
    ids = [model.start, *model.data.encode("all work"), *model.data.encode(" and")]
    n = len(model.data.encode(" and"))
    with torch.inference_mode():
        logits = model.network(torch.tensor([ids[:-1]]))[0].double().log_softmax(-1)
    expected = sum(float(logits[t, ids[t + 1]]) for t in range(len(ids) - 1 - n, len(ids) - 1))
    assert score == pytest.approx(expected, rel=1e-5)
    assert not greedy
    before = model.data.encode("all work")
    after = [int(token) for token in generate(model.network, torch.tensor([[model.start, *before]]), 4)]
    with monkeypatch.context() as patch:  # what it writes need not be text that is cut into the same tokens
        patch.setattr(model, "_apart", lambda *_: (before, after))
        assert model.loglikelihood([asked("", "")])[0][1]
        after[2] = (after[2] + 1) % 256
        assert not model.loglikelihood([asked("", "")])[0][1]
    (written,) = model.generate_until([asked("all work", {"until": ["zz"], "max_gen_toks": 4})])
    (stopped,) = model.generate_until([asked("all work", {"until": [written[1]], "max_gen_toks": 4})])
    assert stopped == written[: written.index(written[1])]


def test_a_first_word_keeps_its_space(model: Checkpoint, monkeypatch: pytest.MonkeyPatch) -> None:
    decode, written = model.data.decode, model.data.encode(" and")
    monkeypatch.setattr(model.data, "decode", lambda tokens: decode(tokens).removeprefix(" "))  # as Llama's does
    monkeypatch.setattr("kerple.cli.lm_eval.generate", lambda *_, **__: iter(written))
    assert model.generate_until([asked("all work", {"max_gen_toks": 4})]) == [" and"]


def test_every_token_of_a_continuation_is_scored_however_long_it_is(model: Checkpoint) -> None:
    before, after = model.data.encode("all work"), model.data.encode(TEXTS[0])
    assert len(after) > model.length + model.stride
    ((score, greedy),) = model.loglikelihood([asked("all work", TEXTS[0])])
    text = torch.tensor([[before[-1], *after]])
    with torch.inference_mode():
        expected = -float(sliding(model.network, text, model.length, stride=model.stride).double().sum())
    assert score == pytest.approx(expected, rel=1e-5)
    assert not greedy
    assert model.loglikelihood([asked("all work", "")]) == [(0.0, True)]


def test_a_context_that_is_cut_is_said(model: Checkpoint, caplog: pytest.LogCaptureFixture) -> None:
    short, long = asked("all", {"max_gen_toks": 4}), asked(TEXTS[0], {"max_gen_toks": 4})
    model.generate_until([short])
    assert not caplog.text
    model.generate_until([short, long, long])
    (told,) = caplog.messages
    assert "2 of 3 contexts are cut, one to its last 12 tokens, to leave room for max_gen_toks in 16" in told
    caplog.clear()
    after = len(model.data.encode(" and"))
    model.loglikelihood([asked("all", " and"), asked(TEXTS[0].rstrip(), " and")])
    (told,) = caplog.messages
    assert f"1 of 2 contexts are cut, one to its last {17 - after} tokens" in told
    with pytest.raises(UserError, match="length: got 16, expected more than the 16 tokens of max_gen_toks"):
        model.generate_until([asked("all", {"max_gen_toks": 16})])


def test_the_command_says_how_the_harness_is_installed(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "lm_eval", None)
    with pytest.raises(SystemExit):
        main(["lm_eval", "--tasks", "x"])
    assert "install it with: pip install --no-deps --target FOLDER" in capsys.readouterr().err


@pytest.mark.slow
def test_the_harness_gives_the_perplexity_of_sliding(place: Path) -> None:
    """The real harness in a process of its own, on a task file and a data file that lie here."""
    (place / "tasks").mkdir(exist_ok=True)
    (place / "tasks" / "local.yaml").write_text(yaml.safe_dump(TASK))
    (place / "texts.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in TEXTS))
    harness = Path(sys.prefix) / "lm-eval"
    assert (harness / "lm_eval").is_dir(), "make test-slow installs requirements-lm-eval.txt there"
    environment = os.environ | {
        "PYTHONPATH": os.pathsep.join([str(ROOT / "src"), str(ROOT), os.environ.get("PYTHONPATH", ""), str(harness)]),
        "HF_HUB_OFFLINE": "1",
        "HF_HOME": str(place / "hf"),
    }
    checkpoint = place / "run" / "checkpoints" / "last.ckpt"
    command = [sys.executable, str(ROOT / "run.py"), "lm_eval", "--model_args", f"ckpt={checkpoint},length=16,stride=5"]
    command += ["--tasks", "local_text", "--include_path", "tasks", "--output_path", "out", "--device", "cpu"]
    ended = subprocess.run(command, cwd=place, env=environment, capture_output=True, text=True)
    assert ended.returncode == 0, ended.stderr[-3000:]
    (path,) = (place / "out").rglob("results_*.json")
    result = json.loads(path.read_text())["results"]["local_text"]
    trained, data = load(str(checkpoint))
    total = 0.0
    for text in TEXTS:
        tokens = torch.tensor([[data.manifest.end_of_text, *data.encode(text)]])
        length = min(16, tokens.shape[1] - 1)
        with torch.inference_mode():
            total += float(sliding(trained.network, tokens, length, stride=min(5, length)).double().sum())
    size = sum(len(text.encode()) for text in TEXTS)
    assert result["byte_perplexity,none"] == pytest.approx(math.exp(total / size), rel=1e-5)
    assert result["bits_per_byte,none"] == pytest.approx(total / size / math.log(2), rel=1e-5)


def test_what_the_harness_adds_is_taken_and_a_slip_is_refused(place: Path) -> None:
    checkpoint = str(place / "run" / "checkpoints" / "last.ckpt")

    class LM:  # as the harness's
        @property
        def device(self) -> str:
            return "cpu"

    given = type("KerpleLM", (Checkpoint, LM), {})(checkpoint, device="meta", batch_size=16, max_batch_size=None)
    assert next(given.network.parameters()).device.type == "meta"
    with pytest.raises(UserError, match="model_args: got lenght, expected ckpt, length, stride or trust"):
        Checkpoint(checkpoint, lenght=4096)

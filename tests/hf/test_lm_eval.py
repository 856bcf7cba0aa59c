"""lm-evaluation-harness: its own `hf` model reads what `export` writes, and gives the perplexity of our forward."""

import json
import math
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from kerple.data.tokenizer import train_tokenizer
from kerple.hf.export import export
from kerple.hf.families import StoredModel
from kerple.hf.weights import transformer
from tests.hf.tiny import hf

ROOT = Path(__file__).parents[2]
HARNESS = Path(os.environ.get("LM_EVAL", f"{sys.prefix}/lm-eval"))
PROGRAM = "import kerple.hf; from lm_eval.__main__ import cli_evaluate; cli_evaluate()"  # of docs/how-to/pretrained.md
LENGTH = 16
TEXTS = ["all work and no play. " * 9, "no play", "document 7: work and work and all. " * 4]
TASK = """
{task: local_text, dataset_path: json, dataset_kwargs: {data_files: {test: texts.jsonl}}, test_split: test,
 output_type: loglikelihood_rolling, doc_to_text: "", doc_to_target: "{{text}}",
 metric_list: [{metric: byte_perplexity}]}
"""


@pytest.mark.slow
@pytest.mark.skipif(not (HARNESS / "lm_eval").is_dir(), reason="lm-evaluation-harness is not installed")
@torch.inference_mode()
def test_the_harness_reads_an_exported_model(tmp_path):
    torch.manual_seed(0)
    options = {"dim": 16, "heads": 2, "length": LENGTH, "layers": 1, "vocabulary": 257, "position": "KerpleLog"}
    network = transformer(options | {"init": 0.3}).eval()
    tokenizer = train_tokenizer(TEXTS, 257)
    end = tokenizer.token_to_id("<|endoftext|>")
    export(StoredModel(options, dict(network.state_dict())), tmp_path / "model", tokenizer, end)
    (tmp_path / "tasks").mkdir()
    (tmp_path / "tasks" / "local.yaml").write_text(TASK)
    (tmp_path / "texts.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in TEXTS))
    environment = os.environ | {"PYTHONPATH": os.pathsep.join([str(ROOT / "src"), str(HARNESS)])}
    environment |= {"HF_HUB_OFFLINE": "1", "HF_HOME": str(tmp_path / "hf")}
    command = [sys.executable, "-c", PROGRAM, "--model", "hf", "--device", "cpu"]
    command += ["--model_args", f"pretrained=model,max_length={LENGTH},dtype=float32"]
    command += ["--tasks", "local_text", "--include_path", "tasks", "--output_path", "out"]
    ended = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True)
    assert ended.returncode == 0, ended.stderr[-3000:]
    (path,) = (tmp_path / "out").rglob("results_*.json")

    total = 0.0
    for text in TEXTS:
        tokens = torch.tensor([end, *tokenizer.encode(text).ids])
        for first in range(0, len(tokens) - 1, LENGTH):  # every target once, the last window reaches back
            last = min(first + LENGTH, len(tokens) - 1)
            window = tokens[max(0, last - LENGTH) : last]
            logits = network(window[None])[0, first - last :].double().log_softmax(-1)
            total -= float(logits.gather(-1, tokens[first + 1 : last + 1, None]).sum())
    size = sum(len(text.encode()) for text in TEXTS)
    (measured,) = json.loads(path.read_text())["results"].values()
    assert measured["byte_perplexity,none"] == pytest.approx(math.exp(total / size), 1e-5)
    assert hf.AutoConfig.from_pretrained(tmp_path / "model").model_type == "kerple"

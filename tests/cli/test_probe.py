"""`probe`: its page, its exit status, and its messages about models that cannot be read."""

import json
from pathlib import Path
from types import SimpleNamespace

import gguf
import numpy as np
import psutil
import pytest

from kerple.cli.main import main
from kerple.data.evaluation_text import Text
from kerple.data.prepare.corpora import CORPORA, Corpus
from kerple.data.shard_options import ShardOptions
from kerple.measure.gap import GapCurve
from kerple.model import Transformer
from kerple.positions import Learned, Shape
from kerple.probe.probe_model import Report
from kerple.probe.text_measurements import first_tokens, measure_on_text, text_measures
from tests.cli.test_pretrained import broken
from tests.cli.tiny import complaint
from tests.hf.tiny import saved

FAULTY = """
open("ran", "w").close()
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


def probe_results(folder):
    return json.loads((folder / "probe.json").read_text())


def test_a_correct_model_passes_and_is_measured_on_text(here, capsys, monkeypatch):
    words = " ".join(f"{chr(97 + i * i % 26)}{i % 7}" for i in range(400))
    for i in range(14):
        (here / f"{i}.txt").write_text(words[i:])
    parts = ["--gap", "true", "--far_context", "true", "--blocks", "2", "--text", str(here / "*.txt")]
    main(["probe", str(here / "llama"), *parts])
    content, page = probe_results(here / "logs/probe/llama"), (here / "logs/probe/llama/probe.html").read_text()
    assert {layer["verdict"] for layer in content["layers"]} == {"agrees"}
    verdicts = {i["name"]: i["verdict"] for i in content["invariances"]}
    assert verdicts.pop("packed documents with use_cache") == "broken by design"
    assert {*verdicts.values()} == {"holds"}
    assert content["outcome"] == "no faults found; 2 of 2 layers measured"
    assert [result["name"] for result in content["results"]] == ["gap", "far_context", "far_context"]
    assert "the corpus" in page
    # of the layers and of far context; the context of a random model does not help, so there is no gap curve
    assert page.count("data:image/png") == 3
    assert "gap, far_context: at least" in capsys.readouterr().out
    with monkeypatch.context() as patch:  # the checks are kept if the measurements on text fail
        patch.setattr("kerple.probe.text_measurements.measure_on_text", None)
        with pytest.raises(TypeError):
            main(["probe", str(here / "llama"), *parts, "--output", "kept"])
    assert probe_results(here / "kept") == content | {"results": [], "text": ""}
    monkeypatch.setattr("kerple.probe.probe_model.probe_model", None)  # wrong options are reported before the checks
    for wrong, message in (
        (["--text", str(here / "1.txt")], "blocks of 33 tokens that lie inside one document, expected at least 12"),
        (["--length", "100"], "error: length: got 100, expected 2, 3, … times the training length, 32"),
        (["--length", "0"], "error: length: got 0, expected 2, 3, … times the training length, 32"),
        (["--blocks", "0"], "blocks: got 0, expected a positive number"),
    ):
        assert message in complaint(capsys, "probe", here / "llama", *parts, *wrong)


@pytest.mark.parametrize("command", ["probe", pytest.param("parity", marks=pytest.mark.slow)])
def test_a_report_replaces_only_one_on_the_same_model_and_its_folder_is_made_first(command, here, capsys, monkeypatch):
    sides = 1 if command == "probe" else 2
    for folder in (here / "llama", saved(here / "other/llama", "llama")):
        for _ in range(2):
            main([command, *[str(folder)] * sides, *(["--layers", "false"] if sides == 1 else ["--length", "8"])])
    names = sorted(path.name for path in (here / "logs" / command).iterdir())
    assert names == ["-".join(["llama"] * sides) + end for end in ("", "_v1")]
    monkeypatch.setattr("kerple.hf.pretrained_model_reader.read_fp32_model", None)
    (here / "file").touch()
    message = complaint(capsys, command, *[here / "llama"] * sides, "--output", "file/inside")
    assert message.startswith("error: output: file/inside cannot be written to (")


def test_the_reason_is_printed_if_a_model_has_too_few_positions_for_a_measurement():
    network = Transformer(Shape(16, 2, 32), 1, 30, Learned).eval()
    text = Text(np.arange(24_000) % 30, begins=np.arange(0, 24_000, 2000))
    ((_, gap, _),) = text_measures(network, text, ["gap"], None, 4)
    assert gap == GapCurve(context=16, k=16)  # together the training length
    results = measure_on_text(network, text, [("gap", GapCurve(), 1)])
    report = Report("small", "kerple", results=results)
    assert results[0].skipped is not None
    assert f"gap: {results[0].skipped}" in report.summary()


def test_invariances_judge_an_unknown_family_whose_code_needs_permission(here, capsys):
    classes = {"AutoConfig": "alive.Config", "AutoModelForCausalLM": "alive.Model"}
    folder = broken(here, "alive", model_type="alive", architectures=["Model"], auto_map=classes)
    (folder / "alive.py").write_text(FAULTY)
    for command in (["probe"], ["test", "--hf"]):
        assert "could not be read" in complaint(capsys, *command, folder)
    assert not (here / "ran").exists()
    with pytest.raises(SystemExit) as ended:
        main(["probe", str(folder), "--trust_remote_code", "true"])
    assert ended.value.code == 1
    content = probe_results(here / "logs/probe/alive")
    broken_invariances = [i["name"] for i in content["invariances"] if i["verdict"] == "broken"]
    assert sorted(broken_invariances) == ["cached against uncached", "prefill against decoding"]
    assert all("not verified" in layer["unknown"] for layer in content["layers"])


def test_a_checkpoint_is_probed(genuine, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(SystemExit) as ended:  # probe compares the bias of KERPLE-log with no formula
        main(["probe", str(genuine), "--output", "page"])
    assert ended.value.code == 2
    assert "nothing could be judged; 1 of 1 layers measured, 1 of them not judged" in capsys.readouterr().out
    assert {layer["expected"] for layer in probe_results(tmp_path / "page")["layers"]} == {"no rotation, KerpleLog"}
    error = complaint(capsys, "probe", genuine, "--gap", "true", "--text", "code")
    assert error == "error: text: got code, expected null, because a checkpoint is measured on its test text"
    error = complaint(capsys, "probe", genuine, "--text", "code")
    assert error.startswith("error: text: got code without gap and far_context, expected --gap true")


def test_a_built_in_text_is_read_from_the_folder_of_prepare(monkeypatch):
    folders = []
    monkeypatch.setitem(CORPORA, "code", lambda folder: folders.append(folder) or Corpus(lambda: iter(()), []))
    first_tokens("code", 4, [])
    assert folders == [Path(ShardOptions("code").source_folder)]


def test_unknown_architectures_and_too_little_memory_are_refused(here, capsys, monkeypatch):
    writer = gguf.GGUFWriter(here / "odd.gguf", "nosuch")
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()
    assert "nosuch" in complaint(capsys, "probe", here / "odd.gguf")
    for option in ("length", "blocks"):
        complained = complaint(capsys, "probe", here / "odd.gguf", f"--{option}", "64", "--gap", "true")
        assert complained.startswith(f"error: {option}: got 64 without far_context, expected --far_context true")
    nan = broken(here, "nan", rms_norm_eps=float("nan"))
    assert "error: model: its logits are not finite; check" in complaint(capsys, "probe", nan)
    monkeypatch.setattr(psutil, "virtual_memory", lambda: SimpleNamespace(available=1000))
    assert "are free; use a machine with more memory, or a smaller model" in complaint(capsys, "probe", here / "llama")

"""`test --hf`: its results, and its messages about incomplete or unsafe models."""

import json
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.nn.functional as F
import yaml
from tokenizers import Tokenizer

from kerple.base.errors import UserError
from kerple.cli.main import main
from kerple.config.files import config_path
from kerple.data import TokenShards
from kerple.hf import pretrained_tokenizer
from kerple.hf.pretrained_model_reader import read_network
from kerple.measure import results_table
from kerple.measure.pretrained_options import configuration
from kerple.measure.shift import ShiftTest
from kerple.positions import ALiBi, Sinusoidal
from tests.cli.tiny import complaint
from tests.hf.tiny import LENGTH, hf, saved, tiny

PROTOCOLS = {"lengths": [16, 64], "protocols": ["full", "windowed"], "window": 8, "blocks": 2}
CALLBACKS = [
    {"class_path": "Extrapolation", "init_args": PROTOCOLS},
    {"class_path": "ShiftTest", "init_args": {"length": 16, "shifts": [0, 40], "blocks": 2}},
    {"class_path": "ReceptiveField", "init_args": {"length": 16, "blocks": 2}},
    {"class_path": "GapCurve", "init_args": {"context": 8, "k": 4, "blocks": 2}},
]
PERPLEXITY_ONLY = ("--trainer.callbacks", json.dumps(CALLBACKS[:1]))


@pytest.fixture(scope="module")
def place(corpus, tmp_path_factory):
    """A folder with a model and a configuration."""
    folder = tmp_path_factory.mktemp("hf")
    saved(folder / "llama", "llama")
    data = {"class_path": "TokenShards", "init_args": {"corpus": str(corpus), "split_fractions": [0.4, 0.2, 0.4]}}
    trainer = {"accelerator": "cpu", "callbacks": CALLBACKS}
    (folder / "hf.yaml").write_text(yaml.safe_dump({"data": data, "trainer": trainer}))
    return folder


@pytest.fixture
def here(place, monkeypatch):
    monkeypatch.chdir(place)
    return place


def command(place: Path, model: Path | str, *flags: str) -> list[str]:
    return ["test", "--hf", str(model), "--config", str(place / "hf.yaml"), "--data.directory", "shards", *flags]


def run(place: Path, model: Path | str, *flags: str) -> None:
    main(command(place, model, *flags))


def losses(folder: Path, length: int = 64) -> np.ndarray:
    """Sum of the losses of each block with the protocol full."""
    table, _ = results_table.read(folder)
    chosen = (table["metric"] == "ppl") & (table["protocol"] == "full") & (table["length"] == length)
    return table[chosen].sort_values("block")["sum"].to_numpy()


def test_without_a_configuration_the_measurements_are_those_of_hf_yaml(here):
    shipped = yaml.safe_load(Path(config_path("configs/hf.yaml")).read_text())["trainer"]["callbacks"]
    config = yaml.safe_load(configuration(["--hf", str(here / "llama")]))
    names = [callback["class_path"].rpartition(".")[2] for callback in config["trainer"]["callbacks"]]
    assert names == [callback["class_path"] for callback in shipped]


def test_a_model_folder_is_measured_by_protocols_and_analyses(here):
    run(here, here / "llama")
    folder = here / "logs" / "pretrained" / "llama" / "test"
    config = yaml.safe_load((folder / "config.yaml").read_text())
    assert [*folder.parent.iterdir()] == [folder]
    assert config["model"]["path"] == str(here / "llama")
    assert config["data"]["init_args"]["length"] == LENGTH
    assert config["data"]["init_args"]["tokenizer"] == f"hf:{here / 'llama'}"
    model = hf.AutoModelForCausalLM.from_pretrained(here / "llama").eval()
    blocks = TokenShards(corpus=None, directory="shards").text("test").blocks(64, 2)
    with torch.inference_mode():
        for length in (16, 64):
            segments = [blocks[i].unfold(0, length + 1, length) for i in range(2)]
            pairs = zip([model(rows[:, :-1]).logits.double().mT for rows in segments], segments, strict=True)
            expected = [F.cross_entropy(scores, rows[:, 1:], reduction="sum") for scores, rows in pairs]
            np.testing.assert_allclose(losses(folder, length), expected, rtol=1e-6)
    assert {"no_context4", "gap4"} <= set(results_table.read(folder)[0]["protocol"])
    assert (folder / "shift.csv").exists()
    assert (folder / "receptive_window.csv").exists()


def test_finished_measurements_are_kept_if_a_later_one_fails(here, capsys, monkeypatch):
    def fail(*_: object) -> None:
        raise UserError("out of memory")

    monkeypatch.setattr(ShiftTest, "measure", fail)
    two = ("--trainer.callbacks", json.dumps(CALLBACKS[:2]))
    assert refused(capsys, here, here / "llama", "--output=kept", *two) == "error: out of memory"
    assert len(losses(here / "kept")) == 2
    assert len(list((here / "kept").glob("events.*"))) == 1


def test_document_masks_are_those_of_the_options_and_refused_for_models_without_them(here, capsys):
    protocols = {"lengths": [64], "protocols": ["full"], "blocks": 3}  # a document ends in the third block
    options = ["--trainer.callbacks", json.dumps([{"class_path": "Extrapolation", "init_args": protocols}])]
    options += ["--data.mask_documents=true", "--data.restart_positions=false"]
    assert "HuggingFaceNetwork, expected one with SupportsDocuments" in refused(capsys, here, here / "llama", *options)
    run(here, here / "llama", "--model.position=Sinusoidal", "--output=masked", *options)
    network = read_network(str(here / "llama"), position=Sinusoidal)
    network.restart_positions = False
    blocks = TokenShards(corpus=None, directory="shards", mask_documents=True).text("test").blocks(64, 3)
    with torch.inference_mode():
        rows = [network.losses(blocks[i][None], **blocks.document_options(i)).double() for i in range(3)]
        assert float(network.losses(blocks[2][None]).sum()) != pytest.approx(float(rows[2].sum()), rel=1e-4)
    np.testing.assert_allclose(losses(here / "masked"), [row.sum() for row in rows], rtol=1e-6)


@pytest.mark.slow
def test_a_strategy_without_parameters_replaces_that_of_the_model(here, capsys):
    run(here, here / "llama", "--output=before", *PERPLEXITY_ONLY)
    same = ["--model.position=RoPE", "--model.position.base=1000"]  # the strategy of the model
    run(here, here / "llama", "--output=same", *same, *PERPLEXITY_ONLY)
    np.testing.assert_allclose(losses(here / "same"), losses(here / "before"), rtol=1e-5)
    run(here, here / "llama", "--model.position=ALiBi", *PERPLEXITY_ONLY)
    assert "the strategy of the model is replaced by ALiBi" in capsys.readouterr().out
    assert (losses(here / "logs/pretrained/llama-ALiBi/test") != losses(here / "before")).all()
    assert "has parameters that the model lacks" in refused(capsys, here, here / "llama", "--model.position=T5")
    network = read_network("llama", 9, position=ALiBi)
    assert (network.training_length, network.training) == (9, False)
    twice = ("--trainer.callbacks", json.dumps(CALLBACKS[:1] * 2))
    assert "more than one Extrapolation with results" in refused(capsys, here, here / "llama", *twice)


def refused(capsys: pytest.CaptureFixture[str], place: Path, model: Path | str, *flags: str) -> str:
    return complaint(capsys, *command(place, model, *flags))


def broken(here: Path, name: str, *, without: tuple[str, ...] = (), index: str = "", **config: object) -> Path:
    """A copy of the model without some files, with other entries in its configuration."""
    folder = here / name
    folder.mkdir(exist_ok=True)
    for path in (here / "llama").iterdir():
        if path.name not in without:
            (folder / path.name).write_bytes(path.read_bytes())
    if index:
        (folder / "model.safetensors.index.json").write_text(index)
    if config:
        (folder / "config.json").write_text(json.dumps(json.loads((folder / "config.json").read_text()) | config))
    return folder


@pytest.mark.slow
def test_incomplete_models_and_other_tokenizers_are_refused(here, capsys):
    sizes = {"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 32}
    hf.BertModel(hf.BertConfig(vocab_size=257, **sizes)).save_pretrained(here / "bert")
    for model, part in (
        ("./nothing", "error: hf: got './nothing', which does not exist"),
        (broken(here, "bare", without=("model.safetensors",)), "no weights"),
        (here / "bert", "expected a causal language model"),
        (broken(here, "mute", without=("tokenizer.json", "tokenizer_config.json")), "tokenizer.json"),
        (broken(here, "deeper", num_hidden_layers=3), "do not fit its config.json"),
        (broken(here, "odd", hidden_size=50), "odd"),
        (broken(here, "indexed", index="[1]"), "model.safetensors.index.json: got '[1]', expected a mapping"),
    ):
        assert part in refused(capsys, here, model)
    assert "callbacks: got none, expected" in refused(capsys, here, here / "llama", "--trainer.callbacks", "[]")
    run(here, here / "llama", *PERPLEXITY_ONLY)  # prepares the shards
    other = broken(here, "other")
    content = json.loads((other / "tokenizer.json").read_text())
    ids = content["model"]["vocab"]
    ids["a"], ids["b"] = ids["b"], ids["a"]
    (other / "tokenizer.json").write_text(json.dumps(content))
    line = refused(capsys, here, other, "--data.corpus", "null")
    assert f"were made with hf:{here / 'llama'}, not with the tokenizer of {other}" in line


@pytest.mark.slow
def test_a_declared_end_of_text_is_used_and_ids_outside_the_embedding_are_refused(here, capsys):
    folder = broken(here, "declared")
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (folder / name).write_text((folder / name).read_text().replace("<|endoftext|>", "<|end|>"))
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    tokenizer.add_special_tokens(["<pad>"])  # its id, 257, is outside the embedding, and in no text
    tokenizer.save(str(folder / "tokenizer.json"))
    run(here, folder, *PERPLEXITY_ONLY, "--data.directory=declared-shards")
    shards = TokenShards(corpus=None, directory="declared-shards")
    assert shards.folder.tokenizer().id_to_token(shards.manifest.end_of_text) == "<|end|>"
    tokenizer.add_tokens(["far"])
    tokenizer.save(str(folder / "tokenizer.json"))
    pretrained_tokenizer._read_tokenizer.cache_clear()
    data = [f"--data.tokenizer=hf:{folder}", "--data.vocabulary=259", f"--data.corpus={here / 'hf.yaml'}"]
    for command in (
        ["test", "--hf", str(folder), "--config", "hf.yaml"],
        ["extend", str(folder), "--length", "64", data[2]],
        ["prepare", data[0], data[2]],
        ["fit", "--config", config_path("configs/demo.yaml"), f"--weights={folder}", *data],
    ):
        line = complaint(capsys, *command, "--data.directory=never")
        assert "whose tokenizer has the id 258 ('far'), expected ids below 257" in line
        assert not Path("never").exists()


def test_pickled_weights_are_refused_with_a_conversion_command(here, capsys):
    folder = broken(here, "pickled", without=("model.safetensors",))
    state = tiny("llama", vocab_size=257).state_dict()
    torch.save(state, folder / "pytorch_model.bin")
    line = refused(capsys, here, folder)
    assert "reading a pickle can run any code" in line
    exec(line[line.index('python -c "') + len('python -c "') : line.rindex('"')])
    converted = hf.AutoModelForCausalLM.from_pretrained(f"{folder}-safetensors", use_safetensors=True)
    torch.testing.assert_close(converted.state_dict()["model.norm.weight"], state["model.norm.weight"])
    # transformers would read files in an index by torch.load, whatever their extension
    (folder / "pytorch_model.bin").rename(folder / "weights.bin")
    index = {"metadata": {}, "weight_map": dict.fromkeys(state, "weights.bin")}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    assert "are pickled, and reading a pickle can run any code" in refused(capsys, here, folder)


@pytest.mark.slow
def test_pretrained_models_are_rows_of_a_comparison(here):
    """Each model is measured in a separate process, as in `make pretrained`."""
    folder = str(here / "llama")
    comparison: dict = {"name": "windows", "base": [], "seeds": [1], "baseline": "RoPE"}
    comparison["test"] = {"config": "hf.yaml", "data.directory": "shards-compared", "trainer.logger": False}
    comparison["strategies"] = {"RoPE": {"hf": folder}, "PI": {"hf": folder, "options": {"scaling": "pi", "factor": 2}}}
    Path("windows.yaml").write_text(yaml.safe_dump(comparison))
    main(["compare", "--config", "windows.yaml"])
    table = Path("results/windows/table.md").read_text()
    assert "| RoPE" in table
    assert "| PI" in table
    main(["compare", "--config", "windows.yaml"])  # nothing to do


@pytest.mark.slow
def test_a_warning_if_the_text_is_not_that_of_the_exported_run(here, capsys):
    run(here, here / "llama", *PERPLEXITY_ONLY, "--output", "first")
    sha256 = TokenShards(corpus=None, directory="shards").manifest.splits["test"].sha256
    for test, warned in ((sha256, False), ("0" * 64, True)):
        folder = broken(here, "exported", kerple_trained_on={"corpus": "code", "test": test})
        capsys.readouterr()
        run(here, folder, *PERPLEXITY_ONLY, "--output", f"warned-{warned}", "--data.corpus", "null")
        line = "the test text in shards differs from the test text of the exported run (code)"
        assert (line in capsys.readouterr().out) == warned

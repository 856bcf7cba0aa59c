"""`test --hf` as a user meets it: what it writes, and what it answers to what is no model."""

import csv
import json
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
import yaml
from tokenizers.pre_tokenizers import ByteLevel

from kerple.cli.main import main
from kerple.data import TokenShards
from kerple.evaluation import results
from tests.hf.test_adapter import plain_loop
from tests.hf.tiny import LENGTH, saved, tiny

hf = pytest.importorskip("transformers")

CALLBACKS = [
    {
        "class_path": "Extrapolation",
        "init_args": {
            "lengths": [16, 32, 64],
            "protocols": ["full", "windowed", "sliding", "last", "per_position"],
            "window": 8,
            "stride": 8,
            "skip": 56,
            "k": 8,
            "blocks": 2,
        },
    },
    {"class_path": "PositionWisePerplexity", "init_args": {"length": 32, "window": 8, "blocks": 2}},
    {"class_path": "ShiftTest", "init_args": {"length": 16, "shifts": [0, 40], "blocks": 2}},
    {"class_path": "ReceptiveField", "init_args": {"length": 16, "blocks": 2}},
    {"class_path": "Dashboards"},
]


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a corpus, a model and a configuration."""
    folder = tmp_path_factory.mktemp("hf")
    corpus = folder / "corpus"
    corpus.mkdir()
    for i in range(40):
        (corpus / f"{i}.txt").write_text(f"document {i}: " + "all work and no play. " * 12)
    saved(folder / "llama", "llama")
    config = {
        "data": {"class_path": "TokenShards", "init_args": {"corpus": str(corpus), "shares": [0.4, 0.2, 0.4]}},
        "trainer": {
            "accelerator": "cpu",
            "enable_progress_bar": False,
            "enable_model_summary": False,
            "callbacks": CALLBACKS,
        },
    }
    (folder / "hf.yaml").write_text(yaml.safe_dump(config))
    return folder


PERPLEXITY_ALONE = ("--trainer.callbacks", json.dumps(CALLBACKS[:1]))


def run(place: Path, model: Path | str, *flags: str) -> None:
    main(["test", "--hf", str(model), "--config", str(place / "hf.yaml"), "--data.directory", "shards", *flags])


@pytest.fixture
def here(place: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(place)
    return place


def test_every_protocol_and_analysis_of_a_folder(here: Path) -> None:
    run(here, here / "llama")
    folder = here / "logs" / "pretrained" / "llama" / "test"
    table, _ = results.read(folder)
    assert set(table["protocol"]) == {"full", "windowed8", "sliding8", "last8", "per_position"}
    config = yaml.safe_load((folder.parent / "config.yaml").read_text())
    assert config["model"]["path"] == str(here / "llama")
    assert config["data"]["init_args"]["length"] == LENGTH
    assert config["data"]["init_args"]["tokenizer"] == f"hf:{here / 'llama'}"
    manifest = json.loads((here / "shards" / "manifest.json").read_text())
    assert manifest["settings"]["tokenizer"] == f"hf:{here / 'llama'}"

    stream = TokenShards(corpus=None, directory="shards").stream("test")
    tokens = torch.from_numpy(stream.read(0, 2 * 64 + 1).astype("int64"))
    model = hf.AutoModelForCausalLM.from_pretrained(here / "llama").eval()
    with torch.inference_mode():
        sums = table.query("metric == 'ppl' and protocol == 'full' and length == 32")["sum"]
        for block, nats in enumerate(sums):
            text = tokens[64 * block : 64 * block + 65][None]
            assert nats == pytest.approx(plain_loop(model, text, _Full, 32), rel=1e-6)
        assert len(sums) == 2
    with (folder / "shift.csv").open() as file:
        shifts = [float(row["ppl"]) for row in csv.DictReader(file)]
    assert shifts[1] == pytest.approx(shifts[0], rel=1e-4)
    assert (folder / "receptive_window.csv").exists()
    assert (folder / "position_wise.csv").exists()


class _Full:
    name, skip = "full", 0


def test_scaling_is_a_flag(here: Path) -> None:
    run(here, here / "llama", "--model.scaling", "yarn", "--model.factor", "2", *PERPLEXITY_ALONE)
    table, about = results.read(here / "logs/pretrained/llama-yarn2.0/test")
    assert about["evaluations"]["extrapolation"]["strategy"] == "YaRN"
    plain, _ = results.read(here / "logs/pretrained/llama/test")
    assert table["sum"][0] != plain["sum"][0]


def refused(capsys: pytest.CaptureFixture[str], place: Path, model: Path | str, *flags: str) -> str:
    with pytest.raises(SystemExit) as ended:
        run(place, model, *flags)
    told = capsys.readouterr().err.strip().splitlines()[-1]
    assert ended.value.code == 2
    assert told.startswith("error: ")
    return told


def broken(here: Path, name: str, *, without: tuple[str, ...] = (), **config: object) -> Path:
    """A copy of the model without some files, with other entries in its configuration."""
    folder = here / name
    folder.mkdir(exist_ok=True)
    for path in (here / "llama").iterdir():
        if path.name not in without:
            (folder / path.name).write_bytes(path.read_bytes())
    if config:
        content = json.loads((folder / "config.json").read_text())
        (folder / "config.json").write_text(json.dumps(content | config))
    return folder


def test_a_path_that_is_no_model(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert "there is no './nothing', expected a folder" in refused(capsys, here, "./nothing")
    (here / "empty").mkdir()
    assert "has no config.json and no .gguf, expected" in refused(capsys, here, here / "empty")
    (here / "run.ckpt").write_text("words")
    assert "run.ckpt is no model, expected a folder" in refused(capsys, here, here / "run.ckpt")
    bare = broken(here, "bare", without=("model.safetensors",))
    assert "has a config.json and no weights; expected model.safetensors" in refused(capsys, here, bare)


def test_an_index_of_safetensors_that_names_a_pickle(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """transformers would read the file that an index names by torch.load, whatever its name says."""
    folder = broken(here, "indexed", without=("model.safetensors",))
    state = tiny("llama", vocab_size=257).state_dict()
    torch.save(state, folder / "weights.bin")
    index = {"metadata": {}, "weight_map": dict.fromkeys(state, "weights.bin")}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    assert "are pickled, and a pickle can run anything when it is read" in refused(capsys, here, folder)
    (folder / "model.safetensors.index.json").write_text("[")
    assert "the weights of" in refused(capsys, here, folder)


def test_a_name_that_no_hub_knows(
    here: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    assert "a name on the Hugging Face hub that can be reached from here" in refused(capsys, here, "nobody/nothing")


def test_an_encoder(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config = hf.BertConfig(
        vocab_size=257, hidden_size=32, num_hidden_layers=1, num_attention_heads=2, intermediate_size=32
    )
    hf.BertModel(config).save_pretrained(here / "bert")
    assert "is a bert (BertModel), expected a causal language model" in refused(capsys, here, here / "bert")


def test_a_missing_tokenizer(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = broken(here, "mute", without=("tokenizer.json", "tokenizer_config.json"))
    assert "comes without one; expected tokenizer.json beside its config.json" in refused(capsys, here, folder)


def test_a_tokenizer_of_another_model(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run(here, here / "llama", "--trainer.callbacks", "[]", "--run_dir", "none")  # the shards are there
    other = broken(here, "other")
    content = json.loads((other / "tokenizer.json").read_text())
    content["model"]["vocab"]["a"], content["model"]["vocab"]["b"] = (
        content["model"]["vocab"]["b"],
        content["model"]["vocab"]["a"],
    )
    (other / "tokenizer.json").write_text(json.dumps(content))
    told = refused(capsys, here, other, "--data.corpus", "null")
    assert f"were made with hf:{here / 'llama'}, not with the tokenizer of {other}" in told


def test_a_length_beyond_learned_positions(here: Path) -> None:
    saved(here / "gpt2", "gpt2", n_positions=40)
    run(here, here / "gpt2", "--data.directory", "shards-gpt2", *PERPLEXITY_ALONE)
    skipped = results.read(here / "logs/pretrained/gpt2/test")[1]["evaluations"]["extrapolation"]["skipped"]
    assert {row["length"] for row in skipped} == {64}
    assert "only 40 positions" in skipped[0]["reason"]


def test_a_gguf_that_cannot_be_read(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (here / "damaged.gguf").write_bytes(b"GGUF" + bytes(200))
    assert "damaged.gguf could not be read" in refused(capsys, here, here / "damaged.gguf")


def gguf_file(path: Path, architecture: str, packed: str) -> Path:
    """A GGUF file with a tokenizer of bytes and one tensor, of zeros, packed as is said."""
    gguf = pytest.importorskip("gguf")
    letters = sorted(ByteLevel.alphabet())
    writer = gguf.GGUFWriter(path, architecture)
    writer.add_block_count(1)
    writer.add_context_length(LENGTH)
    writer.add_embedding_length(256)
    writer.add_feed_forward_length(256)
    writer.add_head_count(4)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_tokenizer_model("gpt2")
    writer.add_token_list([*letters, "<|endoftext|>", "aa"])
    writer.add_token_merges(["a a"])
    writer.add_eos_token_id(256)
    kind = gguf.GGMLQuantizationType[packed]
    size, occupied = gguf.GGML_QUANT_SIZES[kind]
    writer.add_tensor("token_embd.weight", np.zeros((258, 256 // size * occupied), np.uint8), raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def test_a_gguf_type_that_cannot_be_read(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    told = refused(capsys, here, gguf_file(here / "packed.gguf", "llama", "Q8_K"))
    assert "the weights of" in told
    assert "Dequantization for Q8_K is not yet implemented" in told
    told = refused(capsys, here, gguf_file(here / "odd.gguf", "clip", "Q8_0"))
    assert "GGUF model with architecture clip is not supported" in told


def test_weights_that_do_not_fit(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert "do not fit its config.json" in refused(capsys, here, broken(here, "deeper", num_hidden_layers=3))
    assert "do not fit its config.json" in refused(capsys, here, broken(here, "flatter", num_hidden_layers=1))
    told = refused(capsys, here, broken(here, "wider", intermediate_size=128))
    assert "weights of" in told
    assert "could not be read" in told or "do not fit" in told


def test_pickled_weights_are_refused_with_the_way_to_convert_them(
    here: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = broken(here, "pickled", without=("model.safetensors",))
    torch.save(tiny("llama", vocab_size=257).state_dict(), folder / "pytorch_model.bin")
    told = refused(capsys, here, folder)
    assert "can run anything when it is read" in told
    command = told[told.index('python -c "') + len('python -c "') : told.rindex('"')]
    exec(command)
    converted = hf.AutoModelForCausalLM.from_pretrained(f"{folder}-safetensors", use_safetensors=True)
    original = torch.load(folder / "pytorch_model.bin", weights_only=True)
    torch.testing.assert_close(converted.state_dict()["model.norm.weight"], original["model.norm.weight"])


def test_code_that_comes_with_a_model_does_not_run(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = broken(
        here,
        "alive",
        model_type="alive",
        auto_map={"AutoConfig": "alive.Config", "AutoModelForCausalLM": "alive.Model"},
    )
    (folder / "alive.py").write_text("open('ran', 'w').close()\n")
    assert "could not be read" in refused(capsys, here, folder)
    assert not (here / "ran").exists()


def test_callbacks_that_look_inside_our_own_model_are_refused(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    told = refused(capsys, here, here / "llama", "--trainer.callbacks+", '{"class_path": "Kernels"}')
    assert "Kernels: look inside of this project's own Transformer" in told


def test_the_line_that_installs_the_group(
    here: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "transformers", None)
    assert refused(capsys, here, here / "llama").endswith('install it with: pip install --editable ".[hf]"')


@pytest.mark.slow
def test_pretrained_models_are_rows_of_a_comparison(here: Path) -> None:
    """Each in a process of its own, as `make pretrained` does it."""
    folder = str(here / "llama")
    comparison = {
        "name": "windows",
        "base": [],
        "seeds": [1],
        "baseline": "RoPE",
        "test": {"config": "hf.yaml", "data.directory": "shards-compared", "trainer.logger": False},
        "strategies": {"RoPE": {"hf": folder}, "PI": {"hf": folder, "options": {"scaling": "pi", "factor": 2}}},
    }
    Path("windows.yaml").write_text(yaml.safe_dump(comparison))
    main(["compare", "--config", "windows.yaml"])
    table = Path("results/windows/table.md").read_text()
    assert "| RoPE" in table
    assert "| PI" in table
    main(["compare", "--config", "windows.yaml"])  # nothing to do


@pytest.mark.slow
def test_models_whose_names_have_points_have_folders_of_their_own(here: Path) -> None:
    for name in ("llama-1.4b", "llama-1.5b"):
        broken(here, name)
        run(here, here / name, *PERPLEXITY_ALONE, "--data.directory", f"{name}-shards")
        assert (here / "logs/pretrained" / name / "test/results.csv.gz").exists()
    run(here, here / "llama", *PERPLEXITY_ALONE, "--run_dir", "beside")
    assert not (here / "config.yaml").exists()
    assert (here / "beside/config.yaml").exists()

"""`extend` finds the scaling with which a model was trained, and transformers reads the folder that it writes."""

import json
import math
import shlex
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from kerple.base.errors import UserError
from kerple.cli.main import main
from kerple.data.evaluation_text import Text
from kerple.extend.comparison import compare_best
from kerple.extend.extension import Extension
from kerple.extend.methods import Method, methods
from kerple.extend.search import Search
from kerple.hf import pretrained_model_reader
from kerple.hf.model_folder import link
from kerple.hf.modeling import KerpleConfig
from kerple.hf.rope import scaled
from kerple.hf.translation_from_transformers import read_family
from kerple.measure.runner import Runner
from kerple.model.stored_model import build_strategy, build_transformer, copy_weights
from tests.cli.tiny import complaint
from tests.hf.tiny import LENGTH, YARN, configuration, hf, our_network, saved, text, tiny

TARGET = 4 * LENGTH
PERIOD = LENGTH + 8
DOCUMENTS = 16


def repeating(documents: int, generator: torch.Generator) -> torch.Tensor:
    """Return documents (documents, N + 1) of random tokens, which repeat at a distance beyond the training length."""
    return torch.randint(16, (documents, PERIOD), generator=generator).repeat(1, 4)[:, : TARGET + 1]


def model_and_texts(folder: Path, steps: int) -> tuple[Path, dict[str, Text]]:
    """Write a model that was trained with PI × 4, without this scaling in its configuration; return it and texts."""
    torch.manual_seed(0)
    generator = torch.Generator().manual_seed(1)
    config, plain = configuration("llama"), configuration("llama").rope_parameters
    config.num_hidden_layers, config.bos_token_id, config.eos_token_id = 1, None, None
    config.rope_parameters = scaled(config, "pi", 4.0, LENGTH).rope_parameters
    model = hf.AutoModelForCausalLM.from_config(config)
    optimizer = torch.optim.AdamW(model.parameters(), lr=5e-3, betas=(0.9, 0.98))
    for _ in range(steps):
        tokens = repeating(8, generator)
        logits = model(tokens[:, :-1]).logits[:, PERIOD:]
        optimizer.zero_grad()
        F.cross_entropy(logits.flatten(0, 1), tokens[:, PERIOD + 1 :].flatten()).backward()
        optimizer.step()
    texts = {}
    for split in ("validation", "test"):
        tokens = repeating(DOCUMENTS, generator)
        texts[split] = Text(tokens.flatten(), range(0, tokens.numel(), TARGET + 1))
    model.config.rope_parameters = plain
    model.save_pretrained(folder / "model")
    return folder / "model", texts


@pytest.fixture(scope="module")
def unscaled(tmp_path_factory):
    return model_and_texts(tmp_path_factory.mktemp("unscaled"), 200)


@pytest.fixture(scope="module")
def untrained(tmp_path_factory):
    return model_and_texts(tmp_path_factory.mktemp("untrained"), 0)


def make_search(unscaled, folder: Path, compared: list[Method] | None = None) -> Search:
    path, texts = unscaled
    compared = compared or methods(configuration("llama"), LENGTH, TARGET)[0]
    return Search(str(path), compared, LENGTH, TARGET, 0.005, folder, texts, Runner())


@pytest.mark.slow  # trains a model for ten seconds
def test_a_scaling_that_is_missing_in_the_configuration_is_found(unscaled, tmp_path):
    search = make_search(unscaled, tmp_path)
    ranked = search.choose(8)
    assert ranked[0].label == "PI ×4"
    result = compare_best(search, ranked, DOCUMENTS)
    assert result["helps"]
    assert result["far_context"] == "distant text is used"
    assert f"gap of {TARGET // 2}: " in result["gap"]
    at_target = sum(TARGET in by_length for by_length in search.effects.values())
    assert len(list(tmp_path.glob(f"validation-{TARGET}-*"))) == at_target < len(search.methods) - 1
    assert replace(search, target=LENGTH + 1).lengths == [LENGTH, LENGTH + 1]  # the bound applies to every target


@pytest.mark.slow  # trains a model for ten seconds
def test_transformers_gives_the_losses_of_a_method_with_its_folder(unscaled, tmp_path):
    search = make_search(unscaled, tmp_path / "records")
    tokens = search.blocks["validation"][0][0]
    for method in (method for method in search.methods[1:] if method.position is None):
        config = hf.AutoConfig.from_pretrained(unscaled[0])
        config = scaled(config, method.scaling, method.factor, LENGTH, method.rope_options)
        link(str(unscaled[0]), config, tmp_path / "to")
        assert (tmp_path / "to" / "model.safetensors").is_symlink()
        model = hf.AutoModelForCausalLM.from_pretrained(tmp_path / "to").eval()
        with torch.inference_mode():
            expected = float(F.cross_entropy(model(tokens[None, :-1]).logits[0, -search.k :], tokens[-search.k :]))
        assert search.losses(method, "validation", TARGET, 1)[0] == pytest.approx(expected, rel=1e-5), method.label


@pytest.mark.slow
def test_foreign_text_is_the_start_of_another_document(unscaled, tmp_path):
    search = make_search(unscaled, tmp_path)
    (blocks, others), pi = search.blocks["test"], search.methods[1]
    tokens = torch.cat([blocks[others[0]][: TARGET - LENGTH], blocks[0][-LENGTH - 1 :]])
    with torch.inference_mode():
        expected = float(search.network(pi).losses(tokens[None], search.k).mean())
    assert search.losses(pi, "test", TARGET, 1, "foreign")[0] == pytest.approx(expected, rel=1e-6)


@pytest.mark.parametrize("own", [{}, YARN])
def test_scalings_are_combined_with_the_models_own_or_left_out_with_a_reason(own):
    config = configuration("llama")
    config.rope_parameters = config.rope_parameters | own
    found, reasons = methods(config, LENGTH, TARGET)
    # up to the training length, dynamic NTK is the unchanged model
    assert [m.as_trained for m in found if m.scaling == "dynamic_ntk"] == ([] if own else [True, True])
    assert {"pi", "ntk", "yarn"} <= {m.scaling for m in found}
    message = "has the scaling yarn, with which dynamic_ntk cannot be combined"
    assert (message in reasons.get("dynamic NTK", "")) == bool(own)


@pytest.mark.slow
def test_layers_without_positions_get_temperatures():
    config = configuration("smollm3")
    found = [m for m in methods(config, LENGTH, TARGET)[0] if m.label.startswith("temperature")]
    scales = [m.position["init_args"]["kinds"]["global_nope"]["init_args"]["scale"] for m in found]
    assert scales == [0.1, 0.3, 1 / math.log(LENGTH), 0.3]
    model, tokens = tiny("smollm3"), text(2, TARGET)
    stored = read_family(model.config, model.state_dict())
    networks = [build_transformer(stored.model, build_strategy(m.position)).eval() for m in found]
    for network in networks:
        copy_weights(network, stored)
    expected = our_network(model)(tokens)
    for method, network in zip(found, networks, strict=True):
        changed = (network(tokens) - expected).abs().amax((0, 2)) > 1e-5  # (T,)
        first = int(changed.nonzero()[0])
        assert first == (LENGTH if method.as_trained else LENGTH - 1)  # the query that sees more than L keys, or L keys
    assert "all layers have positions" in methods(configuration("llama"), LENGTH, TARGET)[1]["temperature"]


@pytest.mark.parametrize("name", ["rnope-swa", "kerple-log"])
def test_exports_of_this_project_have_their_own_candidates_and_reasons(name):
    config = hf.AutoConfig.from_pretrained(Path(__file__).parents[2] / "results/models" / name)
    found, reasons = methods(config, 128, 512)
    assert any(m.label.startswith("temperature") for m in found) == (name == "rnope-swa")
    assert "an export of" in reasons["YaRN"]
    assert not any("family kerple" in reason for reason in reasons.values())


def test_methods_have_labels_of_their_own_where_two_temperatures_are_equal():
    labels = [method.label for method in methods(configuration("smollm3"), 28, 4 * 28)[0]]
    assert len(set(labels)) == len(labels)


@pytest.mark.parametrize("bos", [None, 3])
def test_a_method_as_trained_is_measured_at_the_training_length_if_bos_makes_the_input_longer(
    untrained, tmp_path, monkeypatch, bos
):
    monkeypatch.setattr(pretrained_model_reader, "has_tokenizer", lambda source: True)
    monkeypatch.setattr(pretrained_model_reader, "bos_token", lambda *_: bos)
    ntk = Method("dynamic NTK ×4", "dynamic_ntk", 4.0, as_trained=True)
    search = make_search(untrained, tmp_path, [Method("unchanged"), ntk])
    unchanged, scaled_rope = (search.losses(method, "validation", LENGTH, 1) for method in search.methods)
    assert (unchanged == scaled_rope) == (bos is None)


def test_the_strategy_of_an_export_may_be_a_class_name():
    pattern = {"class_path": "LayerPattern", "init_args": {"kinds": {"a": "NoPE", "b": "RoPE"}, "pattern": ["a", "b"]}}
    for position, name in (("NoPE", "NoPE"), (pattern, "LayerPattern")):
        config = KerpleConfig({"position": position, "layers": 2, "dim": 32, "heads": 4, "length": 128})
        found, reasons = methods(config, 128, 512)
        assert sum(m.label.startswith("temperature") for m in found) == 4
        assert f"an export of {name}" in reasons["YaRN"]


def test_a_bound_that_no_method_meets_is_an_error(untrained, tmp_path):
    search = make_search(untrained, tmp_path, [Method("unchanged"), Method("PI ×4", "pi", 4.0)])
    with pytest.raises(UserError, match=f"but all methods raise the loss at {LENGTH} tokens by more"):
        replace(search, bound=-1.0).choose(8)  # no loss is 0


def test_the_results_of_a_scaling_state_its_rope_parameters(untrained, tmp_path):
    search = make_search(untrained, tmp_path / "records", [Method("unchanged"), Method("PI ×4", "pi", 4.0)])
    search.bound = 1.0  # an untrained model does not need the scaling
    settings = {"model": "llama", "length": LENGTH, "target": TARGET}
    config = hf.AutoConfig.from_pretrained(untrained[0])
    findings = Extension(config, search, {}, settings, 0.5, tmp_path).run(2)
    assert '"rope_type": "linear"' in findings
    assert json.loads((tmp_path / "model" / "config.json").read_text())["rope_parameters"]["factor"] == 4


def flags(*more: str) -> list[str]:
    data = {"corpus": "corpus.jsonl", "directory": "shards", "split_fractions": "[0.2,0.4,0.4]"}
    return [*(f"--data.{name}={value}" for name, value in data.items()), "--precision=32-true", *more]


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    """A folder with models and a corpus of letters."""
    folder = tmp_path_factory.mktemp("extend")
    saved(folder / "llama", "llama")
    saved(folder / "gpt2", "gpt2")
    letters = np.random.default_rng(0).choice(list("abcdefgh"), (30, TARGET + 20))
    (folder / "model").mkdir()
    (folder / "model" / "weights").touch()
    (folder / "corpus.jsonl").write_text("\n".join(json.dumps({"text": "".join(row)}) for row in letters))
    return folder


@pytest.mark.slow
def test_the_command_writes_its_results_and_continues_after_a_stop(place, monkeypatch, capsys):
    monkeypatch.chdir(place)
    kinds = ("unchanged", "Self-Extend, window 8, groups of 5", "window with first 4 tokens, distances cache")
    chosen = lambda *args: ([m for m in methods(*args)[0] if m.label in kinds], {"PI": "left out"})  # noqa: E731
    monkeypatch.setattr("kerple.extend.extension.methods", chosen)
    command = ["extend", "llama", "--length", str(TARGET), *flags("--output=run", "--minutes=0")]
    main(command)
    findings, first = capsys.readouterr().out, json.loads(Path("run/extend.json").read_text())
    assert (first["blocks"], first["lengths"]) == (2, [LENGTH, 2 * LENGTH, TARGET])
    page = Path("run/extend.html").read_text()
    assert all(label in page for label in (*kinds, "left out"))
    records = sorted(Path("run/records").glob("*/*.json"))
    shortened, removed = records[0], next(p for p in records if p.name == f"test-{TARGET}-own-unchanged.json")
    shortened.write_text(json.dumps({name: values[:1] for name, values in json.loads(shortened.read_text()).items()}))
    removed.unlink()
    before = {path: path.stat().st_mtime_ns for path in records if path.exists()}
    main(command)
    assert json.loads(Path("run/extend.json").read_text()) == first
    assert [path for path in before if path.stat().st_mtime_ns != before[path]] == [shortened]
    command = findings.partition("Test it by: python run.py ")[2].splitlines()[0]
    main([*shlex.split(command), *flags()[:-1], "--output=tested"])
    assert "written to tested" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("model", "options", "message"),
    [
        ("llama", ["--length", LENGTH], "expected more than the training length"),
        ("llama", ["--to", TARGET], "to: this option is now --length, and --length is now --training_length"),
        ("llama", ["--length", TARGET, "--training_length", 0], "training_length: got 0, expected 1 token or more, or"),
        ("llama", ["--length", TARGET, "--bound", -1], "bound: got -1, expected 0 or more"),
        ("llama", ["--length", TARGET, "--minutes", ".inf"], "minutes: got inf, expected a finite number, 0 or more"),
        ("llama", ["--length", TARGET, "--data.batch_size", 2], "--data.batch_size 2"),  # nothing is trained
        ("llama", ["--length", TARGET, "--output=."], "output: model exists and is not a result of this command"),
        (
            "gpt2",
            ["--length", 1024],
            "PI (got gpt2, which has no RoPE, expected RoPE that pi can scale; or leave out the scaling), NTK (",
        ),
        ("llama", ["--length", 8 * LENGTH], "the longest document has 149 tokens"),
        ("llama", ["--length", 2**40], "GiB are free; give a smaller number"),
    ],
)
def test_models_and_options_that_are_errors(model, options, message, place, monkeypatch, capsys):
    monkeypatch.chdir(place)
    assert message in complaint(capsys, "extend", model, *options, *flags())

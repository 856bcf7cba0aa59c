"""Models that are exported to transformers and read again have the same logits, and generate the same text."""

import json
import resource
from dataclasses import replace
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from safetensors.torch import load_file

from kerple.base.errors import UserError, machine_error
from kerple.cli.main import main
from kerple.cli.probe import network_and_text
from kerple.data.evaluation_text import ShardText
from kerple.data.shards import Folder
from kerple.hf.exporter import export
from kerple.hf.model_folder import add_transformers_4_entries, link
from kerple.hf.modeling import KerpleConfig, KerpleForCausalLM
from kerple.hf.pretrained_model_reader import read_network, read_stored_model
from kerple.hf.rope import scaled
from kerple.hf.translation_from_transformers import read_family
from kerple.measure import results_table
from kerple.measure.extrapolation import Extrapolation
from kerple.model import Transformer
from kerple.model.generation import generate
from kerple.model.stored_model import StoredModel, build_transformer, copy_weights
from kerple.positions import NoPE
from kerple.training.trained_model import load_trained
from tests.cli.tiny import complaint
from tests.hf.tiny import LENGTH, VOCABULARY, arguments, configuration, hf, saved, text, tiny
from tests.pages import put
from tests.toy import QUIET

SIZES = {"dim": 32, "heads": 4, "length": 16, "layers": 2, "vocabulary": VOCABULARY, "init": 0.2, "eps": 1e-6}
LLAMA = {"norm": "rms", "gated": True, "activation": "silu", "bias": False, "kv_heads": 2, "hidden": 24, "tied": True}


def rope(**options: Any) -> dict[str, Any]:
    return {"class_path": "RoPE", "init_args": options}


OURS = {
    "KerpleLog": {"position": "KerpleLog"},
    "DynamicNTK": {"position": rope(scaling="dynamic_ntk", factor=2.0)},
    "ALiBi": {"position": "ALiBi"},  # slopes that no file stores
    "T5": {"position": "T5", "tied": True, "parallel": True, "embedding_norm": True},
    "normed": LLAMA | {"position": "RoPE", "qk_norm": True},  # a Llama except for qk_norm
    "bf16": LLAMA | {"position": rope(mistake="bf16")},
}
STOCK = {"Llama": LLAMA | {"position": rope(base=500.0)}, "Qwen2": LLAMA | {"position": "RoPE", "qkv_bias": True}}


def exported(options: dict[str, Any], folder: Path) -> tuple[Transformer, str]:
    """Export a random network to a folder; return the network and the name of the exported class."""
    torch.manual_seed(0)
    network = build_transformer(SIZES | options).eval()
    return network, export(StoredModel(SIZES | options, dict(network.state_dict())), folder, None, None)


@pytest.mark.parametrize("name", OURS | STOCK)
@torch.inference_mode()
def test_an_exported_model_has_the_same_logits_and_generates_the_same_text(name, tmp_path):
    ours, architecture = exported((OURS | STOCK)[name], tmp_path)
    assert architecture == f"{name if name in STOCK else 'Kerple'}ForCausalLM"
    theta = {"Llama": 500.0, "Qwen2": 10000.0}.get(name)
    assert json.loads((tmp_path / "config.json").read_text()).get("rope_theta") == theta  # of transformers 4
    loaded, tokens = hf.AutoModelForCausalLM.from_pretrained(tmp_path).eval(), text(1, 40)
    tolerance = 1e-4 if name in STOCK else 0
    torch.testing.assert_close(loaded(tokens).logits, ours(tokens), atol=tolerance, rtol=tolerance)
    stored = read_stored_model(str(tmp_path))
    read_again = build_transformer(stored.model).eval()
    assert not copy_weights(read_again, stored).new
    assert torch.equal(read_again(tokens), ours(tokens))
    generated = loaded.generate(tokens[:, :9], max_new_tokens=20, do_sample=False)[0, 9:]
    assert generated.tolist() == [int(t) for t in generate(ours, tokens[:, :9], 20)]


ORIGINAL = "original_max_position_embeddings"
LLAMA3 = {"rope_type": "llama3", "factor": 4, "low_freq_factor": 1, "high_freq_factor": 4, ORIGINAL: 8}
RULES_4 = {  # required and optional entries of rope_scaling in modeling_rope_utils.py of transformers 4.57
    "linear": ({"factor"}, set()),
    "dynamic": ({"factor"}, {ORIGINAL}),
    "yarn": ({"factor"}, {ORIGINAL, "attention_factor", "beta_fast", "beta_slow", "truncate"}),
    "llama3": ({"factor", ORIGINAL, "low_freq_factor", "high_freq_factor"}, set()),
    "longrope": ({"factor", "short_factor", "long_factor"}, {ORIGINAL, "attention_factor"}),
}


@pytest.mark.parametrize("family", ["llama", "gpt_neox", "llama3"])
@pytest.mark.parametrize("scaling", ["none", "pi", "ntk", "dynamic_ntk", "yarn", "llama3", None])
def test_the_configuration_is_also_that_of_transformers_4(family, scaling, tmp_path):
    config = configuration("llama" if family == "llama3" else family)
    if family == "llama3":
        scaling = {"dynamic_ntk": None}.get(scaling, scaling)  # cannot be combined
        config.rope_parameters = {"rope_theta": 500.0} | LLAMA3
    config = scaled(config, scaling, None if scaling in (None, "none") else 2, LENGTH)
    config.save_pretrained(tmp_path / "model")
    link(str(tmp_path / "model"), config, tmp_path / "to")
    assert hf.AutoConfig.from_pretrained(tmp_path / "to").rope_parameters == config.rope_parameters
    stored, rope = json.loads((tmp_path / "to" / "config.json").read_text()), config.rope_parameters
    assert stored["rope_theta"] == rope["rope_theta"]
    if family == "gpt_neox":
        assert (stored["rotary_emb_base"], stored["rotary_pct"]) == (rope["rope_theta"], 0.5)
    read = stored.get("rope_scaling", {})
    assert read.items() <= rope.items()
    if kind := read.pop("rope_type", None):
        required, optional = RULES_4[kind]
        assert required <= read.keys() <= required | optional
        assert all(isinstance(v, list | float) for name, v in read.items() if name != ORIGINAL)
        assert stored.get(ORIGINAL) == (rope[ORIGINAL] if kind == "longrope" else None)
    assert kind == (None if rope["rope_type"] == "default" else rope["rope_type"])


def test_two_ropes_are_stored_for_transformers_4_only_if_it_has_entries_for_both(tmp_path):
    gemma3, olmo3 = configuration("gemma3_text"), configuration("olmo3")
    gemma3.rope_parameters["full_attention"] = {"rope_type": "linear", "rope_theta": 5e4, "factor": 8.0}
    gemma3.rope_parameters["sliding_attention"]["rope_theta"] = 7e3
    for config in (gemma3, olmo3):
        config.save_pretrained(tmp_path)
        add_transformers_4_entries(config, tmp_path)
        assert hf.AutoConfig.from_pretrained(tmp_path).rope_parameters == config.rope_parameters
        stored = json.loads((tmp_path / "config.json").read_text())
        entries = [stored.get(name) for name in ("rope_theta", "rope_local_base_freq", "rope_scaling")]
        expected = [5e4, 7e3, {"rope_type": "linear", "factor": 8.0}] if config is gemma3 else [None] * 3
        assert entries == expected


def test_a_full_disk_leaves_no_part_of_a_model(tmp_path):
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    empty = tmp_path / "empty"
    empty.mkdir()
    for folder in (empty, tmp_path / "new"):
        resource.setrlimit(resource.RLIMIT_FSIZE, (10_000, hard))  # of the weights; config.json is shorter
        try:
            with pytest.raises(Exception, match="too large") as error:
                exported(OURS["ALiBi"], folder)
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
        assert "File too large; free some space" in str(machine_error(error.value))
    assert list(tmp_path.rglob("*")) == [empty]


def test_strategies_that_need_the_places_of_a_task_are_not_exported(tmp_path):
    position = {"class_path": "Combined", "init_args": {"parts": ["NoPE", "Abacus"]}}
    with pytest.raises(UserError, match=r"^model\.position: got Abacus, which needs the places that a task assigns"):
        exported({"position": position}, tmp_path / "folder")
    assert not (tmp_path / "folder").exists()


def test_the_trainer_averages_the_loss_over_accumulated_batches(tmp_path):
    rows, embeddings = [{"input_ids": row, "labels": row} for row in text(4, 12)], []
    for accumulated in (1, 4):
        torch.manual_seed(0)
        model = KerpleForCausalLM(KerpleConfig(SIZES | {"position": "NoPE"}))
        options = {"per_device_train_batch_size": 4 // accumulated, "gradient_accumulation_steps": accumulated}
        options |= {"learning_rate": 0.1, "max_grad_norm": 0.0, "optim": "sgd"}
        hf.Trainer(model, arguments(tmp_path, max_steps=1, **options), train_dataset=rows).train()
        embeddings.append(model.network.embedding.weight.detach())
    torch.testing.assert_close(*embeddings)


@pytest.fixture(scope="module")
def workdir(corpus, tmp_path_factory):
    folder = tmp_path_factory.mktemp("export")
    shards = {"corpus": str(corpus), "directory": str(folder / "shards"), "vocabulary": 270}
    config = {"model": {"layers": 2, "dim": 32, "heads": 4, "lr": 0.01, "init": 0.2}}
    config["trainer"] = QUIET | {"max_steps": 3, "precision": "32-true", "limit_val_batches": 0, "logger": False}
    config["data"] = {"class_path": "TokenShards", "init_args": shards | {"length": 16, "batch_size": 4}}
    (folder / "base.yaml").write_text(yaml.safe_dump(config))
    return folder


def fit(workdir: Path, name: str, *flags: str) -> str:
    main(["fit", "--config", str(workdir / "base.yaml"), "--output", str(workdir / name), *flags])
    return str(workdir / name / "checkpoints" / "last.ckpt")


@pytest.fixture(scope="module")
def path(workdir):
    """A checkpoint of KERPLE-log."""
    return fit(workdir, "run", "--model.position=KerpleLog")


@pytest.mark.slow
def test_generate_and_predict_give_the_same_text(workdir, path, capsys):
    folder = workdir / "out"
    main(["export", "--ckpt_path", path, "--output", str(folder)])
    capsys.readouterr()
    main(["predict", "--ckpt_path", path, "--prompt", "what was", "--length", "24", "--temperature", "0"])
    predicted = capsys.readouterr().out.rstrip("\n")
    model, tokenizer = hf.AutoModelForCausalLM.from_pretrained(folder), hf.AutoTokenizer.from_pretrained(folder)
    tokens = model.generate(**tokenizer("what was", return_tensors="pt"), max_new_tokens=24, do_sample=False)
    assert tokenizer.decode(tokens[0], skip_special_tokens=True) == predicted
    stored = json.loads((folder / "tokenizer_config.json").read_text())
    assert stored["tokenizer_class"] == "PreTrainedTokenizerFast"  # transformers 4 has no TokenizersBackend
    samples = []
    for seed in "121":
        main(["predict", "--ckpt_path", path, "--prompt=döc", "--length=40", "--temperature=1", f"--seed={seed}"])
        samples.append(capsys.readouterr().out)
    assert samples[0] == samples[2] != samples[1]
    assert samples[0].startswith("döc")
    for to, part in ((folder, "out, which is not empty; name a new folder"), (path, "which cannot be made")):
        assert part in complaint(capsys, "export", "--ckpt_path", path, "--output", to)
    for command in (["export", "--ckpt_path", path], ["probe", path]):
        assert "to: this option is now --output" in complaint(capsys, *command, "--to", folder)
    # the exported tokenizer differs from that of the shards at the ends of a text
    fit(workdir, "exported", "--weights", str(folder))


@pytest.mark.slow
def test_weights_in_fp16_are_rounded_except_those_of_the_strategy(workdir, path):
    folder = workdir / "out-half"
    main(["export", "--ckpt_path", path, "--output", str(folder), "--dtype=float16"])
    network, stored = load_trained(path)[0].network, load_file(folder / "model.safetensors")
    with torch.no_grad():
        for name, weight in network.named_parameters():
            rounded = weight if name.startswith("positions.") else weight.half()
            assert torch.equal(stored[f"network.{name}"], rounded)
            assert stored[f"network.{name}"].dtype == rounded.dtype
            weight.copy_(rounded)
    model = hf.AutoModelForCausalLM.from_pretrained(folder)  # in the dtype of config.json
    assert (model.dtype, model.network.head.weight.dtype) == (torch.float16, torch.float16)
    assert "for 3 steps with a training length of 16 tokens" in (folder / "README.md").read_text()
    assert len({file.stat().st_mode for file in folder.iterdir()}) == 1  # others may read the weights too
    callbacks = "[{class_path: Extrapolation, init_args: {lengths: [16, 64], protocols: [full], blocks: 2}}]"
    data = ["--data.directory", str(workdir / "shards"), "--data.corpus=null"]
    main(["test", "--hf", str(folder), "--output", str(workdir / "tested"), "--trainer.callbacks", callbacks, *data])
    found = results_table.totals(results_table.read(workdir / "tested")[0]).set_index(["metric", "length"])["value"]
    tested = ShardText(Folder(str(workdir / "shards")), "test")
    measured = Extrapolation([16, 64], ["full"], blocks=2).run(network, tested)
    for length in (16, 64):
        assert found["ppl", length] == pytest.approx(measured.scalars[f"ppl/full/{length}"], rel=1e-5)


@pytest.mark.slow
def test_the_file_of_an_external_strategy_is_exported_as_remote_code(workdir, capsys, monkeypatch):
    put("own-strategy.md", workdir / "my_file.py", monkeypatch)
    parts = "[NoPE, {class_path: my_file.Root, init_args: {start: 0.25}}]"
    flags = ["--model.position=Combined", f"--model.position.parts={parts}"]
    path, folder = fit(workdir, "own", *flags), workdir / "out-own"
    export_command = ["export", "--ckpt_path", path, "--output", str(folder)]
    assert "names the class my_file.Root" in complaint(capsys, *export_command)
    main([*export_command, "--trust", "my_file"])
    assert "KerpleRemoteForCausalLM; " in capsys.readouterr().out
    for trust in (False, None):  # None asks on the terminal, which gives no answer here
        with pytest.raises(ValueError, match="trust_remote_code=True"):
            hf.AutoModelForCausalLM.from_pretrained(folder, trust_remote_code=trust)
    assert "contains custom code" in complaint(capsys, "test", "--hf", folder)
    assert read_network(str(folder), trust_remote_code=True).name == "Combined"
    with pytest.raises(ValueError, match="got 17, expected 16"):
        read_network(str(folder), 17, trust_remote_code=True)
    tokens = text(1, 40)
    with torch.inference_mode():
        expected = load_trained(path, "my_file")[0].network(tokens)
        for _ in range(2):
            loaded = hf.AutoModelForCausalLM.from_pretrained(folder, trust_remote_code=True).eval()
            assert torch.equal(loaded(tokens).logits, expected)
            folder = workdir / "saved-again"
            loaded.save_pretrained(folder)
    assert type(loaded.network.positions[0].parts[1]).__module__.startswith("transformers_modules.")
    network, tested = network_and_text(hf.LlamaForCausalLM, path, "modules", "my_file")
    assert isinstance(network, Transformer)  # which can be measured within documents, unlike the exported model
    assert tested.name.startswith("the test split of")
    with pytest.raises(UserError, match="add --trust my_file"):
        network_and_text(loaded, path, "modules")


@pytest.mark.parametrize("imported", ["from helper import Base", "import helper.part", "from .helper import Base"])
def test_a_strategy_whose_file_imports_another_file_is_not_exported(imported, tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "importing_own.py").write_text("from kerple.positions import NoPE\nclass Own(NoPE): pass\n")
    import_module("importing_own")
    with (tmp_path / "importing_own.py").open("a") as file:
        file.write(f"def later():\n    {imported}\n")
    theirs = tiny("llama")
    stored = read_family(theirs.config, theirs.state_dict())
    stored = replace(stored, model=stored.model | {"position": "importing_own.Own"})
    with pytest.raises(UserError, match=r"^model.position: got importing_own.py, which imports \.?helper.*one file$"):
        export(stored, tmp_path / "out", None, None)
    assert not (tmp_path / "out").exists()


def test_strategies_of_packages_are_exported_and_those_with_equal_names_are_refused(tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(tmp_path)
    code = "from kerple.positions import NoPE\nclass {}(NoPE): pass\n"
    for folder, name in (("first_own", "Own"), ("second_own", "Other")):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "__init__.py").write_text(f"from {folder}.same import {name}")
        (tmp_path / folder / "same.py").write_text(code.format(name))
    (tmp_path / "alone").mkdir()
    (tmp_path / "alone" / "__init__.py").write_text(code.format("Own"))
    theirs, tokens = tiny("llama"), text(1, 40)
    stored = read_family(theirs.config, theirs.state_dict())

    def exported(*paths):
        for path in paths:
            import_module(path.rpartition(".")[0])
        combined = {"class_path": "Combined", "init_args": {"parts": [{"class_path": path} for path in paths]}}
        folder = tmp_path / "-".join(paths)
        export(replace(stored, model=stored.model | {"position": combined}), folder, None, None)
        return hf.AutoModelForCausalLM.from_pretrained(folder, trust_remote_code=True).eval()(tokens).logits

    expected = build_transformer(stored.model, NoPE)
    copy_weights(expected, stored)
    for path in ("alone.Own", "second_own.Other"):
        torch.testing.assert_close(exported(path), expected.eval()(tokens))
    equal = {"files .* same": ("first_own.Own", "second_own.Other"), "classes .* Own": ("alone.Own", "first_own.Own")}
    for twice, paths in equal.items():
        with pytest.raises(UserError, match=f"model.position: got two {twice}, expected different names"):
            exported(*paths)


@pytest.mark.slow
def test_fit_starts_from_weights_with_another_strategy(workdir, capsys):
    folder = saved(workdir / "theirs", "llama")
    weights, data = ["--weights", str(folder)], [f"--data.tokenizer=hf:{folder}", f"--data.directory={workdir}/other"]
    refused = ["fit", "--config", workdir / "base.yaml", "--output", workdir / "refused"]
    assert f"were made with bpe, not with the tokenizer of {folder}" in complaint(capsys, *refused, *weights)
    slow = ["--model.lr", "1e-12", *data]
    path = fit(workdir, "retrofit", *weights, "--model.position", "KerpleLog", *slow)
    printed = capsys.readouterr().out
    assert "copied:" in printed
    assert "positions.0." in printed
    ours, theirs = load_trained(path)[0], hf.AutoModelForCausalLM.from_pretrained(folder)
    torch.testing.assert_close(ours.network.embedding.weight[:257], theirs.model.embed_tokens.weight, atol=1e-6, rtol=0)
    assert type(ours.network.positions[0]).__name__ == "KerpleLog"
    same, tokens = fit(workdir, "same", *weights, *slow), text(1, 2 * LENGTH)
    with torch.inference_mode():
        logits = load_trained(same)[0].network(tokens)[..., :257]
        torch.testing.assert_close(logits, theirs.eval()(tokens).logits, atol=1e-4, rtol=1e-4)
    from_ours = fit(workdir, "again", "--weights", same, "--model.position", "NoPE", *slow)
    assert type(load_trained(from_ours)[0].network.positions[0]).__name__ == "NoPE"
    assert "expected shards with the tokenizer of the checkpoint" in complaint(capsys, *refused, "--weights", same)

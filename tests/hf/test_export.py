"""Models exported to transformers and read in again: the same logits bit for bit, the same text, a stock Llama."""

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml

import kerple.hf  # registers the classes
from kerple.base.errors import UserError
from kerple.cli.main import main
from kerple.cli.predict import load
from kerple.hf.export import export
from kerple.hf.families import StoredModel, read_family
from kerple.hf.modeling import KerpleConfig, KerpleForCausalLM
from kerple.hf.weights import fill, read, transformer
from tests.hf.tiny import LENGTH, VOCABULARY, text, tiny

hf = pytest.importorskip("transformers")

assert kerple.hf.INSTALL
LLAMA = ["norm=rms", "gated=true", "activation=silu", "bias=false", "kv_heads=2", "hidden=24", "tied=true"]
MODELS = {
    "KerpleLog": ["position=KerpleLog"],
    "DynamicNTK": ["position=RoPE", "position.scaling=dynamic_ntk", "position.factor=2"],
    "ALiBi": ["position=ALiBi"],  # slopes that no file stores
    "T5": ["position=T5", "tied=true", "parallel=true", "embedding_norm=true"],
    "Llama": ["position=RoPE", "position.base=500", *LLAMA],
    "Qwen2": ["position=RoPE", *LLAMA, "qkv_bias=true"],
    "normed": ["position=RoPE", *LLAMA, "qk_norm=true"],  # no Llama, although all else is
}


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("export")
    (folder / "corpus").mkdir()
    for i in range(30):
        (folder / "corpus" / f"{i}.txt").write_text(f"document {i}: " + "all work and no play. " * 12)
    config = {
        "model": {"layers": 2, "dim": 32, "heads": 4, "lr": 0.01, "init": 0.2},
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
    return folder


def fit(place: Path, name: str, *flags: str) -> str:
    run = place / name
    if not run.exists():
        main(["fit", "--config", str(place / "base.yaml"), "--run_dir", str(run), *flags])
    return str(run / "checkpoints" / "last.ckpt")


FAST = ("ALiBi", "Llama")


@pytest.fixture(params=[pytest.param(name, marks=[] if name in FAST else pytest.mark.slow) for name in MODELS])
def checkpoint(request: pytest.FixtureRequest, place: Path) -> tuple[str, str]:
    return request.param, fit(place, request.param, *(f"--model.{flag}" for flag in MODELS[request.param]))


def exported(place: Path, name: str, path: str, *flags: str) -> Path:
    folder = place / f"{name}-out{''.join(flags)}".replace("--stock=", "-")
    if not folder.exists():
        main(["export", "--ckpt_path", path, "--to", str(folder), *flags])
    return folder


@torch.inference_mode()
def test_out_and_in_again_gives_the_same_logits_bit_for_bit(place: Path, checkpoint: tuple[str, str]) -> None:
    name, path = checkpoint
    ours, data = load(path)
    tokens = torch.tensor([data.encode("all work and " * 20)[:60]])
    folder = exported(place, name, path, "--stock=false")
    loaded = hf.AutoModelForCausalLM.from_pretrained(folder).eval()
    expected = ours.network(tokens)
    assert torch.equal(loaded(tokens).logits, expected)
    given = read(str(folder))
    again = transformer(given.model)
    assert not fill(again, given).new
    assert torch.equal(again.eval()(tokens), expected)
    assert hf.AutoTokenizer.from_pretrained(folder)("all work")["input_ids"] == data.encode("all work")


@torch.inference_mode()
def test_generate_writes_what_predict_writes(
    place: Path, checkpoint: tuple[str, str], capsys: pytest.CaptureFixture[str]
) -> None:
    name, path = checkpoint
    folder = exported(place, name, path, "--stock=false")
    capsys.readouterr()
    main(["predict", "--ckpt_path", path, "--prompt", "all work", "--tokens", "24", "--temperature", "0"])
    told = capsys.readouterr().out.rstrip("\n")
    model = hf.AutoModelForCausalLM.from_pretrained(folder).eval()
    tokenizer = hf.AutoTokenizer.from_pretrained(folder)
    prompt = tokenizer("all work", return_tensors="pt")
    written = model.generate(
        prompt["input_ids"], attention_mask=prompt["attention_mask"], max_new_tokens=24, do_sample=False
    )
    assert tokenizer.decode(written[0], skip_special_tokens=True) == told


@pytest.mark.parametrize("name", ["Llama", pytest.param("Qwen2", marks=pytest.mark.slow)])
@torch.inference_mode()
def test_a_run_that_is_a_llama_is_written_as_one(place: Path, name: str) -> None:
    path = fit(place, name, *(f"--model.{flag}" for flag in MODELS[name]))
    folder = exported(place, name, path)
    loaded = hf.AutoModelForCausalLM.from_pretrained(folder).eval()
    assert type(loaded).__name__ == f"{name}ForCausalLM"
    ours, data = load(path)
    tokens = torch.tensor([data.encode("no play and " * 20)[:60]])
    torch.testing.assert_close(loaded(tokens).logits, ours.network(tokens), atol=1e-4, rtol=1e-4)
    given = read_family(loaded.config, loaded.state_dict())
    again = transformer(given.model)
    fill(again, given)
    assert torch.equal(again.eval()(tokens), ours.network(tokens))


@pytest.mark.slow
def test_a_stock_llama_loads_without_this_package(place: Path) -> None:
    path = fit(place, "Llama", *(f"--model.{flag}" for flag in MODELS["Llama"]))
    program = (
        "import sys; sys.modules['kerple'] = None\n"
        "from transformers import AutoModelForCausalLM as M, AutoTokenizer as T\n"
        f"folder = {str(exported(place, 'Llama', path))!r}\n"
        "m, t = M.from_pretrained(folder), T.from_pretrained(folder)\n"
        "print(m.generate(**t('all work', return_tensors='pt'), max_new_tokens=3).shape[1])"
    )
    ended = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert int(ended.stdout) > 3


def test_what_is_no_llama_is_not_written_as_one(place: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = fit(place, "KerpleLog", "--model.position=KerpleLog")
    with pytest.raises(SystemExit):
        main(["export", "--ckpt_path", path, "--to", str(place / "none"), "--stock=true"])
    assert "norm is layer; gated is False; activation is gelu; its position is KerpleLog" in capsys.readouterr().err
    (place / "full").mkdir(exist_ok=True)
    (place / "full" / "file").touch()
    with pytest.raises(SystemExit):
        main(["export", "--ckpt_path", path, "--to", str(place / "full")])
    assert "full, which is not empty; name a new folder" in capsys.readouterr().err


def stored(position: Any) -> StoredModel:
    """A network that is a Llama if its strategy is."""
    options = {"dim": 16, "heads": 2, "length": 12, "layers": 1, "vocabulary": VOCABULARY, "position": position}
    options |= {"norm": "rms", "gated": True, "activation": "silu", "bias": False, "hidden": 24, "eps": 1e-6}
    options |= {"parallel": False, "embedding_norm": False}
    return StoredModel(options, dict(transformer(options).state_dict()))


@pytest.mark.parametrize(
    "position", ["Coupled", {"class_path": "Together", "init_args": {"parts": ["NoPE", "Abacus"]}}]
)
def test_places_that_a_task_gives_are_not_exported(position: Any, tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"position: got (Coupled|Abacus), whose places a task gives"):
        export(stored(position), tmp_path / "made", None, None)
    assert not (tmp_path / "made").exists()


@pytest.mark.parametrize(("options", "name"), [({}, "Llama"), ({"mistake": "bf16"}, "Kerple")])
def test_a_rope_with_a_mistake_is_no_llama(options: dict, name: str, tmp_path: Path) -> None:
    model = stored({"class_path": "RoPE", "init_args": options})
    assert export(model, tmp_path / "made", None, None) == f"{name}ForCausalLM"


def test_the_trainer_takes_the_mean_over_accumulated_batches(tmp_path: Path) -> None:
    rows = [{"input_ids": row, "labels": row} for row in text(4, 12)]
    network = {"dim": 16, "heads": 2, "length": 12, "layers": 1, "vocabulary": VOCABULARY, "position": "NoPE"}
    trained = []
    for accumulated in (1, 4):
        torch.manual_seed(0)
        model = KerpleForCausalLM(KerpleConfig(network))
        arguments = hf.TrainingArguments(
            str(tmp_path),
            max_steps=1,
            per_device_train_batch_size=4 // accumulated,
            learning_rate=0.1,
            max_grad_norm=0.0,
            gradient_accumulation_steps=accumulated,
            optim="sgd",
            report_to=[],
            use_cpu=True,
            save_strategy="no",
        )
        hf.Trainer(model, arguments, train_dataset=rows).train()
        trained.append(model.network.embedding.weight.detach())
    torch.testing.assert_close(*trained)


@torch.inference_mode()
def test_beams_and_padding(place: Path) -> None:
    path = fit(place, "KerpleLog", "--model.position=KerpleLog")
    model = hf.AutoModelForCausalLM.from_pretrained(exported(place, "KerpleLog", path, "--stock=false")).eval()
    prompt = text(2, 9)
    seen, options = torch.ones_like(prompt), {"max_new_tokens": 6, "num_beams": 3, "do_sample": False}
    cached = model.generate(prompt, attention_mask=seen, **options)
    assert torch.equal(cached, model.generate(prompt, attention_mask=seen, use_cache=False, **options))
    seen[0, 0] = 0
    with pytest.raises(ValueError, match="padding on the left"):
        model(prompt, attention_mask=seen)


def test_weights_start_a_fit_with_another_strategy(place: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = place / "theirs"
    if not folder.exists():
        tiny("llama", vocab_size=270).save_pretrained(folder)
    path = fit(place, "retrofit", "--weights", str(folder), "--model.position", "KerpleLog", "--model.lr", "1e-12")
    told = capsys.readouterr().out
    assert "carried over:" in told
    assert "new:" in told
    assert "positions.0." in told
    ours, _ = load(path)
    theirs = hf.AutoModelForCausalLM.from_pretrained(folder)
    torch.testing.assert_close(ours.network.embedding.weight, theirs.model.embed_tokens.weight, atol=1e-6, rtol=0)
    assert type(ours.network.positions[0]).__name__ == "KerpleLog"
    same = fit(place, "same", "--weights", str(folder), "--model.lr", "1e-12")
    tokens = text(1, 2 * LENGTH)
    with torch.inference_mode():
        torch.testing.assert_close(load(same)[0].network(tokens), theirs.eval()(tokens).logits, atol=1e-4, rtol=1e-4)
    from_ours = fit(place, "again", "--weights", same, "--model.position", "NoPE", "--model.lr", "1e-12")
    assert type(load(from_ours)[0].network.positions[0]).__name__ == "NoPE"


def test_weights_for_another_vocabulary_are_refused(place: Path, capsys: pytest.CaptureFixture[str]) -> None:
    tiny("llama", vocab_size=300).save_pretrained(place / "larger")
    with pytest.raises(SystemExit):
        fit(place, "refused", "--weights", str(place / "larger"))
    assert "set data.vocabulary to 300" in capsys.readouterr().err

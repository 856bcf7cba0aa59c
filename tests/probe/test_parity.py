"""`parity`: equal computations are equal within rounding, and a difference is found at its first position and layer."""

import json
from copy import deepcopy
from dataclasses import fields
from itertools import product
from typing import Any
from zipfile import ZipFile

import numpy as np
import pytest
import torch

from kerple.base.errors import UserError
from kerple.cli.main import main
from kerple.hf import retrofit
from kerple.positions import KerpleLog
from kerple.probe.parity import InFp64, Outputs, Parity, Side, parity, read_outputs
from kerple.probe.reading import Reading
from tests.cli.tiny import complaint, fit
from tests.hf.test_modeling import random_kerple
from tests.hf.tiny import saved, tiny
from tests.probe.models import LENGTH, build

TOKENS = torch.randint(3, 96, (LENGTH,), generator=torch.Generator().manual_seed(3))
SLOW = ("mistral", "deepseek_v3", "gpt2", "qwen3_next")
READINGS = [
    Reading(cached=True),
    Reading(packed=True),
    Reading(padding="left"),
    Reading(padding="right"),
    Reading(attention="eager"),
    Reading(shift=16),
    Reading(continued=True),
    Reading(batched=True),
]


def compare(a: Any, b: Any, reading: Reading = READINGS[4], **options: Any) -> Any:
    return parity(Side(a, "A"), Side(b, "B", reading, **options), TOKENS[:48])


def with_window(model: Any, layer: int, window: int) -> Any:
    """Return a copy of a model in which one layer has another window than the others."""
    changed = deepcopy(model)

    def mask(module: Any, args: Any, options: dict[str, Any]) -> Any:
        rows = torch.arange((options | dict(enumerate(args)))["hidden_states"].shape[1])
        distance = rows[:, None] - rows
        return args, options | {"attention_mask": ((distance >= 0) & (distance < window))[None, None]}

    changed.model.layers[layer].self_attn.register_forward_pre_hook(mask, with_kwargs=True)
    return changed


@pytest.mark.parametrize("name", ["llama", *(pytest.param(n, marks=pytest.mark.slow) for n in SLOW)])
def test_all_readings_of_a_correct_model_are_equal_within_rounding(name):
    model = build(name)
    for reading in READINGS:
        if name == "gpt2" and (reading.padding == "left" or reading.shift):
            continue  # which change its absolute positions
        if name == "qwen3_next" and reading.packed:
            continue  # its recurrent state continues from one document to the next
        assert not compare(model, model, reading).differs, reading
    assert not compare(model, model, Reading(), dtype=torch.bfloat16).differs
    assert not compare(model, lambda tokens: model(tokens).logits).differs


def test_two_sides_in_fp64_are_equal_within_its_rounding():
    model = build("gpt2")  # its code has no casts to fp32
    for reading in (Reading(cached=True), Reading(batched=True), Reading(shift=16)):
        sides = (Side(model, "A", dtype=torch.float64), Side(model, "B", reading, dtype=torch.float64))
        assert parity(*sides, TOKENS[:48]).differs == bool(reading.shift)  # which changes its absolute positions


def test_the_strategies_of_a_retrofitted_model_stay_in_fp32():
    side = Side(retrofit(build("llama"), KerpleLog), "A", dtype=torch.bfloat16)
    assert torch.isfinite(side.outputs(TOKENS[:48]).log_probs).all()


def test_every_option_of_a_reading_changes_what_the_model_reads():
    model, calls = build("llama"), []

    def record(module: Any, args: Any, options: dict[str, Any]) -> None:
        tensors = {name: x.tolist() for name, x in options.items() if isinstance(x, torch.Tensor)}
        calls.append((model.config._attn_implementation, options["use_cache"], tensors))

    model.register_forward_pre_hook(record, with_kwargs=True)

    def calls_of(**options: Any) -> list[Any]:
        calls.clear()
        Reading(**options).logits(model, TOKENS[None, :40])
        return [*calls]

    values = {"decoded": 4, "padding": "left", "attention": "eager", "shift": 16}
    for name in (field.name for field in fields(Reading)):
        others = {"cached": True} if name == "decoded" else {}
        assert calls_of(**others, **{name: values.get(name, True)}) != calls_of(**others), name


def test_ways_of_reading_can_be_combined():
    model = build("llama")
    ways = {"shift": (0, 16), "continued": (False, True), "batched": (False, True)}
    ways |= {"cached": (False, True), "packed": (False, True), "padding": ("none", "left", "right")}
    for values in product(*ways.values()):
        options = dict(zip(ways, values, strict=True))
        # with a cache or a mask, transformers does not separate packed documents
        if not (options["packed"] and (options["cached"] or options["padding"] == "right")):
            difference = Reading(**options).logits(model, TOKENS[None, :40]) - model(TOKENS[None, :40]).logits
            assert difference.abs().max() < 1e-4, options


def test_an_exact_forward_pass_has_no_rounding_of_fp32():
    model = build("llama")
    sides = [Side(model, "A").outputs(TOKENS, exact=True), Side(model, "B", READINGS[4]).outputs(TOKENS, exact=True)]
    assert float((sides[0].log_probs - sides[1].log_probs).abs().max()) < 1e-12
    with InFp64():
        assert torch.ones(1, dtype=torch.float64).float().dtype == torch.float64


def test_an_output_of_a_layer_without_rounding_is_written(tmp_path):
    none = torch.zeros(3, dtype=torch.float64)
    found = Parity(("A", "B"), none, none, None, None, layers=none[None] + 9, layer_band=none[None])
    found.write(tmp_path)  # JSON has no infinite numbers
    assert json.loads((tmp_path / "parity.json").read_text())["first_layer"] == 0


def test_a_window_that_is_wrong_by_one_is_found_in_its_layer_and_at_its_first_position():
    model = build("mistral")
    found = compare(model, with_window(model, 2, 9), Reading())
    assert (found.first_layer, found.first_position) == (2, 8)  # query 8 is the first that sees one key more
    assert [line.split(":")[0] for line in found.words] == ["probe of layer 2 of A", "probe of layer 2 of B"]
    assert "query 8 sees 9 keys, expected 8" in found.words[1]  # the mask of B is bool
    assert not compare(model, with_window(model, 2, 8), Reading()).differs


def test_other_faults_are_found():
    llama, yarn = build("llama"), build("llama+yarn")
    yarn.load_state_dict(llama.state_dict())
    found = compare(llama, yarn, Reading())
    assert (found.first_layer, found.first_position) == (0, 1)
    assert "attention factor 1.139" in found.words[1]
    assert compare(llama, llama, Reading(packed=True, cached=True)).first_position == 0

    def late(tokens: torch.Tensor) -> torch.Tensor:  # right before position 40
        ids = torch.arange(tokens.shape[1])
        return llama(tokens, position_ids=torch.where(ids < 40, ids, ids + 1)[None], attention_mask=tokens > 0).logits

    assert compare(llama, late).first_position == 40


class Port(torch.nn.Module):
    """A port with a configuration of another class, whose blocks are those of a model, with a table of angles."""

    def __init__(self, model: Any, shift: float) -> None:
        super().__init__()
        self.config, self.h, self.model = {"n_layer": 4}, torch.nn.ModuleList(model.model.layers), [model]
        self.table = torch.arange(LENGTH).float()
        self.table[1:] += shift

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        inner = self.model[0].model
        x, length = inner.embed_tokens(tokens), tokens.shape[1]
        angles = inner.rotary_emb(x, self.table[None, :length])
        mask = torch.ones(length, length).tril().log()[None, None]
        for block in self.h:
            x = block(x, attention_mask=mask, position_embeddings=angles)
        return self.model[0].lm_head(inner.norm(x))


def test_a_port_that_is_right_at_position_0_is_found_with_its_layer():
    model = build("llama")
    assert not compare(model, Port(deepcopy(model), 0)).differs
    found = compare(model, Port(deepcopy(model), 0.5))
    assert (found.first_position, found.first_layer) == (1, 0)
    port = Port(deepcopy(model), 0)
    with pytest.raises(UserError, match="B: got a tuple, expected finite logits of shape"):
        compare(model, lambda tokens: (port(tokens), None))
    with pytest.raises(UserError, match="B: got log-probabilities that are not finite"):
        parity(Side(model, "A"), Side(Outputs(torch.full((48, 96), torch.nan)), "B"), TOKENS[:48])
    with pytest.raises(UserError, match=r"B: dtype: got torch.bfloat16, expected torch.float32 for a source"):
        Side(port, "B", dtype=torch.bfloat16)


def test_a_model_in_training_mode_is_refused_because_dropout_hides_faults():
    model = build("llama")
    for sides in ((model, deepcopy(model).train()), (deepcopy(model).train(), lambda tokens: model(tokens).logits)):
        with pytest.raises(UserError, match=r"[AB]: got a model in training mode, expected .*; use model\.eval"):
            compare(*sides)


@pytest.mark.parametrize("kind", ["log_probs", "target_log_probs", "top_log_probs"])
def test_a_file_of_another_engine_is_a_side(kind, tmp_path):
    model = build("llama")
    log_probs = model(TOKENS[None, :48]).logits[0].log_softmax(-1).detach()
    top = log_probs.topk(5, -1)
    arrays = {
        "log_probs": {"log_probs": log_probs},
        "target_log_probs": {"target_log_probs": log_probs[:-1].gather(1, TOKENS[1:48, None])[:, 0]},
        "top_log_probs": {"top_log_probs": top.values, "top_ids": top.indices},
    }[kind]
    path = tmp_path / "engine.npz"
    for error in (0.0, 0.01):
        changed = {name: x + error if name == kind else x for name, x in arrays.items()}
        np.savez(path, tokens=TOKENS[:48].numpy(), **{name: x.numpy() for name, x in changed.items()})
        outputs = read_outputs(str(path), "B")
        assert torch.equal(outputs.tokens, TOKENS[:48])
        found = compare(model, outputs)
        assert found.differs == bool(error)
        assert "layers were not compared" in found.summary()
    with pytest.raises(UserError, match="A: got no model, as in B"):
        compare(outputs, outputs)


@pytest.mark.slow
def test_the_command_writes_a_page_and_an_exit_status_and_refuses_wrong_sides(tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    a, b = saved(tmp_path / "a", "llama"), tmp_path / "b"
    saved(b, "llama")
    tiny("llama", vocab_size=258).save_pretrained(b)
    (tmp_path / "x.txt").write_text("abc def " * 40)
    text = ["--text", str(tmp_path / "x.txt"), "--length", "32"]
    main(["parity", str(a), str(a), "--b.cached", "true", *text])
    assert "equal within rounding" in capsys.readouterr().out
    assert json.loads((tmp_path / "logs/parity/a-a/parity.json").read_text())["first_position"] is None
    assert "data:image/png" in (tmp_path / "logs/parity/a-a/parity.html").read_text()
    with pytest.raises(SystemExit) as ended:
        main(["parity", str(a), str(a), "--b.scaling", "pi", "--b.factor", "4", *text])
    assert ended.value.code == 1
    assert "B (" in capsys.readouterr().out
    assert "vocabulary of 258 tokens, expected 257" in complaint(capsys, "parity", a, b, *text)
    assert complaint(capsys, "parity", "./nothing", b).startswith("error: A: ")
    tokens = np.arange(8)
    for arrays, expected in (
        ({"tokens": tokens}, "B: got a file with tokens, expected tokens and one of"),
        ({"tokens": tokens, "log_probs": np.zeros((7, 257), "f4")}, "expected 8 rows"),
        ({"tokens": tokens, "log_probs": np.full((8, 257), np.nan, "f4")}, "check them for NaN"),
        ({"tokens": tokens, "log_probs": np.zeros((8, 9), "f4")}, "a vocabulary of 9 tokens, expected 257"),
        ({"tokens": tokens + 900, "log_probs": np.zeros((8, 257), "f4")}, "expected more than id 907"),
        ({"tokens": tokens, "target_log_probs": np.zeros(7, "f4")}, "B: got 8 positions, expected --length 32"),
    ):
        np.savez(tmp_path / "e.npz", **arrays)
        options = ["--length", "32"] if "--length" in expected else []
        assert expected in complaint(capsys, "parity", a, tmp_path / "e.npz", *options)
    np.savez(tmp_path / "e.npz", tokens=tokens, target_log_probs=np.zeros(7, "f4"))
    for length in ("0", "-5", "1"):
        message = f"error: length: got {length}, expected 2 or more"
        assert message in complaint(capsys, "parity", a, tmp_path / "e.npz", "--length", length)
    saved(tmp_path / "table", "gpt2")
    for given, positions in ((("--length", "200"), "0 to 199"), (("--length", "9", "--b.shift", "-3"), "-3 to 5")):
        message = complaint(capsys, "parity", tmp_path / "table", tmp_path / "table", "--text", "random", *given)
        assert f"positions: got {positions}, expected 0 to 127; use a shorter text or another shift" in message
    assert "expected null, because the tokens are" in complaint(capsys, "parity", a, tmp_path / "e.npz", *text[:2])


def test_a_file_that_is_no_table_of_log_probabilities_is_an_error_of_one_line(tmp_path):
    path, tokens = tmp_path / "engine.npz", np.arange(8)
    np.savez(path, tokens=tokens, target_log_probs=-np.ones(7, "f4"))
    whole = path.read_bytes()
    changed = bytearray(whole)
    changed[whole.index(tokens.tobytes())] ^= 1
    np.save(tmp_path / "array.npy", tokens)
    for content in (b"PK", whole[:200], bytes(changed), (tmp_path / "array.npy").read_bytes()):
        path.write_bytes(content)
        with pytest.raises(UserError, match=r"B: .* could not be read .* expected an .npz file"):
            read_outputs(str(path), "B")
    for name in ("tokens", "log_probs"):  # a member that is no array
        with ZipFile(path, "w") as file:
            file.writestr("tokens" if name == "tokens" else "log_probs", "text")
            other = "log_probs" if name == "tokens" else "tokens"
            np.save(tmp_path / "array.npy", -np.ones((8, 3), "f4") if name == "tokens" else tokens)
            file.write(tmp_path / "array.npy", f"{other}.npy")
        with pytest.raises(UserError, match=f"B: got {name} of shape"):
            read_outputs(str(path), "B")
    np.savez(path, tokens=tokens, top_ids=np.zeros((8, 0), int), top_log_probs=np.zeros((8, 0)))
    with pytest.raises(UserError, match=r"top_log_probs of shape \(8, 0\)"):
        read_outputs(str(path), "B")


def test_outputs_with_other_ids_or_with_layers_are_compared_with_a_model():
    model = build("llama")
    ids, log_probs = torch.full((48, 2), 999), -torch.ones(48, 2)
    with pytest.raises(UserError, match="B: got the id 999, expected ids below 96, the vocabulary of A"):
        compare(model, Outputs(log_probs, ids))
    with pytest.raises(UserError, match="B: got 40 positions, expected 48"):
        compare(model, Outputs(log_probs[:40], ids[:40]))
    outputs = Side(model, "A").outputs(TOKENS[:48])
    outputs.layers[1] += 1
    found = compare(model, outputs)
    assert found.first_layer == 1
    assert [line.split(":")[0] for line in found.words] == ["probe of layer 1 of A"]


@pytest.mark.slow
def test_our_models_and_checkpoints_are_sides(tmp_path, monkeypatch, capsys):
    model = random_kerple("KerpleLog")
    assert not compare(model, model, Reading(cached=True)).differs
    monkeypatch.chdir(tmp_path)
    checkpoint = str(fit(tmp_path))
    main(["parity", checkpoint, checkpoint, "--b.cached", "true", "--length", "16"])
    refused = complaint(capsys, "parity", checkpoint, checkpoint, "--b.factor", "2")
    assert "factor: got 2.0, expected null for a checkpoint" in refused

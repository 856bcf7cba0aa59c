"""Retrofitted models with checkpointing, compilation, several devices and processes, and transformers' Trainer."""

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor
from torch.multiprocessing.spawn import spawn
from torch.nn.parallel import DistributedDataParallel

from kerple.base.errors import UserError
from kerple.positions import strategies
from tests.hf.test_retrofit import NEEDS_MORE, OPTIONS
from tests.hf.tiny import arguments, hf, text, tiny

from kerple.hf import from_pretrained, retrofit  # isort: skip  # needs transformers, which tests.hf.tiny looks for

accelerate = pytest.importorskip("accelerate")
pytestmark = pytest.mark.slow
Gradients = dict[str, torch.Tensor]


def trained(model: Any, **options: Any) -> Gradients:
    """Return the gradients of a loss by the names of the parameters."""
    model.zero_grad()
    model(text(2, 24), labels=text(2, 24), use_cache=False, **options).loss.backward()
    names = [(name.removeprefix("module."), p.grad) for name, p in model.named_parameters() if p.grad is not None]
    return {name: g.full_tensor() if isinstance(g, DTensor) else g.clone() for name, g in names}


def assert_same(gradients: Gradients, expected: Gradients) -> None:
    assert gradients.keys() == expected.keys()
    for name, gradient in expected.items():
        torch.testing.assert_close(gradients[name], gradient, rtol=1e-4, atol=1e-6, msg=name)


@pytest.mark.parametrize("strategy", ["KerpleLog", "SSMax"])
def test_checkpointing_and_compilation_change_no_gradient(strategy: str) -> None:
    model = retrofit(tiny("gemma3_text"), strategy).train()
    mask = torch.ones(2, 24, dtype=torch.int64)
    mask[0, :5] = 0
    ids = torch.cat([torch.arange(9), torch.arange(15)])[None]
    for options in ({}, {"attention_mask": mask}, {"position_ids": ids}):
        expected = trained(model, **options)
        model.gradient_checkpointing_enable()
        assert_same(trained(model, **options), expected)
        model.gradient_checkpointing_disable()
        torch._dynamo.reset()
        compiled = trained(torch.compile(model, backend="aot_eager"), **options)
        assert_same({name.removeprefix("_orig_mod."): value for name, value in compiled.items()}, expected)


@pytest.mark.parametrize("strategy", ["CoPE", "DAPE"])
def test_compiled_models_under_autocast_compute_the_gradients_of_scores_in_fp32(strategy: str) -> None:
    """By default, torch would trace the backward pass under autocast, which would round them to bf16."""
    model, results = retrofit(tiny("llama"), strategy).train(), []
    torch._dynamo.reset()
    for each in (model, torch.compile(model, backend="aot_eager")):
        with torch.autocast("cpu", torch.bfloat16):
            loss = each(text(2, 24), labels=text(2, 24), use_cache=False).loss
        results.append(torch.autograd.grad(loss, list(model.parameters()), allow_unused=True))
    torch._dynamo.reset()
    for compiled, expected in zip(*reversed(results), strict=True):
        torch.testing.assert_close(compiled, expected, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("strategy", sorted(strategies().keys() - NEEDS_MORE))
def test_reentrant_checkpointing_is_an_error_of_one_line_or_changes_no_gradient(strategy: str) -> None:
    model = retrofit(tiny("llama"), strategy, **OPTIONS.get(strategy, {})).train()
    model.enable_input_require_grads()
    expected = trained(model)
    model.gradient_checkpointing_enable({"use_reentrant": True})
    message = None
    try:
        assert_same(trained(model), expected)
    except UserError as error:
        message = str(error).partition(":")[0]
    assert message in (None, "use_reentrant")
    if strategy in ("KerpleLog", "KerpleWeight1", "NoPE"):
        assert (message is None) == (strategy == "NoPE")


PARTS = ["model.embed_tokens", "model.norm", "model.rotary_emb", "model.kerple", "lm_head"]
PARTS += ["model.layers.0", "model.layers.1"]
AUTO = {"device_map": "auto", "max_memory": {"cpu": 100_000}}  # offloads all but the embeddings


@pytest.mark.parametrize("offloaded", ["model.layers.1", "model.embed_tokens", "model.kerple", "", "auto"])
def test_a_model_with_offloaded_parts_is_that_on_one_device(offloaded: str, tmp_path: Path) -> None:
    """Layers that are read from the disk when they are needed have another device than the others before."""
    retrofit(tiny("llama", tie_word_embeddings=False), "KerpleLog").save_pretrained(tmp_path / "model")
    expected = from_pretrained(str(tmp_path / "model"))(text(2, 24)).logits
    places = {"device_map": (dict.fromkeys(PARTS, "cpu") if offloaded else {}) | {offloaded: "disk"}}
    options = AUTO if offloaded == "auto" else places
    model = from_pretrained(str(tmp_path / "model"), offload_folder=str(tmp_path / "offload"), **options)
    assert "disk" in model.hf_device_map.values()
    torch.testing.assert_close(model(text(2, 24)).logits, expected)
    model.save_pretrained(tmp_path / "again")
    torch.testing.assert_close(from_pretrained(str(tmp_path / "again"))(text(2, 24)).logits, expected)


def test_a_model_with_offloaded_embeddings_gets_the_strategy_of_one_without(tmp_path: Path) -> None:
    plain = tiny("llama", tie_word_embeddings=False)
    plain.save_pretrained(tmp_path / "model")
    options = {"device_map": {"": "disk"}, "offload_folder": str(tmp_path / "offload")}
    model = retrofit(hf.AutoModelForCausalLM.from_pretrained(tmp_path / "model", **options), "ALiBi")
    torch.testing.assert_close(model(text(2, 24)).logits, retrofit(plain, "ALiBi")(text(2, 24)).logits)


WAYS = ("ddp", "fsdp2", "bf16")
HALF = MixedPrecisionPolicy(torch.bfloat16, torch.float32)


def in_process(rank: int, folder: str) -> None:
    """Compare the gradients of one of two processes with those of one process, for each of `WAYS`."""
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "RANK": str(rank), "WORLD_SIZE": "2"}
    dist.init_process_group("gloo", init_method=f"file://{folder}/meeting", rank=rank, world_size=2)
    for way in WAYS:
        model = retrofit(tiny("llama"), "KerpleLog").train()
        rates = model.model.kerple.positions[0].r2
        with torch.no_grad():
            rates.fill_(-0.04)
        expected = trained(model)
        model.zero_grad()
        wrapped: Any = model
        if way == "ddp":
            wrapped = DistributedDataParallel(model)
        else:
            for layer in model.model.layers:
                fully_shard(layer, **({"mp_policy": HALF} if way == "bf16" else {}))
            fully_shard(model)
        if way == "bf16":
            for name, gradient in trained(wrapped).items():
                assert float((gradient - expected[name]).norm() / expected[name].norm()) < 0.1, name
        else:
            assert_same(trained(wrapped), expected)
        torch.optim.SGD(wrapped.parameters(), lr=1e-9).step()
        rates = model.model.kerple.positions[0].r2
        assert float((rates.full_tensor() if isinstance(rates, DTensor) else rates).detach().min()) > 0
    model = fully_shard(retrofit(tiny("llama"), "KerpleLog"), mp_policy=HALF)
    with pytest.raises(UserError, match=r"kerple: got parameters of KerpleLog in torch.bfloat16, expected fp32"):
        trained(model)
    dist.destroy_process_group()


def test_two_processes_have_the_gradients_of_one(tmp_path: Path) -> None:
    """All ways share two processes, because a process takes most of its time to import transformers."""
    function: Callable[..., None] = in_process
    spawn(function, (str(tmp_path),), nprocs=2)


def test_accelerate_trains_and_clamps_as_a_plain_loop(tmp_path: Path) -> None:
    trained_models = []
    for accelerator in (None, accelerate.Accelerator(cpu=True)):
        model: Any = retrofit(tiny("llama"), "KerpleLog").train()
        with torch.no_grad():
            model.model.kerple.positions[0].r2.fill_(-0.04)
        optimizer: Any = torch.optim.AdamW(model.parameters(), lr=1e-3)
        loader: Any = torch.utils.data.DataLoader(list(text(8, 12)), batch_size=2)
        if accelerator:
            model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
        for tokens in loader:
            loss = model(tokens, labels=tokens).loss
            accelerator.backward(loss) if accelerator else loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            assert float(model.model.kerple.positions[0].r2.detach().min()) > 0
        trained_models.append(accelerator.unwrap_model(model) if accelerator else model)
    plain, prepared = trained_models
    prepared.save_pretrained(tmp_path)
    stored = from_pretrained(str(tmp_path)).state_dict()
    for name, value in plain.state_dict().items():
        torch.testing.assert_close(stored[name], value, msg=name)


def test_the_trainer_of_transformers_trains_clamps_and_continues(tmp_path: Path) -> None:
    rows = [{"input_ids": row, "labels": row} for row in text(12, 12)]
    model = retrofit(tiny("llama"), "KerpleLog")
    position = model.model.kerple.positions[0]
    before = position.r1.detach().clone()
    with torch.no_grad():
        position.r2.fill_(-0.04)
    options = arguments(tmp_path, max_steps=4, per_device_train_batch_size=2, learning_rate=1e-2)
    options.save_strategy, options.save_steps = "steps", 2
    hf.Trainer(model, options, train_dataset=rows).train()
    assert float(position.r2.detach().min()) > 0
    assert not torch.equal(position.r1, before)
    again = retrofit(tiny("llama"), "KerpleLog")
    hf.Trainer(again, options, train_dataset=rows).train(resume_from_checkpoint=str(tmp_path / "checkpoint-2"))
    torch.testing.assert_close(again.model.kerple.positions[0].r1, position.r1)
    stored = from_pretrained(str(tmp_path / "checkpoint-4"))
    assert torch.equal(stored.model.kerple.positions[0].r1, position.r1)

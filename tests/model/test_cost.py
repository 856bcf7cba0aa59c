"""Computed costs against those of real forward and backward passes."""

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from kerple.base import bf16
from kerple.model import Transformer
from kerple.model.cost import count_parameters, flops, memory, stored_for_backward
from kerple.positions import Shape, strategies


def network(name: str = "NoPE", attention: str = "auto", layers: int = 3, **options: object) -> Transformer:
    return Transformer(Shape(32, 4, 24), layers, 50, strategies()[name], attention=attention, **options)


def on_meta(name: str, **options: object) -> Transformer:
    with torch.device("meta"):
        return network(name, **options)


@pytest.mark.parametrize("options", [{}, {"hidden": 48, "bias": False}, {"tied": True}])
def test_flops_are_those_that_torch_counts(options: dict) -> None:
    model, tokens = network(attention="reference", **options), torch.randint(50, (2, 25))
    with FlopCounterMode(display=False) as forward:
        losses = model.losses(tokens)
    with FlopCounterMode(display=False) as backward:
        losses.sum().backward()
    counted = flops(model, 24)
    total = 48 * (counted.products + 2 * counted.attention)  # torch counts all T × T pairs, `flops` only half of them
    assert forward.get_total_flops() == total
    assert backward.get_total_flops() == 2 * total


@pytest.mark.parametrize("tied", [False, True])
def test_parameters_are_counted_once_and_by_part(tied: bool) -> None:
    model = network("KerpleLog", tied=tied)
    count = count_parameters(model)
    assert sum(count.values()) == sum(p.numel() for p in model.parameters())
    assert (count["positions"], count["embedding"], "head" in count) == (8, 50 * 32, not tied)


@pytest.mark.parametrize(("name", "precision"), [("KerpleLog", None), ("NoPE", torch.bfloat16), ("Learned", None)])
def test_memory_equals_that_of_a_real_step(name: str, precision: torch.dtype | None, monkeypatch) -> None:
    monkeypatch.setattr(bf16, "bf16_instructions", lambda: "AMX")  # a CPU without them stores some tensors in fp32
    counted, model = memory(on_meta(name), 2, 24, precision), network(name)
    tokens, optimiser = torch.randint(50, (2, 25)), torch.optim.AdamW(model.parameters(), fused=True)
    weights = {p.untyped_storage()._cdata for p in model.parameters()}
    with torch.autocast("cpu", precision, enabled=precision is not None), stored_for_backward(weights) as storages:
        losses = model.losses(tokens)
    losses.mean().backward()
    optimiser.step()

    def size(tensors) -> int:
        return sum(x.numel() * x.element_size() for x in tensors)

    assert counted["weights"] == size(model.parameters())
    assert counted["gradients"] == size(p.grad for p in model.parameters())
    assert counted["optimiser"] == size([x for s in optimiser.state.values() for key, x in s.items() if key != "step"])
    assert counted["activations"] + counted["logits"] == pytest.approx(sum(s.nbytes() for s in storages), rel=0.02)


@pytest.mark.parametrize("precision", [None, torch.bfloat16])
def test_memory_with_activation_checkpointing_is_that_of_one_block_and_all_inputs(precision) -> None:
    checkpointed, one = on_meta("KerpleLog", layers=5), memory(on_meta("KerpleLog", layers=1), 2, 240, precision)
    checkpointed.checkpoint_activations = True
    inputs = 4 * 2 * 240 * 32 * 4  # of the other four blocks, (B, T, D) fp32
    computed = memory(checkpointed, 2, 240, precision)
    assert computed["activations"] == pytest.approx(one["activations"] + inputs, rel=0.02)
    assert computed["logits"] == one["logits"]


def test_memory_of_activations_grows_with_the_batch_and_not_with_the_square_of_the_length() -> None:
    one, two, long = (memory(on_meta("KerpleLog"), b, t, None) for b, t in ((1, 512), (2, 512), (1, 1024)))
    assert two["activations"] == pytest.approx(2 * one["activations"], rel=0.02)
    assert long["activations"] == pytest.approx(2 * one["activations"], rel=0.02)
    assert (two["weights"], two["optimiser"]) == (one["weights"], one["optimiser"])

"""Products of bf16 on a CPU without bf16 instructions, which is simulated."""

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from kerple.base import bf16
from kerple.model import Transformer
from kerple.model.cost import memory
from kerple.positions import NoPE, Shape, strategies

FLASH = "_scaled_dot_product_flash_attention_for_cpu"
PRODUCTS = ("mm", "addmm", "bmm", "baddbmm", FLASH, f"{FLASH}_backward")


@pytest.fixture
def instructions(monkeypatch):
    """Simulates a CPU with these bf16 instructions, or without any."""

    return lambda name: monkeypatch.setattr(bf16, "bf16_instructions", lambda: name)


class ProductsOfBf16(TorchDispatchMode):
    """Counts the products of bf16 factors, and the operators of this project with bf16 arguments."""

    count = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        name = func._schema.name
        if name.startswith("kerple::") or name.removeprefix("aten::") in PRODUCTS:
            self.count += any(isinstance(x, Tensor) and x.dtype == torch.bfloat16 for x in args)
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("name", ["NoPE", "KerpleLog", "FoX", "SelfExtend", "CoPE", "OutputGate"])
def test_training_in_bf16_multiplies_bf16_only_if_the_processor_can(instructions, name: str) -> None:
    network = Transformer(Shape(32, 2, 20), 2, 50, strategies()[name], gated=True, bias=True)
    counts, losses = [], []
    for instructions_of_processor in ("", "AMX"):
        instructions(instructions_of_processor)
        with ProductsOfBf16() as products:
            with torch.autocast("cpu", torch.bfloat16):
                losses.append(network.losses(torch.arange(42).view(2, 21)))
            losses[-1].mean().backward()
        counts.append(products.count)
    assert counts[0] == 0 < counts[1]
    torch.testing.assert_close(*losses, rtol=0.01, atol=0.01)


def test_the_memory_of_a_step_on_a_gpu_does_not_depend_on_the_processor(instructions) -> None:
    sizes = []
    for name in ("", "AMX"):
        instructions(name)
        with torch.device("meta"):
            network = Transformer(Shape(32, 2, 20), 2, 50, NoPE)
        sizes.append(memory(network, 2, 20, torch.bfloat16))
    assert sizes[0] == sizes[1]


@pytest.mark.slow
@pytest.mark.parametrize("of_processor", ["", "AMX"])
@pytest.mark.parametrize("name", ["KerpleLog", "DAPE", "PoPE"])
def test_compiled_blocks_multiply_in_the_precision_of_those_that_are_not_compiled(
    instructions, name: str, of_processor: str
) -> None:
    """By default, autocast would round the gradients of fp32 scores in a compiled backward pass."""
    instructions(of_processor)
    network, results = Transformer(Shape(32, 2, 20), 2, 50, strategies()[name], gated=True), []
    for compiled in (False, True):
        torch.compiler.reset()
        if compiled:
            network.compile(backend="aot_eager")
        with torch.autocast("cpu", torch.bfloat16):
            losses = network.losses(torch.arange(42).view(2, 21))
        results.append([losses, *torch.autograd.grad(losses.mean(), list(network.parameters()))])
    torch.compiler.reset()
    for expected, computed in zip(*results, strict=True):
        torch.testing.assert_close(computed, expected, rtol=1e-5, atol=1e-7)  # PoPE: not bitwise equal


@pytest.mark.parametrize("autocast", [True, False])
def test_linear_layers_round_factors_and_results_and_add_in_fp32(instructions, autocast: bool) -> None:
    instructions("")
    dtype = torch.float32 if autocast else torch.bfloat16  # bf16-mixed and bf16-true
    x, weight, bias = (torch.randn(size).to(dtype).requires_grad_() for size in [(3, 7, 200), (5, 200), (5,)])
    grad = torch.randn(3, 7, 5).bfloat16()
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        result = bf16.linear(x, weight, bias)
    a, w, b = (v.detach().bfloat16().double() for v in (x, weight, bias))
    g = grad.double()
    expected = [a @ w.T + b, g @ w, torch.einsum("btn,btd->nd", g, a), g.sum((0, 1))]
    results = [result, *torch.autograd.grad(result, (x, weight, bias), grad)]
    assert [v.dtype for v in results] == [torch.bfloat16, *[dtype] * 3]
    for computed, exact in zip(results, expected, strict=True):
        rounded = exact.bfloat16()
        torch.testing.assert_close(computed.bfloat16(), rounded, rtol=2**-7, atol=1e-3)  # a step of bf16
        assert (computed.bfloat16() == rounded).float().mean() > 0.98  # sums in bf16 would differ everywhere


def test_linear_layers_in_fp32_and_fp64_are_those_of_torch(instructions) -> None:
    instructions("")
    layer = bf16.Linear(4, 3)
    x = torch.randn(2, 4)
    assert torch.equal(layer(x), torch.nn.functional.linear(x, layer.weight, layer.bias))
    with torch.autocast("cpu", torch.bfloat16):
        assert layer.double()(x.double()).dtype == torch.float64

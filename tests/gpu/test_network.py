"""Networks on a GPU: compiled and not, with a cache, in two processes, at the paper's size."""

import pytest
import torch
from torch import Tensor
from torch._dynamo.utils import counters

import kerple.positions as positions
from benchmarks.models import build
from kerple.model import Transformer
from kerple.positions import Position, Shape

NAMES = ["KerpleLog", "NoPE", "RoPE", "ALiBi", "T5"]


def network(name: str, device: torch.device | str, length: int = 128) -> Transformer:
    """Two layers, 4 heads of 32, weights large enough that attention is not uniform."""

    def position(shape: Shape) -> Position:
        return positions.build(name, dim=shape.dim, heads=shape.heads, length=shape.length)

    torch.manual_seed(0)
    made = Transformer(Shape(128, 4, length), 2, 500, position)
    with torch.no_grad():
        for module in made.modules():
            if isinstance(module, torch.nn.Linear):
                module.weight.normal_(std=0.1)
    return made.to(device)


def loss_and_gradients(model: Transformer, tokens: Tensor) -> list[Tensor]:
    with torch.autocast(tokens.device.type, torch.bfloat16):
        losses = model.losses(tokens)
    return [losses, *torch.autograd.grad(losses.mean(), [p for p in model.parameters() if p.requires_grad])]


@pytest.mark.parametrize("name", NAMES)
def test_compiled_and_eager_agree(name: str, device) -> None:
    model = network(name, device)
    tokens = torch.randint(500, (2, 129), device=device)
    eager = loss_and_gradients(model, tokens)
    model.compile()
    compiled = loss_and_gradients(model, tokens)
    for ours, theirs in zip(compiled, eager, strict=True):
        assert (ours - theirs).norm() <= 3e-2 * theirs.norm() + 1e-6


def test_lengths_and_windows_compile_once_each(device) -> None:
    model = network("KerpleLog", device)
    model.compile()
    counters.clear()
    lengths = (128, 256, 512) if device.type == "cuda" else (64, 128)
    for _ in range(2):
        for length in lengths:
            for window in (None, 100):
                with torch.inference_mode(), torch.autocast(device.type, torch.bfloat16):
                    model.losses(torch.randint(500, (1, length + 1), device=device), window=window)
    features = 2 * len(lengths)
    assert features <= counters["stats"]["unique_graphs"] <= features + 3  # and the loss, once or for any length


@pytest.mark.parametrize("name", NAMES)
def test_reading_with_a_cache_is_reading_at_once(name: str, device) -> None:
    model = network(name, device).eval()
    tokens = torch.randint(500, (2, 200), device=device)
    with torch.inference_mode():
        whole, cache = model(tokens), model.new_cache()
        parts = [model(part, cache=cache) for part in tokens.split([150, 1, 30, 1, 1, 17], dim=1)]
    torch.testing.assert_close(torch.cat(parts, 1), whole, rtol=2e-3, atol=2e-3)  # fp32, TF32 in the products


@pytest.mark.parametrize("name", ["KerpleLog", "T5"])
def test_162m_parameters_read_16384_tokens_within_8_gib(name: str, device) -> None:
    if device.type != "cuda":
        size, length = "demo", 512
    else:
        size, length = "162M", 16384
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
    model = build(size, name, 512, device.type).eval()
    tokens = torch.randint(model.embedding.num_embeddings, (1, length + 1), device=device)
    with torch.inference_mode(), torch.autocast(device.type, torch.bfloat16):
        losses = model.losses(tokens)
    assert losses.isfinite().all()
    if device.type == "cuda":
        assert torch.cuda.max_memory_allocated() < 8 * 2**30

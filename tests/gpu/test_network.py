"""Networks on a GPU: compiled and not compiled, and of the paper's size."""

from itertools import pairwise

import pytest
import torch
from torch import Tensor

from benchmarks.models import build
from kerple.model import Transformer
from kerple.positions import Shape, strategies
from tests.gpu.conftest import memory_below


def loss_and_gradients(model: Transformer, tokens: Tensor) -> list[Tensor]:
    with torch.autocast(tokens.device.type, torch.bfloat16):
        losses = model.losses(tokens)
    return [losses, *torch.autograd.grad(losses.mean(), [p for p in model.parameters() if p.requires_grad])]


@pytest.mark.parametrize(
    ("name", "length"),
    [("KerpleLog", 128), ("NoPE", 128), ("RoPE", 128), ("ALiBi", 128), ("T5", 128), ("FoX", 512)],
)
def test_compiled_and_eager_agree(name: str, length: int, device) -> None:
    model = Transformer(Shape(128, 4, 128), 2, 500, strategies()[name], init=0.1).to(device)  # attention is not uniform
    length = length if device.type == "cuda" else 128  # a CPU compiles 512 tokens for minutes
    tokens = torch.randint(500, (2, length + 1), device=device)
    eager = loss_and_gradients(model, tokens)
    model.compile()
    torch._dynamo.utils.counters.clear()
    compiled = loss_and_gradients(model, tokens)
    assert not torch._dynamo.utils.counters["graph_break"]  # a block that is compiled in parts is slower
    for ours, theirs in zip(compiled, eager, strict=True):
        assert (ours - theirs).norm() <= 3e-2 * theirs.norm() + 1e-6


@pytest.mark.parametrize("name", ["KerpleLog", "NoPE"])
def test_a_compiled_network_reads_each_document_as_if_it_were_alone(name: str, device) -> None:
    model = Transformer(Shape(128, 4, 128), 2, 500, strategies()[name], init=0.1).to(device)
    tokens, starts = torch.randint(500, (2, 301), device=device), [[0, 3, 130, 300], [0, 300]]
    parts = [(row, a, b) for row, of in enumerate(starts) for a, b in pairwise(of)]
    alone = torch.cat([model.losses(tokens[row : row + 1, a : b + 1])[0] for row, a, b in parts])
    parameters = [p for p in model.parameters() if p.requires_grad]
    expected = [alone.detach(), *torch.autograd.grad(alone.mean(), parameters)]
    documents = torch.zeros_like(tokens)
    for number, (row, a, _) in enumerate(parts):
        documents[row, a:] = number
    model.compile()
    with torch.autocast(device.type, torch.bfloat16):
        losses = model.losses(tokens, documents=documents).flatten()
    for ours, theirs in zip((losses, *torch.autograd.grad(losses.mean(), parameters)), expected, strict=True):
        assert (ours - theirs).norm() <= 3e-2 * theirs.norm() + 1e-6
    stream = model.losses(tokens).flatten()
    assert (stream - alone).norm() > 10 * (losses - alone).norm()


@pytest.mark.parametrize("name", ["KerpleLog", "T5"])
def test_162m_parameters_read_16384_tokens_within_8_gib(name: str, device) -> None:
    size, length = ("162M", 16384) if device.type == "cuda" else ("demo", 512)
    model = build(size, name, 512, device.type).eval()
    tokens = torch.randint(model.embedding.num_embeddings, (1, length + 1), device=device)
    with torch.inference_mode(), torch.autocast(device.type, torch.bfloat16), memory_below(8 * 2**30, device):
        assert model.losses(tokens).isfinite().all()

"""The two models that are measured, one training step of either, and KERPLE-log's step beside NoPE's."""

import gc
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor

from benchmarks.measure import medians
from kerple.model import Transformer
from kerple.positions import Shape, strategies

SIZES = {"demo": (128, 4, 4, 2048), "162M": (768, 12, 12, 50304)}  # width, heads, layers, vocabulary: configs/


def build(size: str, name: str, length: int, device: str = "cpu", **options: Any) -> Transformer:
    """A model with a strategy; in the strategy's options, a name of another stands for it."""
    dim, heads, layers, vocabulary = SIZES[size]
    known = strategies()
    own = {key: known.get(value, value) if isinstance(value, str) else value for key, value in options.items()}
    return Transformer(Shape(dim, heads, length), layers, vocabulary, partial(known[name], **own)).to(device)


def training_step(network: Transformer, batch: int, length: int, bf16: bool = True) -> Callable[[], None]:
    """One step as a fit makes it: bf16 autocast or fp32, clipping at 1, fused AdamW; to be called."""
    device = next(network.parameters()).device
    optimiser = torch.optim.AdamW(network.parameters(), lr=1e-4, fused=True)
    tokens = torch.randint(network.embedding.num_embeddings, (batch, length + 1), device=device)
    return partial(_step, network, optimiser, tokens, bf16)


def compiled_step(size: str, name: str, batch: int, length: int, device: str) -> tuple[Transformer, Callable[[], None]]:
    """A compiled model with a strategy, and one `training_step` of it."""
    torch._dynamo.reset()
    gc.collect()  # a compiled network refers to itself, and keeps its memory until then
    network = build(size, name, length, device)
    network.compile()
    return network, training_step(network, batch, length)


def beside_nope(size: str, batch: int, length: int, device: str, repeats: int) -> float:
    """Median seconds of a compiled step with KERPLE-log over those with NoPE, of both in turns."""
    ways = {name: compiled_step(size, name, batch, length, device)[1] for name in ("KerpleLog", "NoPE")}
    times = medians(ways, repeats)
    return times["KerpleLog"] / times["NoPE"]


def _step(network: Transformer, optimiser: torch.optim.Optimizer, tokens: Tensor, bf16: bool) -> None:
    with torch.autocast(tokens.device.type, torch.bfloat16, enabled=bf16):
        loss = network.losses(tokens).mean()
    optimiser.zero_grad()
    loss.backward()
    torch.nn.utils.clip_grad_norm_(network.parameters(), 1.0)
    optimiser.step()
    network.constrain_()

"""Models of the benchmarks, and a training step."""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch

from kerple.model import Transformer
from kerple.positions import Shape, strategies

SIZES = {"demo": (128, 4, 4, 2048), "162M": (768, 12, 12, 50304)}  # width, heads, layers, vocabulary: configs/


def build(size: str, name: str, length: int, device: str = "cpu", **options: Any) -> Transformer:
    """A model with a strategy; in the strategy's options, the name of another strategy stands for its class."""
    dim, heads, layers, vocabulary = SIZES[size]
    classes = strategies()
    options = {key: classes.get(value, value) if isinstance(value, str) else value for key, value in options.items()}
    return Transformer(Shape(dim, heads, length), layers, vocabulary, partial(classes[name], **options)).to(device)


def training_step(network: Transformer, batch: int, length: int, bf16: bool = True) -> Callable[[], None]:
    """One step as a fit makes it: bf16 autocast or fp32, clipping at 1, fused AdamW; to be called."""
    device = next(network.parameters()).device
    optimiser = torch.optim.AdamW(network.parameters(), lr=1e-4, fused=True)
    tokens = torch.randint(network.embedding.num_embeddings, (batch, length + 1), device=device)

    def step() -> None:
        with torch.autocast(device.type, torch.bfloat16, enabled=bf16):
            loss = network.losses(tokens).mean()
        optimiser.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(network.parameters(), 1.0)
        optimiser.step()
        network.constrain_()

    return step

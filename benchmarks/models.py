"""Models of the benchmarks, and a training step."""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch

from kerple.model import Transformer
from kerple.positions import Shape, strategies

SIZES = {"demo": (128, 4, 4, 2048), "162M": (768, 12, 12, 50304)}  # width, heads, layers, vocabulary: configs/


def build(size: str, name: str, length: int, device: str = "cpu", **options: Any) -> Transformer:
    """Build a model with a strategy.

    Args:
        size: Key of `SIZES`.
        name: Class name of the strategy.
        length: Training length in tokens.
        device: Device of the model.
        **options: Options of the strategy. Class names of strategies, also in dictionaries, become classes.
    """
    dim, heads, layers, vocabulary = SIZES[size]
    classes = strategies()

    def resolve(value: Any) -> Any:
        if isinstance(value, dict):
            return {key: resolve(entry) for key, entry in value.items()}
        return classes.get(value, value) if isinstance(value, str) else value

    strategy = partial(classes[name], **resolve(options))
    return Transformer(Shape(dim, heads, length), layers, vocabulary, strategy).to(device)


def training_step(
    network: Transformer, batch: int, length: int, bf16: bool = True, documents: torch.Tensor | None = None
) -> Callable[[], None]:
    """Return a function that makes one training step like `fit`: loss, gradients clipped at norm 1, and fused AdamW.

    Args:
        network: Network to train.
        batch: Number of segments in the batch.
        length: Number of tokens in a segment.
        bf16: Whether autocast to bf16 is enabled.
        documents: The document of each token, (batch, length + 1) int64; None if a query sees all earlier tokens.
    """
    device = next(network.parameters()).device
    optimiser = torch.optim.AdamW(network.parameters(), lr=1e-4, fused=True)
    tokens = torch.randint(network.embedding.num_embeddings, (batch, length + 1), device=device)

    def step() -> None:
        with torch.autocast(device.type, torch.bfloat16, enabled=bf16):
            loss = network.losses(tokens, documents=documents).mean()
        optimiser.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(network.parameters(), 1.0)
        optimiser.step()
        network.constrain_()

    return step

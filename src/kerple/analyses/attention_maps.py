"""Attention probabilities of a network as tensors, and two numbers that summarise them: entropy and distance.

The callbacks `AttentionMaps` and `AttentionStatistics` (`kerple.analyses.heads`) report them.
"""

import copy
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from kerple.analyses.instrument import uncompiled
from kerple.attention.reference import attend_reference
from kerple.model import Transformer
from kerple.model.self_attention import PositionContext, SelfAttention
from kerple.positions import Position

Visit = Callable[[int, Tensor], None]


@torch.no_grad()
def visit_probabilities(
    network: Transformer, tokens: Tensor, visit: Visit, *, offset: int = 0, window: int | None = None
) -> None:
    """Run the network and call ``visit`` with the attention probabilities of each layer.

    They are computed a second time beside the network's own attention, in fp32 (fp64 in an fp64 network), by the
    explicit reference: its output for one-hot values is the probabilities. Only one layer's are in memory at a time.

    Args:
        network: The model, in evaluation mode.
        tokens: (B, T) int64.
        visit: Called with the number of the layer and its probabilities (B, H, T, T), which are 0 for future keys.
            Under a strategy with a sink, rows add up to less than 1.
        offset: Added to every position.
        window: Number of keys that a query sees; None for all.
    """

    def show(layer: int, attention: SelfAttention, arguments: tuple[Any, ...]) -> None:
        x, position, context = arguments[:3]
        visit(layer, _probabilities(attention, x, position, context))

    hooks = [b.attention.register_forward_pre_hook(partial(show, i)) for i, b in enumerate(network.blocks)]
    try:
        with uncompiled(network):
            network.features(tokens, offset=offset, window=window)
    finally:
        for hook in hooks:
            hook.remove()


def entropy(probabilities: Tensor) -> Tensor:
    """Entropy -Σ p log p, in nats, of each query's probabilities (…, T, T) over its keys; (…, T)."""
    return torch.special.entr(probabilities).sum(-1)


def mean_distance(probabilities: Tensor) -> Tensor:
    """Mean attended distance Σ p·d, in tokens, of each query under probabilities (…, queries, keys); (…, queries)."""
    index = torch.arange(probabilities.shape[-1], device=probabilities.device)
    distance = (index[:, None] - index).clamp(min=0)  # (T, T)
    return (probabilities * distance).sum(-1)


def _probabilities(attention: SelfAttention, x: Tensor, position: Position, context: PositionContext) -> Tensor:
    wide = torch.promote_types(torch.float32, attention.qkv.weight.dtype)
    with torch.autocast(x.device.type, enabled=False):
        q, k, _, modifiers = copy.deepcopy(attention).to(wide).prepare(x.to(wide), position, context)
        one_hot = torch.eye(x.shape[1], device=x.device, dtype=wide).expand(*k.shape[:2], -1, -1)  # (B, G, T, T)
        return attend_reference(q, k, one_hot, replace(modifiers, add_to_output=None))

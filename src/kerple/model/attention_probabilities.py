"""Attention probabilities of each layer, computed in addition to the network's own attention."""

import copy
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from kerple.attention.reference import attend_reference
from kerple.model.self_attention import PositionContext, SelfAttention
from kerple.positions import Position


@contextmanager
def visit_probabilities(layers: Sequence[SelfAttention], visit: Callable[[int, Tensor], None]) -> Iterator[None]:
    """Context in which ``visit`` is called with the attention probabilities of each layer that runs.

    They are computed in fp32 (fp64 in an fp64 network) by the explicit reference: its output for one-hot values is the
    probabilities. Only one layer's are in memory at a time.

    Args:
        layers: The layers of attention, not compiled: a compiled graph would not call hooks.
        visit: Called with the number of the layer and its probabilities (B, H, T, T), which are 0 for future keys.
            Under a strategy with a sink, rows add up to less than 1.
    """

    def show(layer: int, attention: SelfAttention, arguments: tuple[Any, ...]) -> None:
        visit(layer, _probabilities(attention, *arguments[:3]))

    hooks = [attention.register_forward_pre_hook(partial(show, i)) for i, attention in enumerate(layers)]
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()


def _probabilities(attention: SelfAttention, x: Tensor, position: Position, context: PositionContext) -> Tensor:
    wide = torch.promote_types(torch.float32, attention.qkv.weight.dtype)
    with torch.autocast(x.device.type, enabled=False):
        q, k, _, spec = copy.deepcopy(attention).to(wide).prepare(x.to(wide), position, context)
        one_hot = torch.eye(x.shape[1], device=x.device, dtype=wide).expand(*k.shape[:2], -1, -1)  # (B, G, T, T)
        return attend_reference(q, k, one_hot, replace(spec, add_to_output=None))

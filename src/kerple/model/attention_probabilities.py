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
    """Context in which each forward pass of a layer calls ``visit`` with its attention probabilities.

    They are computed in fp32 (fp64 in an fp64 network) by explicit attention to one-hot values, whose output is the
    probabilities. Only the probabilities of one layer are in memory at a time.

    Args:
        layers: Attention layers that are not compiled, because compiled graphs do not call hooks.
        visit: Function of the number of a layer and its probabilities (B, H, T, T), which are 0 for future keys. With a
            sink, rows sum to less than 1.
    """

    def hook(layer: int, attention: SelfAttention, arguments: tuple[Any, ...]) -> None:
        visit(layer, _probabilities(attention, *arguments[:3]))

    hooks = [attention.register_forward_pre_hook(partial(hook, i)) for i, attention in enumerate(layers)]
    try:
        yield
    finally:
        for handle in hooks:
            handle.remove()


def _probabilities(attention: SelfAttention, x: Tensor, position: Position, context: PositionContext) -> Tensor:
    dtype = torch.promote_types(torch.float32, attention.qkv.weight.dtype)
    with torch.autocast(x.device.type, enabled=False):
        q, k, _, spec = copy.deepcopy(attention).to(dtype).prepare(x.to(dtype), position, context)
        one_hot = torch.eye(x.shape[1], device=x.device, dtype=dtype).expand(*k.shape[:2], -1, -1)  # (B, G, T, T)
        return attend_reference(q, k, one_hot, replace(spec, add_to_output=None))

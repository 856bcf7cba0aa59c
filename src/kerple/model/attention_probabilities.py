"""Attention probabilities of a layer, computed separately from its forward pass."""

import copy
from dataclasses import replace

import torch
from torch import Tensor

from kerple.attention.reference import attend_reference
from kerple.model.self_attention import PositionContext, SelfAttention
from kerple.positions import Position


def attention_probabilities(layer: SelfAttention, x: Tensor, position: Position, context: PositionContext) -> Tensor:
    """Return the attention probabilities (B, H, T, T) of T queries and T keys.

    They are the output of `attend_reference` if the values are the identity matrix. They are computed in fp32 (fp64 in
    an fp64 network). They are 0 for keys that a query does not see. With a sink, the probabilities of a query sum to
    less than 1.

    Args:
        layer: The layer.
        x: Input of the layer, (B, T, D).
        position: Strategy of the layer.
        context: Contribution of the strategy to the forward pass, without a cache.
    """
    dtype = torch.promote_types(torch.float32, layer.qkv.weight.dtype)
    with torch.autocast(x.device.type, enabled=False):
        q, k, _, spec = copy.deepcopy(layer).to(dtype).prepare(x.to(dtype), position, context)
        values = torch.eye(x.shape[1], device=x.device, dtype=dtype).expand(*k.shape[:2], -1, -1)  # (B, G, T, T)
        if spec.more_keys is not None:  # first tokens at other distances, which the window hides
            scores, first = spec.more_keys  # (B, H, T, F), (B, H, F, δ)
            spec = replace(spec, more_keys=(scores, values[:1, :1, : first.shape[2]].expand(*first.shape[:2], -1, -1)))
        return attend_reference(q, k, values, replace(spec, add_to_output=None))

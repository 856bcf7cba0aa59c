"""Attention probabilities of one layer, computed in addition to the network's own attention."""

import copy
from dataclasses import replace

import torch
from torch import Tensor

from kerple.attention.reference import attend_reference
from kerple.model.self_attention import PositionContext, SelfAttention
from kerple.positions import Position


def attention_probabilities(
    attention: SelfAttention, x: Tensor, position: Position, context: PositionContext
) -> Tensor:
    """Return the probabilities (B, H, T, T) of a layer, given the arguments of its forward pass.

    They are computed in fp32 (fp64 in an fp64 network) by explicit attention to one-hot values, whose output is the
    probabilities. They are 0 for future keys. With a sink, rows sum to less than 1.
    """
    dtype = torch.promote_types(torch.float32, attention.qkv.weight.dtype)
    with torch.autocast(x.device.type, enabled=False):
        q, k, _, spec = copy.deepcopy(attention).to(dtype).prepare(x.to(dtype), position, context)
        one_hot = torch.eye(x.shape[1], device=x.device, dtype=dtype).expand(*k.shape[:2], -1, -1)  # (B, G, T, T)
        return attend_reference(q, k, one_hot, replace(spec, add_to_output=None))

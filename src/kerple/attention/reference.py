"""Explicit attention: the oracle of every test, and the only place where a T × T tensor exists."""

import torch
from torch import Tensor

from kerple.attention.modifiers import UNMODIFIED, Modifiers, for_query_heads, scores, sink_of_queries, visible_keys
from kerple.positions.token_positions import AttentionWeights


def attend_reference(q: Tensor, k: Tensor, v: Tensor, modifiers: Modifiers = UNMODIFIED) -> Tensor:
    """Causal attention in the precision of its arguments, scores and probabilities written out.

    Arguments and result are those of `kerple.attention.attend`; nothing is checked and nothing is fused. In fp64 it is
    what every other implementation is compared with. Memory is O(B·H·T²).
    """
    k, v = for_query_heads(q, k, v)
    length = k.shape[2]
    rows, columns = slice(length - q.shape[2], length), slice(0, length)
    seen = visible_keys(rows, columns, modifiers, q.device)  # (Tq, Tk)
    index = torch.arange(length, device=q.device)
    distance = (index[rows, None] - index).clamp(min=0)
    s = scores(q, k, modifiers, rows, columns, lambda a, b: a @ b.mT)  # (B, H, Tq, Tk)
    s = s * (q.shape[-1] ** -0.5 if modifiers.scale is None else modifiers.scale)
    if modifiers.weight is not None:
        s = s * modifiers.weight[:, distance]
    if modifiers.table is not None:
        s = s + modifiers.table[:, distance]
    sinks = [] if modifiers.sink is None else [modifiers.sink]
    weights = None
    if modifiers.modify_scores is not None:
        modified = modifiers.modify_scores(s, q, k, rows, columns, seen)
        if isinstance(modified, AttentionWeights):
            weights = modified.p
        elif isinstance(modified, tuple):
            s, sinks = modified[0], [*sinks, modified[1]]
        else:
            s = modified
    if weights is None:
        logits = [sink_of_queries(x).expand(s.shape[:3])[..., None].to(s) for x in sinks]
        weights = torch.cat([s.masked_fill(~seen, float("-inf")), *logits], -1).softmax(-1)[..., :length]
    p = weights.to(q.dtype)
    out = p @ v  # (B, H, Tq, δ)
    return out if modifiers.add_to_output is None else out + modifiers.add_to_output(p, v, rows, columns, seen)

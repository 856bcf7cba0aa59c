"""Explicit attention, which the tests compare with every other implementation."""

import torch
from torch import Tensor

from kerple.attention.spec import (
    UNMODIFIED,
    AttentionSpec,
    repeat_for_query_heads,
    scores,
    sink_of_queries,
    visible_keys,
)
from kerple.positions.query_key_positions import AttentionWeights


def attend_reference(q: Tensor, k: Tensor, v: Tensor, spec: AttentionSpec = UNMODIFIED) -> Tensor:
    """Causal attention in the precision of its arguments, with explicit scores (B, H, Tq, Tk) and probabilities.

    Arguments and result are those of `kerple.attention.attend`, but arguments are not checked. Tests of other
    implementations call this function in fp64.
    """
    k, v = repeat_for_query_heads(q, k, v)
    length = k.shape[2]
    rows, columns = slice(length - q.shape[2], length), slice(0, length)
    seen = visible_keys(rows, columns, spec, q.device)  # (Tq, Tk)
    index = torch.arange(length, device=q.device)
    distance = (index[rows, None] - index).clamp(min=0)
    s = scores(q, k, spec, rows, columns, lambda a, b: a @ b.mT)  # (B, H, Tq, Tk)
    s = s * (q.shape[-1] ** -0.5 if spec.scale is None else spec.scale)
    if spec.weight is not None:
        s = s * spec.weight[:, distance]
    if spec.table is not None:
        s = s + spec.table[:, distance]
    sinks = [] if spec.sink is None else [spec.sink]
    weights = None
    if spec.modify_scores is not None:
        modified = spec.modify_scores(s, q, k, rows, columns, seen)
        if isinstance(modified, AttentionWeights):
            weights = modified.p
        elif isinstance(modified, tuple):
            s, sinks = modified[0], [*sinks, modified[1]]
        else:
            s = modified
    if weights is None:
        logits = [sink_of_queries(x).expand(s.shape[:3])[..., None].to(s) for x in sinks]
        s = s.masked_fill(~seen, float("-inf"))
        if spec.more_keys is not None:
            s, v = torch.cat([spec.more_keys[0], s], -1), torch.cat([spec.more_keys[1].to(v.dtype), v], 2)
        weights = torch.cat([s, *logits], -1).softmax(-1)[..., : v.shape[2]]
    p = weights.to(q.dtype)
    out = p @ v  # (B, H, Tq, δ')
    return out if spec.add_to_output is None else out + spec.add_to_output(p, v, rows, columns, seen)

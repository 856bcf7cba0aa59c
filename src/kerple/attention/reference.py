"""Explicit attention, which the tests compare with every other implementation."""

import torch
from torch import Tensor

from kerple.attention.spec import (
    UNMODIFIED,
    AttentionSpec,
    add_output_terms,
    repeat_for_query_heads,
    scores,
    sink_of_queries,
    visible_keys,
)
from kerple.positions.token_positions import AttentionWeights, add_key_bias, add_query_bias


def attend_reference(q: Tensor, k: Tensor, v: Tensor, spec: AttentionSpec = UNMODIFIED) -> Tensor:
    """Causal attention in the precision of its arguments, with explicit scores (B, H, Tq, Tk) and probabilities.

    Arguments and result are those of `kerple.attention.attend`, but arguments are not checked. Tests of other
    implementations call this function in fp64.
    """
    with torch.autocast(q.device.type, enabled=False):
        k, v = repeat_for_query_heads(q, k, v)
        p = attention_probabilities(q, k, spec)
        values = v if spec.more_keys is None else torch.cat([spec.more_keys[1].to(v.dtype), v], 2)
        out = p @ values  # (B, H, Tq, δ')
        rows, columns = slice(k.shape[2] - q.shape[2], k.shape[2]), slice(0, k.shape[2])
        return add_output_terms(out, p, v, spec, rows, columns, visible_keys(rows, columns, spec, q.device))


def attention_probabilities(q: Tensor, k: Tensor, spec: AttentionSpec) -> Tensor:
    """Return the probabilities of F additional keys and of the Tk keys for each query, (B, H, Tq, F + Tk).

    The arguments are those of `attend_reference`, but there is a key for each of the H query heads. With a sink, the
    probabilities of a query sum to less than 1.
    """
    length = k.shape[2]
    rows, columns = slice(length - q.shape[2], length), slice(0, length)
    seen = visible_keys(rows, columns, spec, q.device)  # (Tq, Tk)
    index = torch.arange(length, device=q.device)
    distance = (index[rows, None] - index).clamp(min=0)
    s = scores(q, k, spec, rows, columns, lambda a, b: a @ b.mT) * spec.scale_of(q)  # (B, H, Tq, Tk)
    if spec.score_scale is not None:
        s = s * spec.score_scale[:, distance]
    if spec.table is not None:
        s = s + spec.table[:, distance]
    if spec.key_bias is not None:
        s = add_key_bias(s, spec.key_bias)
    if spec.query_bias is not None:
        s = add_query_bias(s, *spec.query_bias, spec.block(rows, columns, seen))
    sinks = [spec.sink]
    if spec.modify_scores is not None:
        modified = spec.modify_scores(s, q, k, spec.block(rows, columns, seen))
        if isinstance(modified, AttentionWeights):
            return modified.p.to(q.dtype)
        s, new_sink = modified if isinstance(modified, tuple) else (modified, None)
        sinks.append(new_sink)
    s = s.masked_fill(~seen, float("-inf"))
    if spec.more_keys is not None:
        s = torch.cat([spec.more_keys[0], s], -1)
    logits = [sink_of_queries(x).expand(s.shape[:3])[..., None].to(s) for x in sinks if x is not None]
    return torch.cat([s, *logits], -1).softmax(-1)[..., : s.shape[-1]].to(q.dtype)

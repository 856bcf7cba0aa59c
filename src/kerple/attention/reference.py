"""Explicit attention: the oracle of every test, and the only place where a T × T tensor exists."""

from collections.abc import Callable

import torch
from torch import Tensor

from kerple.positions.token_positions import AttentionWeights

Mix = Callable[[Tensor, Tensor, Tensor, slice, slice, Tensor], Tensor | tuple[Tensor, Tensor] | AttentionWeights]
Values = Callable[[Tensor, Tensor, slice, slice, Tensor], Tensor]


def for_query_heads(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    """Keys and values (B, G, Tk, δ), each repeated for the query heads it serves; (B, H, Tk, δ)."""
    repeats = q.shape[1] // k.shape[1]
    return k.repeat_interleave(repeats, 1), v.repeat_interleave(repeats, 1)


def attend_reference(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    scale: float | None = None,
    table: Tensor | None = None,
    weight: Tensor | None = None,
    window: int | None = None,
    sink: Tensor | None = None,
    mix: Mix | None = None,
    values: Values | None = None,
) -> Tensor:
    """Causal attention in the precision given, scores and probabilities written out.

    The arguments and the result are those of `kerple.attention.attend`; nothing is checked and nothing is fused. In
    fp64 it is what every other way is compared with. Memory is O(B·H·T²).
    """
    k, v = for_query_heads(q, k, v)
    length, rows, columns = k.shape[2], slice(k.shape[2] - q.shape[2], k.shape[2]), slice(0, k.shape[2])
    index = torch.arange(length, device=q.device)
    distance = index[rows, None] - index  # (Tq, Tk)
    seen = distance >= 0 if window is None else (distance >= 0) & (distance < window)
    s = q @ k.mT * (q.shape[-1] ** -0.5 if scale is None else scale)  # (B, H, Tq, Tk)
    if weight is not None:
        s = s * weight[:, distance.clamp(min=0)]
    if table is not None:
        s = s + table[:, distance.clamp(min=0)]
    more = None
    if mix is not None:
        mixed = mix(s, q, k, rows, columns, seen)
        if isinstance(mixed, AttentionWeights):
            out = mixed.p.to(q.dtype) @ v
            return out if values is None else out + values(mixed.p, v, rows, columns, seen)
        s, more = mixed if isinstance(mixed, tuple) else (mixed, None)
    extra = [x if x.ndim == 3 else x[:, None].expand(s.shape[:3]) for x in (sink, more) if x is not None]
    columns_of_sinks = torch.stack(extra, -1) if extra else s.new_empty(*s.shape[:3], 0)  # (B, H, Tq, sinks)
    p = torch.cat([s.masked_fill(~seen, float("-inf")), columns_of_sinks.to(s)], -1).softmax(-1)
    p = p[..., :length].to(q.dtype)
    out = p @ v  # (B, H, Tq, δ)
    return out if values is None else out + values(p, v, rows, columns, seen)

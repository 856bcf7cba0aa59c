"""Explicit attention: the oracle of every test, and the only place where a T × T tensor exists."""

from collections.abc import Callable

import torch
from torch import Tensor

Scores = Callable[[Tensor, Tensor, slice, slice], Tensor]
Values = Callable[[Tensor, slice, slice], Tensor]


def attend_reference(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    table: Tensor | None = None,
    weight: Tensor | None = None,
    window: int | None = None,
    scores: Scores | None = None,
    values: Values | None = None,
) -> Tensor:
    """Causal attention in the precision given, scores and probabilities written out.

    The arguments and the result are those of `kerple.attention.attend`; nothing is checked and nothing is fused. In
    fp64 it is what every other way is compared with. Memory is O(B·H·T²).
    """
    length, rows = k.shape[2], slice(k.shape[2] - q.shape[2], k.shape[2])
    index = torch.arange(length, device=q.device)
    distance = index[rows, None] - index  # (Tq, Tk)
    s = q @ k.transpose(-1, -2) * q.shape[-1] ** -0.5  # (B, H, Tq, Tk)
    if weight is not None:
        s = s * weight[:, distance.clamp(min=0)]
    if table is not None:
        s = s + table[:, distance.clamp(min=0)]
    if scores is not None:
        s = s + scores(q, k, rows, slice(0, length))
    hidden = distance < 0 if window is None else (distance < 0) | (distance >= window)
    p = s.masked_fill(hidden, float("-inf")).softmax(-1).to(q.dtype)
    out = p @ v  # (B, H, Tq, δ)
    return out if values is None else out + values(p, rows, slice(0, length))

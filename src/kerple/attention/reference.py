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
    """Causal attention in the precision given.

    Args:
        q: (B, H, Tq, δ), the last Tq of the Tk rows.
        k: (B, H, Tk, δ).
        v: (B, H, Tk, δ).
        table: (H, >= Tk), added to the scaled score at distance d = m - n.
        weight: (H, >= Tk), multiplies q·k at distance d.
        window: Only keys at distance d < window are seen.
        scores: ``scores(q, k, rows, columns)`` gives (B or 1, H, Tq, Tk) to be added to the scaled scores.
        values: ``values(attention, rows, columns)`` gives (B, H, Tq, δ) to be added to the output.

    Returns:
        (B, H, Tq, δ) in the dtype of ``q``.
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

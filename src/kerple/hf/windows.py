"""Attention to the last w keys, in models of transformers whose attention can be replaced."""

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from kerple.base.errors import UserError

NAME = "kerple_windowed"
QUERY_ROWS = 512  # queries in a chunk, which limits the size of the mask
CHANGE_SCORES = ("softcap", "s_aux", "position_bias")  # options of attention that this implementation does not support


@dataclass
class _Window:
    size: int
    calls: int = 0


_current: ContextVar[_Window] = ContextVar("window")


@contextmanager
def windowed(model: Any, size: int) -> Iterator[None]:
    """Context in which every layer's attention is limited to the last ``size`` keys, the query's own included.

    Args:
        model: A `transformers.PreTrainedModel`.
        size: Number of keys, 1 or more.

    Raises:
        UserError: If a layer did not use the replaced attention, so that the window had no effect on it.
    """
    from transformers import AttentionInterface

    AttentionInterface.register(NAME, _attention)
    configs = {id(m.config): m.config for m in model.modules() if hasattr(m, "config")}.values()
    before = [config._attn_implementation for config in configs]
    window = _Window(size)
    token = _current.set(window)
    try:
        for config in configs:
            config._attn_implementation = NAME
        yield
    finally:
        _current.reset(token)
        for config, name in zip(configs, before, strict=True):
            config._attn_implementation = name
    layers = model.config.get_text_config().num_hidden_layers
    if window.calls != layers:
        raise UserError(
            f"window: {type(model).__name__} asked for exchangeable attention in {window.calls} of its {layers} "
            "layers, so it cannot be limited to a window; leave out windowed, and the analyses that use windows"
        )


def _attention(
    module: nn.Module,
    query: Tensor,  # (B, H, T, δ)
    key: Tensor,  # (B, G, T, δ)
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    sliding_window: int | None = None,
    **options: Any,
) -> tuple[Tensor, None]:
    window = _current.get()
    window.calls += 1
    unknown = [name for name in CHANGE_SCORES if options.get(name) is not None]
    if unknown or attention_mask is not None or not getattr(module, "is_causal", True) or dropout:
        asked = ", ".join(unknown) or "a mask, dropout or attention to the future"
        raise UserError(f"window: {type(module).__name__} needs {asked}, which attention in a window does not have")
    size = min(window.size, sliding_window or window.size)
    length, before = query.shape[2], key.shape[2] - query.shape[2]
    parts = []
    for first in range(0, length, QUERY_ROWS):
        last = min(first + QUERY_ROWS, length)
        begin = max(0, before + first - size + 1)
        rows = torch.arange(before + first, before + last, device=query.device)[:, None]
        columns = torch.arange(begin, before + last, device=query.device)
        seen = (columns <= rows) & (columns > rows - size)  # (rows, columns)
        parts.append(
            F.scaled_dot_product_attention(
                query[:, :, first:last],
                key[:, :, begin : before + last],
                value[:, :, begin : before + last],
                seen,
                scale=scaling,
                enable_gqa=query.shape[1] != key.shape[1],
            )
        )
    return torch.cat(parts, 2).transpose(1, 2), None  # (B, T, H, δ)

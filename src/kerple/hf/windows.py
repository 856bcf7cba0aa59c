"""Attention in a window, for models of transformers whose attention can be replaced."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from inspect import signature
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from kerple.base.errors import UserError
from kerple.positions.visibility import Visibility

NAME = "kerple_windowed"
QUERY_ROWS = 512  # queries in a chunk, which limits the size of the mask
UNSUPPORTED = ("softcap", "s_aux", "position_bias")  # options of attention that change the scores


@contextmanager
def limited_attention(model: Any, visibility: Visibility) -> Iterator[None]:
    """Limit every layer's attention to a window within the context.

    Args:
        model: A `transformers.PreTrainedModel`.
        visibility: The keys that a query sees.

    Raises:
        UserError: If a layer did not use the replaced attention. The window had no effect on such a layer.
    """
    calls = 0

    def attention(*args: Any, **options: Any) -> tuple[Tensor, None]:
        nonlocal calls
        calls += 1
        return windowed_attention(visibility, *args, **options)

    with attention_replaced(model, NAME, attention):
        yield
    layers = model.config.get_text_config().num_hidden_layers
    if calls != layers:
        given = f"got one for {type(model).__name__}, whose attention can be limited in only {calls} of {layers} layers"
        raise UserError(f"window: {given}; leave out the protocol windowed, and measures with windows")


@contextmanager
def attention_replaced(model: Any, name: str, function: Callable[..., Any] | None = None) -> Iterator[None]:
    """Replace, within the context, the attention of every layer that uses transformers' registry of attention.

    Args:
        model: A `transformers.PreTrainedModel`.
        name: Name of the attention in the registry.
        function: Function to register under this name, with the signature of transformers' functions. None if the name
            is already registered.
    """
    from transformers import AttentionInterface

    if function is not None:
        AttentionInterface.register(name, function)
    configs = {id(m.config): m.config for m in model.modules() if hasattr(m, "config")}.values()
    names = [config._attn_implementation for config in configs]
    try:
        for config in configs:
            config._attn_implementation = name
        yield
    finally:
        for config, old in zip(configs, names, strict=True):
            config._attn_implementation = old


def layer_kinds(config: Any) -> list[str]:
    """Kind of each layer of a text model, such as ``full_attention`` and ``sliding_attention``."""
    window = getattr(config, "sliding_window", None) if getattr(config, "use_sliding_window", True) else None
    kind = "full_attention" if window is None else "sliding_attention"
    return list(getattr(config, "layer_types", None) or [kind] * config.num_hidden_layers)


@contextmanager
def local_layer_positions(model: Any, ids: Tensor) -> Iterator[None]:
    """Rotate layers with a window or chunks by the positions (1, T), independently of the model's ``position_ids``.

    Raises:
        UserError: If the model has such layers, and not the modules of transformers' models.
    """
    base, local = getattr(model, "model", model.base_model), ("sliding_attention", "chunked_attention")
    layers = {i: kind for i, kind in enumerate(layer_kinds(model.config.get_text_config())) if kind in local}
    if layers and not (hasattr(base, "layers") and hasattr(base, "rotary_emb")):
        given = f"got one for {type(model).__name__}, whose layers with windows cannot keep their positions"
        raise UserError(f"offset: {given}; leave out GapCurve")

    def rotate(kind: str, module: nn.Module, args: tuple[Any, ...], options: dict[str, Any]) -> Any:
        kinds = [kind] if "layer_type" in signature(base.rotary_emb.forward).parameters else []
        x = args[0] if args else options["hidden_states"]
        return args, options | {"position_embeddings": base.rotary_emb(x, ids, *kinds)}

    hooks = [base.layers[i].register_forward_pre_hook(partial(rotate, k), with_kwargs=True) for i, k in layers.items()]
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()


def windowed_attention(
    visibility: Visibility,
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
    """Attention to the keys that ``visibility`` names, with the signature of transformers' functions.

    Raises:
        UserError: If the layer needs an option that this attention does not support.
    """
    unsupported = [name for name in UNSUPPORTED if options.get(name) is not None]
    if unsupported or attention_mask is not None or not getattr(module, "is_causal", True) or dropout:
        needs = ", ".join(unsupported) or "a mask, dropout or attention to the future"
        given = f"got one for {type(module).__name__}, which needs {needs}"
        raise UserError(f"window: {given}, which attention in a window does not support; leave out the window")
    visibility = visibility.narrow(sliding_window)
    size = visibility.window
    assert size is not None
    length, cached = query.shape[2], key.shape[2] - query.shape[2]
    parts = []
    for first in range(0, length, QUERY_ROWS):
        last = min(first + QUERY_ROWS, length)
        begin = 0 if visibility.first else max(0, cached + first - size + 1)
        rows = torch.arange(cached + first, cached + last, device=query.device)[:, None]
        columns = torch.arange(begin, cached + last, device=query.device)
        mask = (columns <= rows) & ((columns > rows - size) | (columns < visibility.first))  # (rows, columns)
        k, v = key[:, :, begin : cached + last], value[:, :, begin : cached + last]
        grouped = query.shape[1] != key.shape[1]
        q = query[:, :, first:last]
        parts.append(F.scaled_dot_product_attention(q, k, v, mask, scale=scaling, enable_gqa=grouped))
    return torch.cat(parts, 2).transpose(1, 2), None  # (B, T, H, δ)

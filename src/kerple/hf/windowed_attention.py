"""Attention to a window of keys in models of the library transformers, by replacing their attention functions."""

import math
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from inspect import signature
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from kerple.attention.spec import AttentionSpec, query_blocks, visible_keys
from kerple.base.errors import UserError
from kerple.base.temporary_value import temporary_value
from kerple.positions.visibility import Visibility

NAME = "kerple_windowed"
QUERY_ROWS = 512  # largest number of queries whose mask is in memory at once
UNSUPPORTED = ("softcap", "s_aux", "position_bias")  # options of attention functions that change scores or softmax


@contextmanager
def limited_attention(model: Any, visibility: Visibility) -> Iterator[None]:
    """Limit the attention of every layer to a window, as a context manager for one forward pass.

    Args:
        model: A `transformers.PreTrainedModel`.
        visibility: The keys that a query sees.

    Raises:
        UserError: At the end of the context, if the attention of a layer cannot be limited, because the layer does not
            use transformers' registry of attention functions, or divides the text into chunks by its mask (Llama 4).
    """
    from transformers import AttentionMaskInterface  # an optional package

    if (strategies := getattr(decoder(model), "kerple", None)) is not None:
        with temporary_value(strategies, "visibility", visibility):  # of `kerple.hf.retrofit`
            yield
        return
    config, calls, failure = model.config.get_text_config(), 0, None

    def attention(*args: Any, **options: Any) -> tuple[Tensor, None]:
        nonlocal calls
        calls += 1
        return windowed_attention(visibility, *args, **options)

    AttentionMaskInterface.register(NAME, layer_window)
    with attention_replaced(model, NAME, attention):
        try:
            yield
        except UserError as error:  # a layer outside the registry may need the mask that is left out
            if calls:
                raise
            failure = error
    layers = config.num_hidden_layers
    limited = calls - layer_kinds(config).count("chunked_attention")
    if limited != layers:
        given = f"got {visibility.window}, but {type(model).__name__} can limit {limited} of {layers} layers"
        raise UserError(f"window: {given} only; leave out measures and protocols with a window") from failure


@contextmanager
def attention_replaced(model: Any, name: str, function: Callable[..., Any] | None = None) -> Iterator[None]:
    """Replace the attention of every layer that uses transformers' registry of attention functions.

    Args:
        model: A `transformers.PreTrainedModel`.
        name: Name of the replacement in the registry.
        function: Function to register under this name, with the signature of transformers' functions. None if the name
            is already registered.
    """
    from transformers import AttentionInterface  # an optional package

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


def decoder(model: Any) -> Any:
    """Return the part of a model of transformers that contains its layers; only that of OPT is not its base model."""
    base = getattr(model, "model", model.base_model)
    return getattr(base, "decoder", base)


def layer_kinds(config: Any) -> list[str]:
    """Return the kind of each layer of a text model, such as ``full_attention`` or ``sliding_attention``."""
    window = getattr(config, "sliding_window", None) if getattr(config, "use_sliding_window", True) else None
    kind = "full_attention" if window is None else "sliding_attention"
    return list(getattr(config, "layer_types", None) or [kind] * config.num_hidden_layers)


@contextmanager
def local_layer_positions(model: Any, ids: Tensor) -> Iterator[None]:
    """Use the positions ``ids`` (1, T) in layers with a window or chunks, in RoPE and in strategies of `retrofit`.

    The other layers use the model's ``position_ids``.

    Raises:
        UserError: If the model has layers with a window or chunks, but not the attributes ``layers`` and
            ``rotary_emb``, through which their positions can be set.
    """
    base, config = decoder(model), model.config.get_text_config()
    window = getattr(config, "sliding_window", None) or 0
    longest = getattr(config, "max_position_embeddings", None) or math.inf
    # the window of Phi-3.5 is longer than its longest input
    local = ["chunked_attention", *(["sliding_attention"] if window < longest else [])]
    layers = {i: kind for i, kind in enumerate(layer_kinds(config)) if kind in local}
    if layers and not (hasattr(base, "layers") and hasattr(base, "rotary_emb")):
        given = f"got {type(model).__name__}, which has local attention and lacks the attribute layers or rotary_emb"
        raise UserError(f"model: {given}, so its positions cannot have a gap; remove GapCurve")

    def rotate(kind: str, module: nn.Module, args: tuple[Any, ...], options: dict[str, Any]) -> Any:
        kinds = [kind] if "layer_type" in signature(base.rotary_emb.forward).parameters else []
        x = args[0] if args else options["hidden_states"]
        return args, options | {"position_embeddings": base.rotary_emb(x, ids, *kinds)}

    with ExitStack() as hooks:
        if layers and (strategies := getattr(base, "kerple", None)):  # of `kerple.hf.retrofit`
            hooks.enter_context(temporary_value(strategies, "window_ids", ids[0]))
        for i, kind in layers.items():
            hooks.enter_context(base.layers[i].register_forward_pre_hook(partial(rotate, kind), with_kwargs=True))
        yield


def layer_window(*_: Any, local_size: int | None = None, **__: Any) -> Tensor | None:
    """Return a layer's own window as a tensor (1, 1, 1, 1) int64, in place of transformers' mask; None without one.

    Some families, such as PhiMoE, do not pass their window to the attention function, but only to the mask.
    """
    return torch.tensor(local_size).view(1, 1, 1, 1) if local_size else None  # Qwen2-MoE without a window has 0


def windowed_attention(
    visibility: Visibility,
    module: nn.Module,
    query: Tensor,  # (B, H, T, δ)
    key: Tensor,  # (B, G, Tk, δ)
    value: Tensor,  # (B, G, Tk, δ)
    attention_mask: Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    sliding_window: int | None = None,
    **options: Any,
) -> tuple[Tensor, None]:
    """Attend to the keys of ``visibility``, with the signature of transformers' attention functions.

    Dimensions are the batch size B, H query heads, G key heads, T queries, Tk keys and the head dimension δ.

    Raises:
        UserError: If the layer needs an option that this attention does not support.
    """
    visibility = visibility.narrow(sliding_window)
    masked = attention_mask is not None
    if attention_mask is not None and attention_mask.dtype == torch.int64:  # of `layer_window`; masks have other dtypes
        visibility, masked = visibility.narrow(int(attention_mask)), False
    unsupported = [name for name in UNSUPPORTED if options.get(name) is not None]
    if unsupported or masked or not getattr(module, "is_causal", True) or dropout:
        needs = ", ".join(unsupported) or "a mask, dropout or attention to later tokens"
        given = f"got {visibility.window}, but {type(module).__name__} needs {needs}"
        reason = "which attention with a window does not support"
        raise UserError(f"window: {given}, {reason}; leave out measures and protocols with a window")
    spec = AttentionSpec(window=visibility.window, first_keys=visibility.first_keys)
    blocks = query_blocks(query.shape[2], key.shape[2], QUERY_ROWS, None if spec.first_keys else spec.window)
    grouped = query.shape[1] != key.shape[1]
    out = []
    for q, (rows, columns) in zip(query.split(QUERY_ROWS, 2), blocks, strict=True):
        seen = visible_keys(rows, columns, spec, q.device)
        k = key[:, :, columns]
        v = value[:, :, columns]
        out.append(F.scaled_dot_product_attention(q, k, v, seen, scale=scaling, enable_gqa=grouped))
    return torch.cat(out, 2).transpose(1, 2), None  # (B, T, H, δ)

"""`LayerStrategies`: strategies of this project in the layers of a model of transformers.

transformers finds the functions that compute attention and masks by the name in ``config._attn_implementation``. The
functions of this module have the name `NAME`. In place of a mask, `make_mask` returns `LayerContexts`, the contribution
of the strategies to this forward pass. Models hand it to each layer as an argument, so that it also reaches layers that
gradient checkpointing runs again.
"""

import threading
from collections.abc import Sequence
from copy import copy
from dataclasses import dataclass, replace
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import AttentionInterface
from transformers.masking_utils import AttentionMaskInterface

from kerple.attention import attend
from kerple.attention.spec import sink_of_queries
from kerple.base.errors import UserError, require
from kerple.hf.modeling import constrain_after_steps
from kerple.hf.token_layout import TokenLayout, read_layout
from kerple.model.self_attention import PositionContext, spec_of
from kerple.positions import NoPE, Position, Shape, TokenPositions
from kerple.positions.visibility import EVERYTHING

NAME = "kerple"
"""Name of the strategies in a base model, and of the functions in the registries of transformers."""


class Running(threading.local):
    """The forward passes of base models that run in this thread, as their strategies and tokens, the innermost last.

    Each thread has its own, because `torch.nn.DataParallel` runs copies of a model in threads.
    """

    def __init__(self) -> None:
        self.passes: list[tuple[LayerStrategies, TokenLayout]] = []


running = Running()


class LayerStrategies(nn.Module):
    """Strategies of the layers of a model.

    Args:
        positions: The strategies: one for all ``layers``, or one for each of them.
        shape: Sizes of the model.
        layers: Indices of the layers with a strategy.
        keep_rope: Whether these layers keep the positional encoding of the model.
    """

    def __init__(self, positions: Sequence[Position], shape: Shape, layers: list[int], keep_rope: bool) -> None:
        super().__init__()
        # other layers have the last strategy, NoPE, in addition to the positional encoding of the model
        self.positions = cast(Sequence[Position], nn.ModuleList([*positions, NoPE(shape)]))
        self.index = {layer: min(i, len(positions) - 1) for i, layer in enumerate(layers)}
        self.layers, self.keep_rope = layers, keep_rope
        self.name = type(positions[0]).__name__
        self.prefix_consistent = all(position.prefix_consistent for position in positions)
        self.window_ids: Tensor | None = None
        """Positions (T,) in layers with a window, see `local_layer_positions`; None for those of the other layers."""
        self.visibility = EVERYTHING
        """Keys that a query sees in every layer; a layer's narrower window takes precedence."""

    def constrain_(self) -> None:
        """Project the parameters of the strategies into their ranges, in place."""
        for position in self.positions:
            position.constrain_()

    def contexts(self, layout: TokenLayout, window: int | None) -> "LayerContexts":
        """Return the contribution of each strategy to the forward pass of tokens, for layers with a window."""
        positions, (batch, new) = layout.positions, layout.ids.shape
        if window and self.window_ids is not None:
            positions = TokenPositions(positions.rows, self.window_ids)
        tokens = positions.rows.expand(batch, -1)  # strategies that need the tokens are not accepted
        visibility, cached = self.visibility.narrow(window), len(positions.rows) - new or None
        contexts = [PositionContext(p, positions, tokens, visibility, cached=cached) for p in self.positions]
        return LayerContexts(self, contexts)


@dataclass(frozen=True)
class LayerContexts:
    """Contribution of the strategies to one forward pass, for layers with the same window.

    Args:
        strategies: The strategies.
        contexts: Their contributions.
        mask: The mask that they replace, or None.
    """

    strategies: LayerStrategies
    contexts: Sequence[PositionContext]
    mask: Tensor | None = None

    def of_layer(self, layer: int, device: torch.device) -> tuple[Position, PositionContext]:
        """Return the strategy of a layer and its contribution, with tensors on the device of the layer."""
        i = self.strategies.index.get(layer, -1)  # the last strategy, for layers without an index
        position, context = self.strategies.positions[i], self.contexts[i]
        return position, context if context.positions.rows.device == device else on_device(context, device)


def on_device(context: PositionContext, device: torch.device) -> PositionContext:
    """Return a context with its tensors on a device."""
    moved, p, spec = copy(context), context.positions, context.spec
    first_key, table, scale = (None if x is None else x.to(device) for x in (p.first_key, spec.table, spec.score_scale))
    moved.positions = replace(p, rows=p.rows.to(device), ids=p.ids.to(device), first_key=first_key)
    moved.queries = moved.positions[-len(context.queries.rows) :]
    moved.spec = replace(spec, table=table, score_scale=scale)
    return moved


def attention(
    module: Any,
    query: Tensor,  # (B, H, Tq, δ)
    key: Tensor,  # (B, G, Tk, δ), or more rows in a static cache
    value: Tensor,  # (B, G, Tk, δ)
    attention_mask: LayerContexts,
    scaling: float | None = None,
    dropout: float = 0.0,
    s_aux: Tensor | None = None,
    **options: Any,
) -> tuple[Tensor, None]:
    """Attention with the strategy of a layer; the signature is that of transformers' attention functions.

    Raises:
        UserError: If the layer needs something that this attention does not support.
    """
    name = type(module).__name__
    expected = "a mask (B, Tk), 0 for padding, in a model that makes its masks by create_causal_mask"
    given = f"{type(attention_mask).__name__} in {name}"
    require(isinstance(attention_mask, LayerContexts), "attention_mask", given, expected)
    for option in ("softcap", "position_bias"):
        require(options.get(option) is None, "model", f"{option} in {name}", "attention scores without it")
    require(getattr(module, "is_causal", True), "model", f"{name}, which attends to later tokens", "causal attention")
    expected = "attention dropout 0; set it when the model is loaded"
    require(not dropout, "model", f"dropout {dropout} in {name}", expected)
    position, context = attention_mask.of_layer(int(module.layer_idx), query.device)
    tables = (context.spec.table, context.spec.score_scale)  # their graph is that of all layers
    reentrant = not torch.is_grad_enabled() and any(table is not None and table.requires_grad for table in tables)
    expected = 'false: gradient_checkpointing_kwargs={"use_reentrant": False}'
    require(not reentrant, "use_reentrant", "true", expected)
    total, new = len(context.positions.rows), query.shape[2]
    v = value[:, :, :total]  # a static cache has rows for later tokens
    q, k = query.to(v.dtype), key[:, :, :total].to(v.dtype)  # under autocast, a rotation returns fp32
    if position.uses("transform_qk"):
        # the cache contains keys that the strategy has not changed, so all keys are changed in every call
        q = F.pad(q, (0, 0, k.shape[2] - new, 0))
        q, k = position.transform_qk(q, k, None, context.positions[-k.shape[2] :])
        q = q[:, :, -new:]
    spec = spec_of(position, context, q, v, None)
    sink = spec.sink
    if s_aux is not None:  # a sink of the model, as in GPT-OSS
        sink = s_aux.float() if sink is None else torch.logaddexp(sink_of_queries(sink), s_aux.float()[:, None])
        sink = sink if sink.ndim == 1 else sink.expand(q.shape[:3])
    out = attend(q, k, v, replace(spec, scale=scaling or spec.scale, sink=sink))
    return out.transpose(1, 2).contiguous(), None  # (B, Tq, H, δ)


@torch.compiler.disable
def make_mask(
    attention_mask: Tensor | None = None, local_size: int | None = None, use_vmap: bool = False, **options: Any
) -> Any:
    """Return `LayerContexts` for layers with the window ``local_size``, in place of a mask.

    Outside of a forward pass, `generate` prepares masks for a static cache, and so do models of images for the language
    model inside of them. The result is then the given mask.

    Raises:
        UserError: If tokens see later tokens, such as those of the same image.
    """
    causal = not use_vmap and "allow_is_bidirectional_skip" not in options
    require(causal, "model", "a mask that shows later tokens", "causal attention, without images")
    if not running.passes:
        return attention_mask
    strategies, layout = running.passes[-1]
    contexts = strategies.contexts(layout, local_size or None)  # Qwen2-MoE without a window has the window 0
    return replace(contexts, mask=attention_mask)


@torch.compiler.disable
def begin_forward(base: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
    """Read the positions of the tokens before a forward pass of a base model; a forward pre-hook.

    Raises:
        UserError: If the attention function of the model was replaced, the strategy supports no cache, or its
            parameters were cast.
    """
    strategies: LayerStrategies = base.kerple
    dtypes = {parameter.dtype for parameter in strategies.parameters()} - {torch.float32, torch.float64}
    given = f"parameters of {strategies.name} in {', '.join(map(str, dtypes))}"
    require(not dtypes, NAME, given, "fp32; with fully_shard, give mp_policy to the layers, not to the model")
    implementation = base.config._attn_implementation
    expected = f"{NAME}, which retrofit has set; load the model again to use another function"
    require(implementation.startswith(NAME), "attn_implementation", implementation, expected)
    require(len(args) <= 1, "inputs", f"{len(args)} without names", "names of all inputs but the first")
    inputs: Any = args[0] if args else kwargs.get("input_ids")
    inputs = kwargs.get("inputs_embeds") if inputs is None else inputs
    require(inputs is not None, "inputs", "neither input_ids nor inputs_embeds", "one of them")
    if isinstance(mask := kwargs.get("attention_mask"), dict):
        # for a static cache, `generate` calls `make_mask` for each kind of layer, which returns the given mask
        mask = kwargs["attention_mask"] = next(iter(mask.values()))
    if isinstance(mask, LayerContexts):  # `generate` was called inside of another forward pass, or Ctrl-C has ended one
        mask = kwargs["attention_mask"] = mask.mask
    cache = _cache(kwargs)
    if not strategies.prefix_consistent:
        given = f"true with {strategies.name}, whose positions depend on the length of the input"
        require(cache is None, "use_cache", given, "false")
        kwargs["use_cache"] = False
    constrain_after_steps(base, NAME)  # in each forward pass, because the model may be a copy
    running.passes.append((strategies, read_layout(inputs, mask, kwargs.get("position_ids"), cache)))
    return args, kwargs


@torch.compiler.disable
def end_forward(base: Any, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
    """Store the positions of the tokens in the cache after a forward pass of a base model; a forward hook."""
    if not running.passes or running.passes[-1][0] is not base.kerple:
        return  # `begin_forward` has raised an error
    _, layout = running.passes.pop()
    if output is not None and (cache := _cache(kwargs) or getattr(output, "cache", None)) is not None:
        layout.store(cache)


def _cache(kwargs: dict[str, Any]) -> Any:
    return kwargs["cache"] if kwargs.get("cache") is not None else kwargs.get("past_key_values")


def without_rotation(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
    """Replace the rotation of queries and keys by the identity; a forward pre-hook of an attention module.

    Positions become 0, because Ministral 3 also multiplies queries by a factor that grows with the position.
    """
    rotation = kwargs.get("position_embeddings")
    if not isinstance(rotation, tuple) or len(rotation) != 2:
        given = f"{type(module).__name__}, which receives no cosines and sines in position_embeddings"
        raise UserError(f"model: got {given}; use keep_rope=True")
    cos, sin = rotation
    changes: dict[str, Any] = {"position_embeddings": (torch.ones_like(cos), torch.zeros_like(sin))}
    if (ids := kwargs.get("position_ids")) is not None:
        changes["position_ids"] = torch.zeros_like(ids)
    return args, kwargs | changes


# here, so that a model that `torch.load` reads finds its functions
AttentionInterface.register(NAME, attention)
AttentionMaskInterface.register(NAME, make_mask)

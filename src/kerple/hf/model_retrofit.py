"""`retrofit`: replace the positional encoding of a model of transformers by a strategy of this project."""

import inspect
from collections.abc import Callable, Iterable
from contextlib import ExitStack
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle
from transformers import PreTrainedModel
from transformers.masking_utils import AttentionMaskInterface
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING

from kerple.base.errors import UserError, describe, require, unknown
from kerple.base.temporary_value import temporary_value
from kerple.hf.foreign_errors import foreign_errors
from kerple.hf.layer_strategies import (
    NAME,
    LayerStrategies,
    attention,
    begin_forward,
    end_forward,
    make_mask,
    without_rotation,
)
from kerple.hf.position_limit import config_length, learned_positions, takes_positions
from kerple.hf.retrofit_config import describe_strategy, saved_as_retrofit
from kerple.hf.rope import require_own_rope
from kerple.hf.windowed_attention import attention_replaced, decoder, layer_kinds
from kerple.model.transformer import layer_strategies
from kerple.positions import Position, Shape, StrategyBuilder, strategies

TRIAL = f"{NAME}_trial"  # name of the attention function of the trial in `connect`
TOKENS = 3  # number of tokens of the trial
KINDS = ("full_attention", "sliding_attention")
"""Kinds of layers that can have a strategy."""
INPUTS = {"embed": "embeddings", "token_state": "hidden states", "transform_output": "hidden states"}
"""Inputs that some hooks of strategies need, and that attention functions of transformers do not receive."""


def retrofit(
    model: Any,
    strategy: str | StrategyBuilder,
    keep_rope: bool = False,
    layers: str | int | Iterable[str | int] | None = None,
    **options: Any,
) -> Any:
    """Replace the positional encoding of a model by a strategy, in place, and return the model.

    The strategy becomes the submodule ``kerple`` of the base model. Its parameters are trained, moved, counted and
    saved with the model, and stay fp32. After each step of an optimiser that holds parameters of the model, they are
    clamped to their ranges.

    Tokens of a document see no other document. A token whose position is not larger than the position before it begins
    a document. Positions with gaps make attention slower, because a bias is then computed for each pair of tokens.

    Args:
        model: A `transformers.PreTrainedModel` that reads only text, with the head of a causal language model or
            without a head. Its attention is causal and uses transformers' registry of attention functions.
        strategy: A class of `kerple.positions`, its name, or a function that builds a strategy from a
            `kerple.positions.Shape`. The strategy may need queries, keys and positions, but neither hidden states nor
            embeddings.
        keep_rope: Whether the layers with the strategy keep the positional encoding of the model too. If false, their
            queries and keys are not rotated, and learned positions are set to 0 and not trained.
        layers: Indices or kinds, such as ``full_attention``, of the layers with the strategy; None for all layers with
            attention. Other layers keep the positional encoding of the model.
        **options: Options of the strategy.

    Raises:
        UserError: If the model, the strategy, a layer or an option is not supported. The model is then unchanged.
    """
    expected = "a PreTrainedModel of transformers"
    require(isinstance(model, PreTrainedModel), "model", f"a {type(model).__name__}", expected)
    given = f"{type(model).__name__}, which has an encoder"
    require(not getattr(model.config, "is_encoder_decoder", False), "model", given, "a causal language model")
    given = f"{type(model).__name__}, which reads more than text"
    text_only = model.config.get_text_config() is model.config
    expected = "a model of text, such as the language model inside of it, which then reads only text"
    require(text_only, "model", given, expected)
    kind: Any = MODEL_FOR_CAUSAL_LM_MAPPING.get(type(model.config), PreTrainedModel)
    valid = isinstance(model, kind) or model.base_model is model  # the language model inside of another model
    require(valid, "model", type(model).__name__, f"{kind.__name__}, the class that from_pretrained reads")
    base = decoder(model)
    given = f"{type(model).__name__}, which already has the strategy {getattr(getattr(base, NAME, None), 'name', '')}"
    require(not hasattr(base, NAME), "model", given, "a model without a strategy; load it again")
    entry = {"strategy": describe_strategy(strategy, options), "keep_rope": keep_rope}
    entry["layers"] = list_layers(model.config.get_text_config(), layers)
    add_strategies(model, entry, strategy, options)
    try:
        connect(model)
    except BaseException:
        del base.kerple
        raise
    saved_as_retrofit(model.config, entry)
    return model


def add_strategies(model: Any, entry: dict[str, Any], strategy: str | StrategyBuilder, options: dict[str, Any]) -> None:
    """Add the strategies to a model, without using them in its forward pass.

    Args:
        model: The model.
        entry: ``keep_rope`` and ``layers`` of `retrofit`, and the result of `describe_strategy`. It becomes the entry
            ``kerple_retrofit`` of the configuration.
        strategy: See `retrofit`.
        options: Options of the strategy.

    Raises:
        UserError: If the model or the strategy is not supported.
    """
    base = decoder(model)
    config, name = model.config.get_text_config(), type(model).__name__
    layer_configs = list(getattr(config, "per_layer_config", None) or [config])  # the sizes of layers may differ
    sizes = [(c.num_attention_heads, getattr(c, "head_dim", None)) for c in layer_configs]
    given = f"{name} with heads of different sizes or numbers"
    require(all(size == sizes[0] for size in sizes), "model", given, "the same heads in all layers")
    (heads, head_dim), length = sizes[0], config_length(config)
    require(type(heads) is int, "model", f"{name} with {heads} attention heads", "the same number in all layers")
    latent = getattr(config, "kv_lora_rank", None)
    require(not latent, "model", f"{name}, which has multi-head latent attention", "keys that are not compressed")
    expected = "the training length; set max_position_embeddings in its configuration"
    require(length is not None, "model", f"{name} without a length", expected)
    head_dim = head_dim or config.hidden_size // heads
    shape = Shape(heads * head_dim, heads, length or 0, layers=config.num_hidden_layers, head_width=head_dim)
    positions = layer_strategies(_builder(strategy, options), shape, None)
    layers = entry["layers"]
    for hook, needs in INPUTS.items():
        given = f"{type(positions[0]).__name__}, which needs {needs}"
        expected = "a strategy of queries, keys and positions, which attention functions of transformers receive"
        require(not any(position.uses(hook) for position in positions), "strategy", given, expected)
    for i in layers:
        require_own_rope(config, i, positions[i if len(positions) > 1 else 0], shape)
    positions = positions if len(positions) == 1 else [positions[i] for i in layers]
    base.kerple = LayerStrategies(positions, shape, layers, entry["keep_rope"]).to(input_device(model))


def input_device(model: Any) -> torch.device:
    """Return the device of a model's embeddings. If they are offloaded, this is the device that they are moved to."""
    device: torch.device = model.get_input_embeddings().weight.device
    hook = getattr(model, "_hf_hook", None)  # of accelerate
    return torch.device(hook.execution_device) if hook and device.type == "meta" else device


def connect(model: Any) -> None:
    """Use the strategies that `add_strategies` has added in the forward pass of a model, after a trial on three tokens.

    Raises:
        UserError: If a layer does not use the registry of attention functions, or needs something that the attention
            of this project does not support, or if positions cannot be left out. The forward pass is then unchanged.
    """
    base = decoder(model)
    config, name = model.config.get_text_config(), type(model).__name__
    layers, keep_rope = base.kerple.layers, base.kerple.keep_rope
    AttentionMaskInterface.register(TRIAL, make_mask)
    with ExitStack() as hooks:  # an error removes them
        hooks.enter_context(base.register_forward_pre_hook(begin_forward, with_kwargs=True))
        hooks.enter_context(base.register_forward_hook(end_forward, with_kwargs=True, always_call=True))
        for hook in [] if keep_rope else _leave_out_positions(model):
            hooks.enter_context(hook)
        called, _ = _trial(model)
        needed = [i for i, kind in enumerate(layer_kinds(config)) if i in layers or kind in KINDS]
        missing = [i for i in needed if i not in called]
        given = f"{name}, whose attention in layer {missing[:1]} is not in transformers' registry"
        require(not missing, "model", given, "a model that uses the registry in all layers with attention")
        if not keep_rope and takes_positions(model) and {*needed} == {*layers}:
            _require_no_positions(model)
        hooks.pop_all()  # the hooks stay
    model._keep_in_fp32_modules_strict = {*(model._keep_in_fp32_modules_strict or ()), NAME}
    if not keep_rope and (table := learned_positions(model)) is not None:
        table.weight.requires_grad_(False)
    for part in {id(m.config): m.config for m in model.modules() if hasattr(m, "config")}.values():
        part._attn_implementation = NAME
    model.config.use_cache = bool(getattr(config, "use_cache", True)) and base.kerple.prefix_consistent
    if (generation := getattr(model, "generation_config", None)) is not None:
        generation.disable_compile = True  # a static cache would compile each step, and the hooks read tensors
        generation.use_cache = model.config.use_cache


def _leave_out_positions(model: Any) -> list[RemovableHandle]:
    """Leave out the rotations of the layers with a strategy, and learned positions; return the hooks that do so."""
    base = decoder(model)
    config, name = model.config.get_text_config(), type(model).__name__
    layers, table = base.kerple.layers, learned_positions(model)
    attentions = [m for m in base.modules() if getattr(m, "layer_idx", None) in layers]
    attentions = [m for m in attentions if "position_embeddings" in inspect.signature(m.forward).parameters]
    missing = {*layers} - {m.layer_idx for m in attentions} if getattr(config, "rope_parameters", None) else set()
    given = f"{name}, whose RoPE cannot be left out of layer {sorted(missing)[:1]}"
    require(not missing, "model", given, "a model that hands rotations to its layers; or use keep_rope=True")
    given = f"{len(layers)} of {config.num_hidden_layers} for {name}, which has learned positions"
    valid = table is None or len(layers) == config.num_hidden_layers
    require(valid, "layers", given, "all layers; or use keep_rope=True")
    hooks = [m.register_forward_pre_hook(without_rotation, with_kwargs=True) for m in attentions]
    if table is not None:
        hooks += [table.register_forward_pre_hook(_first_row, with_kwargs=True), table.register_forward_hook(_zeros)]
    return hooks


def _first_row(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
    """Replace the positions that a table gets by 0, because a strategy may read more tokens than the table has rows."""
    if (ids := kwargs.get("position_ids")) is not None:  # OPT, whose first argument is a mask
        return args, kwargs | {"position_ids": torch.zeros_like(ids)}
    return (torch.zeros_like(args[0]), *args[1:]), kwargs


def _zeros(module: nn.Module, args: tuple[Any, ...], output: Tensor) -> Tensor:
    return torch.zeros_like(output)


def _require_no_positions(model: Any) -> None:
    """Check that with NoPE in all layers, the model's outputs do not depend on positions.

    Raises:
        UserError: If they do, because the model has positions that `_leave_out_positions` does not know.
    """
    strategies, name = decoder(model).kerple, type(model).__name__
    longest = ((config_length(model.config) or 0) - 1) // (TOKENS - 1)  # step to the last position
    with temporary_value(strategies, "positions", strategies.positions[-1:]), temporary_value(strategies, "index", {}):
        first, other = (_trial(model, step)[1] for step in (1, max(1, longest)))
    difference = float((first - other).abs().max() / first.abs().max())
    given = f"{name}, whose positions are neither RoPE nor a table of weights"
    require(not difference > 0.01, "model", given, "a model whose positions can be left out; or use keep_rope=True")


@torch.no_grad()
def _trial(model: Any, step: int | None = None) -> tuple[set[int], Tensor]:
    """Run a forward pass in evaluation mode on three tokens.

    Args:
        model: The model.
        step: Difference of the positions of neighbours; None to give the model no positions.

    Returns:
        The layers whose attention calls `attention`, and the logits.
    """
    called = set[int]()
    modes = {module: module.training for module in model.modules()}

    def record(module: Any, *args: Any, **options: Any) -> tuple[Tensor, None]:
        called.add(module.layer_idx)
        return attention(module, *args, **options)

    rows = torch.arange(TOKENS, device=input_device(model))[None]
    tokens = rows % len(model.get_input_embeddings().weight)
    ids = {} if step is None else {"position_ids": rows * step}
    failure = f"model: {type(model).__name__} cannot run with a strategy"
    advice = "expected a model whose attention uses the registry of transformers (AttentionInterface)"
    try:
        with attention_replaced(model, TRIAL, record), foreign_errors(failure, advice):
            logits = model.eval()(input_ids=tokens, use_cache=False, **ids)[0].float()
    finally:
        for module, training in modes.items():
            module.training = training
    return called, logits


def list_layers(config: Any, layers: str | int | Iterable[str | int] | None) -> list[int]:
    """Return the indices of the layers that the option ``layers`` of `retrofit` selects.

    Raises:
        UserError: If an index or a kind does not exist, or there are no layers.
    """
    kinds = layer_kinds(config)
    chunked = [i for i, kind in enumerate(kinds) if kind == "chunked_attention"]
    require(not chunked, "model", f"attention in chunks in layer {chunked[:1]}", "attention with windows or without")
    selected = KINDS if layers is None else (layers,) if isinstance(layers, str | int) else tuple(layers)
    for choice in selected if layers is not None else ():
        expected = f"0 to {len(kinds) - 1} or {' or '.join(dict.fromkeys(kinds))}"
        valid = choice in kinds or (choice in range(len(kinds)) and not isinstance(choice, bool))
        require(valid, "layers", repr(choice), expected)
    indices = [i for i, kind in enumerate(kinds) if i in selected or kind in selected]
    require(bool(indices), "layers", f"{layers}", "at least one layer with attention")
    return indices


def _builder(strategy: str | StrategyBuilder, options: dict[str, Any]) -> StrategyBuilder:
    """Return the function that builds the strategy from a shape.

    Raises:
        UserError: If the strategy or an option does not exist. In a call, if the strategy cannot be built.
    """
    if isinstance(strategy, str):
        if strategy not in strategies():
            raise unknown("strategy", strategy, strategies())
        strategy = strategies()[strategy]
    expected = "a class of kerple.positions, its name, or a function of a Shape"
    valid = callable(strategy) and not isinstance(strategy, nn.Module)
    require(valid, "strategy", f"a {type(strategy).__name__}", expected)
    make: Callable[..., Any] = strategy
    accepted = list(inspect.signature(make).parameters.values())[1:]
    if not any(parameter.kind is parameter.VAR_KEYWORD for parameter in accepted):
        for option in options:
            names = [parameter.name for parameter in accepted]
            require(option in names, "options", option, f"one of {', '.join(names) or 'none'}")

    def build(shape: Shape) -> Position:
        try:
            position = make(shape, **options)
        except TypeError as error:
            raise UserError(f"strategy: cannot be built ({describe(error)}); check its options {options}") from error
        require(isinstance(position, Position), "strategy", f"a function that returns {position}", expected)
        return position

    return build

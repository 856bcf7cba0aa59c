"""Translation of a model of transformers to the options and weights of our own `Transformer`."""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from kerple.base.errors import UserError
from kerple.hf.rope import layer_rope, read_rope
from kerple.hf.translation_tables import FAMILIES, GEMMA3, Family
from kerple.hf.windowed_attention import layer_kinds
from kerple.model.stored_model import StoredModel, Weights, strategies_without_values

TANH = ("gelu_new", "gelu_fast", "gelu_pytorch_tanh")  # names of the same approximation of gelu
ACTIVATION_NAMES = {"gelu": "gelu", "relu": "relu", "silu": "silu", "swish": "silu"} | dict.fromkeys(TANH, "gelu_tanh")


def read_family(config: Any, state: Mapping[str, Tensor]) -> StoredModel:
    """Translate a model of transformers to options and weights of our own `Transformer`.

    Args:
        config: The `PreTrainedConfig` of a model of one of `FAMILIES`, or of a model that this project has exported.
        state: The model's state_dict.

    Raises:
        UserError: If the model is of another family, or has an option that our `Transformer` lacks.
    """
    if config.model_type == "kerple_retrofit":
        config = config.get_text_config()
    model = read_options(config)
    if config.model_type == "kerple":
        weights = {name.removeprefix("network."): value for name, value in state.items()}
    else:
        weights = _read_weights(FAMILIES[config.model_type], config, state)
    rows = weights["embedding.weight"]
    # transformers leaves an output head that differs from the embedding untied, whatever the configuration says
    model["tied"] = bool(config.tie_word_embeddings) and torch.equal(weights.get("head.weight", rows), rows)
    if model["tied"]:
        weights["head.weight"] = rows
    return StoredModel(model, weights)


def read_options(config: Any) -> dict[str, Any]:
    """Translate the configuration of a model to options of our `Transformer`.

    Raises:
        UserError: If the model is not of one of `FAMILIES`, or has an option that our `Transformer` lacks.
    """
    if config.model_type == "kerple_retrofit":
        config = config.get_text_config()
    if config.model_type == "kerple":  # exported by this project
        own = config.network["position"]  # may be a class path if the strategy has no options
        return {**config.network, "position": {"class_path": own} if isinstance(own, str) else own}
    if (family := FAMILIES.get(config.model_type)) is None:
        raise _unsupported(f"of the family {config.model_type}", f"one of {', '.join(FAMILIES)}")
    for name, value in family.expected.items():
        if getattr(config, name, value) != value:
            raise _unsupported(f"with {name} {getattr(config, name)}", str(value))
    dim, heads = config.hidden_size, config.num_attention_heads
    head_dim = _first(config, "head_dim", default=dim // heads)
    activations = ("hidden_act", "hidden_activation", "activation_function")
    activation = _first(config, *activations, default="gelu_new")  # BLOOM's configuration has none
    if activation not in ACTIVATION_NAMES:
        raise _unsupported(f"with the activation {activation}", f"one of {', '.join(ACTIVATION_NAMES)}")
    length = _first(config, "max_position_embeddings", "seq_length", default=2048)  # BLOOM was trained at 2048
    position: dict[str, Any] = {"class_path": f"kerple.positions.{family.position}"}
    retrofit = getattr(config, "kerple_retrofit", None)
    if family.position == "RoPE":
        position = _rope_strategy(family, config, length)
    elif retrofit:
        if retrofit["keep_rope"]:
            raise _unsupported("with keep_rope and without RoPE", "the strategy in place of its positional encoding")
        position = retrofit["strategy"]
    return {
        "layers": config.num_hidden_layers,
        "dim": dim,
        "heads": heads,
        "head_dim": None if head_dim == dim // heads else head_dim,
        "kv_heads": _first(config, "num_key_value_heads", default=heads),
        "hidden": _first(config, "intermediate_size", "n_inner", default=4 * dim),
        "bias": True,
        "eps": _first(config, "rms_norm_eps", "layer_norm_eps", "layer_norm_epsilon"),
        "activation": ACTIVATION_NAMES[activation],
        "embedding_scale": dim**0.5 if family is GEMMA3 else 1.0,
        "logit_cap": getattr(config, "final_logit_softcapping", None),
        "parallel": config.model_type == "gpt_neox" and config.use_parallel_residual,
        "tied": config.tie_word_embeddings,
        "position": position,
        "length": length,
        "vocabulary": config.vocab_size,
        **family.options,
    }


def _rope_strategy(family: Family, config: Any, length: int) -> dict[str, Any]:
    """Return the strategy of a model with RoPE, as ``class_path`` and ``init_args``.

    Args:
        family: The family.
        config: The model's configuration.
        length: Largest number of positions in the configuration.

    Raises:
        UserError: If no options of `kerple.positions.RoPE` give the model's RoPE.
    """
    layers = config.num_hidden_layers
    kinds: dict[str, Any] = {}
    windows: dict[str, int] = {}
    pattern = []
    retrofit = getattr(config, "kerple_retrofit", None) or {"layers": []}
    for i, layer_type in enumerate(layer_kinds(config)):
        window = config.sliding_window if layer_type == "sliding_attention" else None
        retrofitted = i in retrofit["layers"]
        rope = layer_rope(config, i, layer_type)
        kind = ("local" if window else "global") + ("" if rope else "_nope") + ("_retrofit" if retrofitted else "")
        pattern.append(kind)
        windows |= {kind: window} if window else {}
        own: dict[str, Any] = {"class_path": "kerple.positions.NoPE"}
        if rope:
            options = read_rope(rope, family.partial_rotary, length)
            if options is None:
                raise _unsupported(f"with RoPE of type {rope['rope_type']}", "a type that RoPE of this project has")
            own = {"class_path": "kerple.positions.RoPE", "init_args": options | {"layout": family.layout}}
        both = {"class_path": "kerple.positions.Combined", "init_args": {"parts": [own, retrofit.get("strategy")]}}
        kinds[kind] = own if not retrofitted else both if rope else retrofit["strategy"]
    if len(kinds) == 1 and not windows:
        return kinds[pattern[0]]
    period = next(n for n in range(1, layers + 1) if pattern == (pattern[:n] * layers)[:layers])
    options = {"kinds": kinds, "pattern": pattern[:period], "windows": windows}
    return {"class_path": "kerple.positions.LayerPattern", "init_args": options}


def _read_weights(family: Family, config: Any, state: Mapping[str, Tensor]) -> Weights:
    """Return a model's weights by their names in our `Transformer`. Parameters that the model lacks are left out."""
    weights: Weights = {}
    heads = config.num_attention_heads
    scalar = getattr(config, "query_pre_attn_scalar", None)
    for ours, theirs in parameters(family, config.num_hidden_layers):
        parts = [part for name in theirs if (part := _part(state, name)) is not None]
        if not parts:
            continue
        weight = parts[0] if len(parts) == 1 else torch.cat(parts)
        if family.norm_plus_one and "norm." in ours:
            weight = weight.float() + 1
        if ".q_norm." in ours and scalar:
            # the model divides scores by √scalar, and our Transformer by √δ, where δ is the head dimension
            weight = weight * (config.head_dim / scalar) ** 0.5
        if ours == "norm.weight" and hasattr(config, "logit_scale"):
            weight = weight * config.logit_scale
        if family.transposed and ours.startswith("blocks") and weight.ndim == 2:
            weight = weight.T.contiguous()
        if family.fused == "heads" and ".qkv." in ours:
            weight = weight.unflatten(0, (heads, 3, -1)).transpose(0, 1).flatten(0, 2)  # (H, 3, δ, …) to (3, H, δ, …)
        weights[ours] = weight
    if getattr(config, "kerple_retrofit", None):
        return weights | _retrofitted_weights(config, state)
    if family.position == "Learned":
        weights["positions.0.table"] = state["transformer.wpe.weight"]
    return weights


def _retrofitted_weights(config: Any, state: Mapping[str, Tensor]) -> Weights:
    """Return the weights of the strategy of a model that `kerple.hf.retrofit` has changed, by their names in ours."""
    options, retrofit, kinds = read_options(config), config.kerple_retrofit, layer_kinds(config)
    strategy = options["position"]
    # each layer of a LayerPattern has its own instance, but layers may share a strategy after `retrofit`
    in_pattern = strategy != retrofit["strategy"] and "LayerPattern" in strategy["class_path"]
    shared = in_pattern and len(strategies_without_values(options | {"position": retrofit["strategy"]})) == 1
    weights: Weights = {}
    for name, value in state.items():
        if ".kerple.positions." in name:
            index, _, rest = name.partition(".kerple.positions.")[2].partition(".")
            for i in retrofit["layers"] if shared or not in_pattern else [retrofit["layers"][int(index)]]:
                # a layer without RoPE has the strategy alone, also with keep_rope
                part = f"parts.1.{rest}" if layer_rope(config, i, kinds[i]) else rest
                weights[f"positions.{i}.position.{part}" if in_pattern else f"positions.{index}.{part}"] = value
    return weights


def parameters(family: Family, layers: int) -> list[tuple[str, list[str]]]:
    """Return the names of all parameters that a model of a family may have.

    Each entry is the name in our `Transformer` and the names in transformers, see `Family.layer_modules`.
    """
    modules = {ours: [theirs] for ours, theirs in family.modules.items()}
    for i in range(layers):
        for ours, theirs in family.layer_modules.items():
            modules[f"blocks.{i}.{ours}"] = [f"{family.layers}.{i}.{name}" for name in theirs.split()]
    return [
        (f"{ours}.{kind}", [f"{name}.{kind}" for name in theirs])
        for ours, theirs in modules.items()
        for kind in ("weight", "bias")
    ]


def _part(state: Mapping[str, Tensor], name: str) -> Tensor | None:
    """Return a tensor of a state_dict, or half of its rows for a name such as ``module[0].weight``; None if missing."""
    module, bracket, rest = name.partition("[")
    if not bracket:
        return state.get(name)
    whole = state.get(module + rest[2:])
    return None if whole is None else whole.chunk(2)[int(rest[0])]


def _unsupported(given: str, expected: str) -> UserError:
    """Return the error about a family or an option that our `Transformer` lacks."""
    message = f"model: got a model {given}, but this project's network needs {expected}"
    return UserError(f"{message}; test the model by `test --hf` without model.position")


def _first(config: Any, *names: str, default: Any = None) -> Any:
    """Return the first of these entries of a configuration that is not None, or the default."""
    return next((value for name in names if (value := getattr(config, name, None)) is not None), default)

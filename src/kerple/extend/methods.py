"""`Method`: a context extension without training; `methods` lists those that apply to a model."""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from kerple.base.errors import UserError
from kerple.hf.rope import STRATEGIES, scaled
from kerple.hf.translation_from_transformers import read_options
from kerple.model.first_token_scores import check_distances
from kerple.model.stored_model import class_name, strategies_without_values
from kerple.positions.rotary_scaling import AnyScaling
from kerple.positions.visibility import EVERYTHING, Distances, Visibility

FIRST = 4  # first tokens that a window keeps (StreamingLLM, Xiao et al. 2024)


@dataclass(frozen=True)
class Method:
    """A way to read N tokens with a model that was trained at L < N tokens.

    Args:
        label: Name of the method in the report. `Visibility` explains the words ``distances capped`` and ``cache``.
        scaling: Scaling of RoPE, see `kerple.hf.rope.scaled`; None for the model's own.
        factor: Scaling factor; None without a scaling.
        rope_options: Further entries of ``rope_parameters``, such as ``beta_fast``.
        position: Positional strategy that replaces the model's own, as ``class_path`` and ``init_args``, or None.
        visibility: The keys that a query sees.
        as_trained: Whether the logits of inputs of up to L tokens are those of the unchanged model.
    """

    label: str
    scaling: AnyScaling | None = None
    factor: float | None = None
    rope_options: Mapping[str, float] = field(default_factory=dict)
    position: Mapping[str, Any] | None = None
    visibility: Visibility = EVERYTHING
    as_trained: bool = False


def methods(config: Any, length: int, target: int) -> tuple[list[Method], dict[str, str]]:
    """List the methods that apply to a model, each with a few settings.

    Args:
        config: The model's `transformers.PreTrainedConfig`.
        length: Training length L in tokens.
        target: Length N > L in tokens that the methods have to read.

    Returns:
        The methods, the first of which leaves the model unchanged, and the reasons why others do not apply, by name.

    Raises:
        UserError: If no method applies.
    """
    s = target / length  # scaling factor that extends L to N
    rope = partial(_rope_method, config, length)
    temperature = partial(_temperature_method, config, length)
    faster = {"beta_fast": 4.0, "attention_factor": 1.0}
    builders: dict[str, list[Callable[[], Method]]] = {
        "PI": [partial(rope, "pi", s)],
        "NTK": [partial(rope, "ntk", s), partial(rope, "ntk", 2 * s)],
        "dynamic NTK": [partial(rope, "dynamic_ntk", 1.0), partial(rope, "dynamic_ntk", s)],
        "YaRN": [partial(rope, "yarn", s), partial(rope, "yarn", 2 * s), partial(rope, "yarn", s, **faster)],
        "Self-Extend": [partial(_self_extend_method, config, length, target, length // n) for n in (4, 2)],
        "temperature": [
            *(partial(temperature, "llama4", scale) for scale in (0.1, 0.3)),
            # 1 + a·log(n / L) is log n / log L for a = 1 / log L
            *(partial(temperature, "inkling", scale) for scale in (1 / math.log(length), 0.3)),
        ],
        "window": [partial(_window_method, config, length, distances) for distances in ("capped", "cache")],
    }
    applicable = [Method("unchanged", as_trained=True)]
    reasons = {}
    for name, of_name in builders.items():
        try:
            applicable += [build() for build in of_name]
        except UserError as error:
            reasons[name] = str(error).removeprefix("model: ")
    if not applicable[1:]:
        listed = ", ".join(f"{name} ({reason})" for name, reason in reasons.items())
        raise UserError(f"model: got one to which no extension applies; use another model. Reasons by method: {listed}")
    # at a training length of about 28 tokens, two temperatures have the same scale in their labels
    return list({method.label: method for method in applicable}.values()), reasons


def _rope_method(config: Any, length: int, scaling: AnyScaling, factor: float, **options: float) -> Method:
    """Return the method that scales RoPE.

    Raises:
        UserError: If the model has no RoPE, or RoPE that cannot be scaled so.
    """
    if config.model_type == "kerple":
        name = class_name(read_options(config)["position"])
        raise UserError(f"model: got an export of {name}; expected rope_parameters, which exports as a Llama have")
    scaled(config, scaling, factor, length, options)
    unscaled = config.rope_parameters.get("rope_type", "default") == "default"
    label = ", ".join([f"{STRATEGIES[scaling]} ×{factor:g}", *(f"{name} {v:g}" for name, v in options.items())])
    return Method(label, scaling, factor, options, as_trained=scaling == "dynamic_ntk" and unscaled)


def _self_extend_method(config: Any, length: int, target: int, neighbors: int) -> Method:
    """Return Self-Extend with exact distances for ``neighbors`` near keys. See `_checked` for errors."""
    model = read_options(config)
    # the smallest size for which distances stay below ``length``; if it does not divide the window, they reach it
    group = math.ceil((target - neighbors) / (length - neighbors))
    options = {"position": model["position"], "neighbor_window": neighbors, "group": group}
    position = {"class_path": "kerple.positions.SelfExtend", "init_args": options}
    return _checked(Method(f"Self-Extend, window {neighbors}, groups of {group}", position=position), model, length)


def _temperature_method(config: Any, length: int, rule: str, scale: float) -> Method:
    """Return a `Temperature` with this rule and scale in the layers without positions.

    Raises:
        UserError: If all layers have positions. See `_checked` for other errors.
    """
    model = read_options(config)
    options = {"rule": rule, "scale": scale, "length": length}
    temperature = {"class_path": "kerple.positions.Temperature", "init_args": options}
    position = _with_temperature(model["position"], temperature)
    as_trained = rule == "inkling"  # the factor of Llama 4 changes at the training length
    label = f"temperature {rule}, scale {scale:.2g}"
    return _checked(Method(label, position=position, as_trained=as_trained), model, length)


def _window_method(config: Any, length: int, distances: Distances) -> Method:
    """Return a window of ``length`` keys that keeps the first tokens. See `_checked` for errors."""
    model, visibility = read_options(config), Visibility(length, FIRST, distances)
    label = f"window with first {FIRST} tokens, distances {distances}"
    method = Method(label, position=model["position"], visibility=visibility, as_trained=True)
    return _checked(method, model, length)


def _checked(method: Method, model: Mapping[str, Any], length: int) -> Method:
    """Return a method for which a model is translated to this project's `Transformer`, after checking it.

    Args:
        method: The method, with a position.
        model: Options of the model, see `kerple.hf.translation_from_transformers.read_options`.
        length: Training length in tokens.

    Raises:
        UserError: If the model cannot be translated, or its strategy does not support the method.
    """
    strategies = strategies_without_values({**model, "length": length, "position": method.position})
    check_distances(strategies[0], method.visibility)
    return method


def _with_temperature(position: Mapping[str, Any], temperature: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return a strategy with a temperature in the layers without positions.

    Raises:
        UserError: If all layers have positions.
    """
    if class_name(position) == "NoPE":
        return temperature
    options = position.get("init_args") or {}
    kinds = options.get("kinds") or {}
    changed = {name: temperature if class_name(kind) == "NoPE" else kind for name, kind in kinds.items()}
    if changed == kinds:
        raise UserError("model: all layers have positions; a temperature needs layers without positions")
    return {**position, "init_args": options | {"kinds": changed}}

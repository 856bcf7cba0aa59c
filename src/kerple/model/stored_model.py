"""`StoredModel`, the options and weights of a stored model, and functions that make a `Transformer` of it."""

from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, fields, replace
from itertools import accumulate, product
from typing import Any

import torch
from jsonargparse import ArgumentParser
from torch import Tensor, nn

from kerple import positions
from kerple.base.errors import UserError, require
from kerple.config.options import subclasses
from kerple.config.untrusted_checkpoints import Classes, load, not_a_checkpoint
from kerple.model.architecture import Architecture
from kerple.model.transformer import Transformer, layer_strategies
from kerple.positions import Position, Shape, StrategyBuilder
from kerple.positions.wrapper import Resampled, Wrapper, rotate_alike

Weights = dict[str, Tensor]
VOCABULARY_ROWS = ("embedding.weight", "head.weight")
NETWORK_OPTIONS = ("position", "layers", "dim", "heads", *(field.name for field in fields(Architecture)))


@dataclass(frozen=True)
class StoredModel:
    """Options and weights of a stored model, with the names that they have in this project.

    Args:
        model: Options of `kerple.training.language_model.LanguageModel`: sizes, architecture and position. ``length``
            is the training length, and ``vocabulary`` the number of rows of the embedding.
        weights: Weights by their names in `Transformer`, including those of the positional strategy.
    """

    model: dict[str, Any]
    weights: Weights


def read_checkpoint(path: str, classes: Classes) -> StoredModel:
    """Read the options and weights from a checkpoint of `fit`.

    Args:
        path: Path of the checkpoint.
        classes: Classes that its configuration may name.

    Raises:
        UserError: If the checkpoint contains no model.
    """
    model, content = classes.config(path)["model"], load(path)
    try:
        weights = {n.removeprefix("network."): w for n, w in content["state_dict"].items() if n.startswith("network.")}
        if invalid := [name for name, value in weights.items() if not isinstance(value, Tensor)]:
            raise TypeError(f"{invalid[0]} is not a tensor")
        length, rows = int(content["hyper_parameters"]["length"]), len(weights["embedding.weight"])
    except (LookupError, TypeError, ValueError, AttributeError, OverflowError) as error:
        raise not_a_checkpoint(path, error) from error
    options = {key: value for key, value in model.items() if key in NETWORK_OPTIONS}  # without those of training
    return StoredModel({**options, "length": length, "vocabulary": rows}, weights)


def build_transformer(
    model: Mapping[str, Any], position: StrategyBuilder | None = None, remote: Iterable[type[Position]] = ()
) -> Transformer:
    """Build a network from the options of `StoredModel.model`, optionally with another strategy.

    Args:
        model: The options.
        position: Function that builds another strategy from the shape; None for the strategy in ``model``.
        remote: Strategies that the options may name in addition to those of this project.

    Raises:
        UserError: If the options contradict each other.
    """
    options = dict(model)
    shape = Shape(options.pop("dim"), options.pop("heads"), options.pop("length"))
    stored_position = options.pop("position")
    return Transformer(shape, position=position or build_strategy(stored_position, remote), **options)


def build_strategy(config: Mapping[str, Any] | str, remote: Iterable[type[Position]] = ()) -> StrategyBuilder:
    """Return the function that builds a strategy from the shape.

    Args:
        config: Name of the strategy's class, or a mapping with its ``class_path`` and its options as ``init_args``.
        remote: Strategies that ``config`` may name in addition to those of this project.

    Raises:
        UserError: If the class is neither a strategy of this project nor in ``remote``.
    """
    safe = Classes([*positions.strategies().values(), *remote]).instance(config, "position")
    parser = ArgumentParser(exit_on_error=False)
    parser.add_argument("--position", type=StrategyBuilder)
    return parser.instantiate_classes(parser.parse_object({"position": safe})).position


def class_name(config: Mapping[str, Any] | str) -> str:
    """Return the name of the class in a configuration of `build_strategy`, without its module."""
    return str(config if isinstance(config, str) else config["class_path"]).rpartition(".")[2]


def strategies_without_values(model: Mapping[str, Any]) -> list[Position]:
    """Build the strategies of `StoredModel.model` on the meta device: one per layer, or one that all layers share.

    Raises:
        UserError: If the options contradict each other, or name a strategy whose module is not imported.
    """
    layers, width = model["layers"], model.get("head_dim")
    shape = Shape(model["dim"], model["heads"], model["length"], layers=layers, head_width=width)
    build = build_strategy(model["position"], subclasses(Position))
    with torch.device("meta"):
        return layer_strategies(build, shape, model.get("per_layer"))


def check_wrapped(network: Transformer, model: Mapping[str, Any]) -> None:
    """Check that a strategy that is only for tests, such as `SelfExtend`, wraps the strategy of the trained model.

    Args:
        network: The network to test.
        model: Options of the trained model, see `StoredModel.model`.

    Raises:
        UserError: If the two rotate differently, for example because RoPE has another base.
    """
    wrapped = [each.position for each in network.positions if isinstance(each, Wrapper) and each.test_only]
    if not wrapped:
        return
    shape = replace(network.shape, layers=len(network.blocks))
    trained = layer_strategies(build_strategy(model["position"], subclasses(Position)), shape, None)
    for inner, own in product(wrapped, trained):
        same = type(inner) is type(own) and rotate_alike(inner, own, shape)
        given = f"{network.name} of {type(inner).__name__}, which differs from the strategy of the trained model"
        require(same, "model.position", given, f"model.position.position {model['position']}")


@dataclass(frozen=True)
class CopiedWeights:
    """Result of `copy_weights`: numbers of entries by the name of the tensor.

    Args:
        copied: Entries that were copied.
        new: Entries of the network that keep their initial values.
        unused: Entries of the stored model that were not copied, because the network has no tensor of this name, or
            because its strategy is of another class.
    """

    copied: dict[str, int]
    new: dict[str, int]
    unused: dict[str, int]

    def __str__(self) -> str:
        lines = []
        for title, counts in (("copied", self.copied), ("new", self.new), ("unused", self.unused)):
            strategy = [name for name in counts if name.startswith("positions.")]
            names = f" ({', '.join(strategy)})" if strategy else ""
            lines.append(f"{title + ':':<7} {len(counts):>4} tensors, {sum(counts.values()):>13,} numbers{names}")
        return "\n".join(lines)


def copy_weights(network: Transformer, source: StoredModel) -> CopiedWeights:
    """Copy the weights of a stored model into a network.

    Weights of a strategy are copied only if network and stored model have the same class of strategy, and of all
    strategies around it. Weights must have the same shape in both, except that embedding and head of the network may
    have more rows. The additional rows keep their values. Random draws (`Resampled`) are neither copied nor counted.

    Raises:
        UserError: If a shape differs, or the stored model lacks a weight outside the strategy. The network is then
            unchanged.
    """
    draws = _names_of_draws(network)
    state, weights = (
        {name: tensor for name, tensor in _without_duplicates(tensors).items() if name not in draws}
        for tensors in (network.state_dict(), source.weights)
    )
    same_classes = _same_classes(network, source.model)
    copied: Weights = {}
    for name, value in state.items():
        stored = source.weights.get(name)
        if name.startswith("positions.") and (stored is None or not same_classes(name)):
            continue
        if stored is None or not _shape_fits(name, stored, value):
            given = "no weight" if stored is None else f"shape {tuple(stored.shape)}"
            advice = "use the model options with which the weights were trained"
            if name.startswith("positions."):
                advice = f"set data.length to the training length {source.model['length']}, or change model.position"
            elif name in VOCABULARY_ROWS and stored is not None and stored.shape[1:] == value.shape[1:]:
                advice = f"set data.vocabulary to {len(stored)}"
            raise UserError(f"weights: got {given} for {name}, expected {tuple(value.shape)}; {advice}")
        copied[name] = stored
    with torch.no_grad():
        for name, stored in copied.items():
            (state[name][: len(stored)] if stored.ndim else state[name]).copy_(stored)
    counts = Counter({name: weight.numel() for name, weight in copied.items()})
    new = Counter({name: value.numel() for name, value in state.items()}) - counts  # only positive numbers
    left = {name: weight for name, weight in weights.items() if name not in counts}
    return CopiedWeights(counts, new, {name: weight.numel() for name, weight in left.items()})


def _names_of_draws(network: Transformer) -> set[str]:
    """Return the names of the random draws of the strategies, and of the numbers of steps that determine them."""
    modules = [(name, module) for name, module in network.positions.named_modules() if isinstance(module, Resampled)]
    return {f"positions.{name}.{draw}" for name, module in modules for draw, _ in module.named_buffers(recurse=False)}


def _same_classes(network: Transformer, model: Mapping[str, Any]) -> Callable[[str], bool]:
    """Return the function that tells whether the strategies around a weight have the same classes in both models."""
    if class_name(model["position"]) != type(network.positions[0]).__name__:
        return lambda name: False  # a replaced strategy need not be a class of which the options can be read
    stored = nn.ModuleList(strategies_without_values(model))

    def classes(module: Any, name: str) -> list[str]:
        path = accumulate(name.split(".")[1:-1], lambda inner, part: getattr(inner, part, None), initial=module)
        return [type(inner).__name__ for inner in path]

    return lambda name: classes(stored, name) == classes(network.positions, name)


def _without_duplicates(weights: Weights) -> Weights:
    """Return each tensor under its first name only; the embedding and the head may be one tensor with two names."""
    first = {weight.data_ptr(): name for name, weight in reversed(weights.items())}
    return {name: weight for name, weight in weights.items() if first[weight.data_ptr()] == name}


def _shape_fits(name: str, stored: Tensor, value: Tensor) -> bool:
    rows = name in VOCABULARY_ROWS and len(stored) <= len(value)
    return stored.shape == value.shape or (rows and stored.shape[1:] == value.shape[1:])

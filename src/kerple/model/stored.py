"""`StoredModel`: options and weights of a stored model, and their transfer to a `Transformer`."""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, fields
from typing import Any

import torch
from jsonargparse import ArgumentParser
from torch import Tensor

from kerple import positions
from kerple.base.errors import UserError
from kerple.base.trust import Classes, load, not_a_checkpoint
from kerple.model.architecture import Architecture
from kerple.model.transformer import Transformer
from kerple.positions import Position, Shape

Weights = dict[str, Tensor]
VOCABULARY_ROWS = ("embedding.weight", "head.weight")
NETWORK_OPTIONS = ("position", "layers", "dim", "heads", *(field.name for field in fields(Architecture)))


@dataclass(frozen=True)
class StoredModel:
    """Options and weights of a stored model, as a `Transformer` of this project expects them.

    Args:
        model: Options of `LanguageModel`: sizes, architecture, position, the training length as ``length`` and the
            number of rows of the embedding as ``vocabulary``.
        weights: Weights by their names in `Transformer`, including those of the positional strategy.
    """

    model: dict[str, Any]
    weights: Weights


def read_checkpoint(path: str, classes: Classes) -> StoredModel:
    """Read the options and weights from a checkpoint of `fit`.

    Raises:
        UserError: If the checkpoint contains no model.
    """
    model = classes.config(path)["model"]
    content = load(path)
    try:
        state = content["state_dict"].items()
        weights = {n.removeprefix("network."): w for n, w in state if n.startswith("network.")}
        if invalid := [name for name, value in weights.items() if not isinstance(value, Tensor)]:
            raise TypeError(f"{invalid[0]} is not a tensor")
        length, rows = int(content["hyper_parameters"]["length"]), len(weights["embedding.weight"])
    except (LookupError, TypeError, ValueError, AttributeError, OverflowError) as error:
        raise not_a_checkpoint(path, error) from error
    options = {key: value for key, value in model.items() if key in NETWORK_OPTIONS}  # without options of training
    return StoredModel({**options, "length": length, "vocabulary": rows}, weights)


def transformer(
    model: Mapping[str, Any],
    position: Callable[[Shape], Position] | None = None,
    remote: Iterable[type[Position]] = (),
) -> Transformer:
    """Build a network from the options of `StoredModel.model`, optionally with another strategy.

    Args:
        model: The options.
        position: Function that builds another strategy from the shape; None for the strategy in ``model``.
        remote: Classes that the options may name in addition to those of this project.

    Raises:
        UserError: If the options contradict each other.
    """
    options = dict(model)
    shape = Shape(options.pop("dim"), options.pop("heads"), options.pop("length"))
    stored = options.pop("position")
    return Transformer(shape, position=position or build_strategy(stored, remote), **options)


def build_strategy(
    config: Mapping[str, Any] | str, remote: Iterable[type[Position]] = ()
) -> Callable[[Shape], Position]:
    """Return the function that builds a strategy from the shape, given a class_path and init_args.

    Raises:
        UserError: If the class is neither a strategy of this project nor in ``remote``.
    """
    safe = Classes([*positions.strategies().values(), *remote]).instance(config, "position")
    parser = ArgumentParser(exit_on_error=False)
    parser.add_argument("--position", type=Callable[[Shape], Position])
    return parser.instantiate_classes(parser.parse_object({"position": safe})).position


@dataclass(frozen=True)
class Account:
    """Result of a transfer of weights: numbers of entries that were copied, are new, and were not copied, by name."""

    carried: dict[str, int]
    new: dict[str, int]
    left: dict[str, int]

    def __str__(self) -> str:
        lines = []
        for title, counts in (("carried over", self.carried), ("new", self.new), ("left behind", self.left)):
            strategy = [name for name in counts if name.startswith("positions.")]
            names = f" ({', '.join(strategy)})" if strategy else ""
            lines.append(f"{title + ':':<13} {len(counts):>4} tensors, {sum(counts.values()):>13,} numbers{names}")
        return "\n".join(lines)


def fill(network: Transformer, source: StoredModel) -> Account:
    """Copy weights into a network.

    Weights of the strategy are copied only if its class is the same. All other weights must have the same shape, but
    the network's embedding may have more rows, which keep their values.

    Returns:
        Numbers of copied, new and uncopied entries.

    Raises:
        UserError: If the shape of a weight differs. The network is then unchanged.
    """
    position = source.model["position"]
    class_path = position if isinstance(position, str) else position["class_path"]
    same_strategy = class_path.rpartition(".")[2] == type(network.positions[0]).__name__
    carried: Weights = {}
    state = _without_duplicates(network.state_dict())
    for name, value in state.items():
        stored = source.weights.get(name)
        if name.startswith("positions.") and (stored is None or not same_strategy):
            continue
        if stored is None or not _shape_fits(name, stored, value):
            shape = "nothing" if stored is None else f"shape {tuple(stored.shape)}"
            advice = "remove the options that change its shape"
            if name.startswith("positions."):
                advice = f"set data.length to {source.model['length']}, or use another strategy"
            elif name in VOCABULARY_ROWS and stored is not None:
                advice = f"set data.vocabulary to {len(stored)}"
            raise UserError(f"weights: got {shape} for {name}, expected {tuple(value.shape)}; {advice}")
        carried[name] = stored
    with torch.no_grad():
        for name, stored in carried.items():
            (state[name][: len(stored)] if stored.ndim else state[name]).copy_(stored)
    counts = {name: value.numel() - (carried[name].numel() if name in carried else 0) for name, value in state.items()}
    new = {name: count for name, count in counts.items() if count}
    left = {name: weight.numel() for name, weight in _without_duplicates(source.weights).items() if name not in carried}
    return Account({name: weight.numel() for name, weight in carried.items()}, new, left)


def _without_duplicates(weights: Weights) -> Weights:
    """Return the weights with one name for each tensor, because embedding and head may share a matrix."""
    first = {weight.data_ptr(): name for name, weight in reversed(weights.items())}
    return {name: weight for name, weight in weights.items() if first[weight.data_ptr()] == name}


def _shape_fits(name: str, stored: Tensor, value: Tensor) -> bool:
    rows = name in VOCABULARY_ROWS and len(stored) <= len(value)
    return stored.shape == value.shape or (rows and stored.shape[1:] == value.shape[1:])

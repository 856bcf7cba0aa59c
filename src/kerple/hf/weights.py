"""Transfer of a model's weights to our own `Transformer`, which may have another positional strategy."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from jsonargparse import ArgumentParser
from torch import Tensor

from kerple import positions
from kerple.base import trust
from kerple.base.errors import UserError
from kerple.hf.families import StoredModel, Weights, read_family
from kerple.hf.source import locate, read_model, read_model_config
from kerple.model import Transformer
from kerple.positions import Position, Shape

VOCABULARY_ROWS = ("embedding.weight", "head.weight")
TRAINING_OPTIONS = ("optimizer", "lr", "betas", "adam_eps", "weight_decay", "warmup", "compile", "pad_vocabulary_to")
"""Options of `kerple.training.language_model.LanguageModel` that belong to training and not to the network."""


def read(path: str, offer: trust.Offer | None = None) -> StoredModel:
    """Read a model as our options and weights.

    Args:
        path: A name for `locate`, or a checkpoint that `fit` has written.
        offer: The classes that a checkpoint may name; without it, no checkpoint is read.

    Raises:
        UserError: If there is no such model, it has no counterpart here, or the checkpoint holds no model.
    """
    if offer is not None and path.endswith(".ckpt"):
        model = trust.read_config(path, offer)["model"]
        content = torch.load(path, map_location="cpu", weights_only=True)
        try:
            state = content["state_dict"].items()
            weights = {n.removeprefix("network."): w for n, w in state if n.startswith("network.")}
            if odd := [name for name, value in weights.items() if not isinstance(value, Tensor)]:
                raise TypeError(f"{odd[0]} is no tensor")
            length, rows = int(content["hyper_parameters"]["length"]), len(weights["embedding.weight"])
        except (LookupError, TypeError, ValueError, AttributeError, OverflowError) as error:
            raise trust.no_checkpoint(path, error) from error
        options = {key: value for key, value in model.items() if key not in TRAINING_OPTIONS}
        return StoredModel({**options, "length": length, "vocabulary": rows}, weights)
    source = locate(path)
    config = read_model_config(source)
    return read_family(config, read_model(source, config).state_dict())


def transformer(model: Mapping[str, Any]) -> Transformer:
    """Build the network of some options, which are those of `StoredModel.model`.

    Raises:
        UserError: If the options do not fit together.
    """
    options = dict(model)
    shape = Shape(options.pop("dim"), options.pop("heads"), options.pop("length"))
    return Transformer(shape, position=strategy(options.pop("position")), **options)


def strategy(config: Mapping[str, Any] | str) -> Callable[[Shape], Position]:
    """The function that builds a strategy, from a class_path and init_args.

    Raises:
        UserError: If the class is not a strategy of this project.
    """
    safe = trust.named(config, Position, trust.Offer(positions.offered()), "position")
    parser = ArgumentParser(exit_on_error=False)
    parser.add_argument("--position", type=Callable[[Shape], Position])
    return parser.instantiate_classes(parser.parse_object({"position": safe})).position


@dataclass(frozen=True)
class Account:
    """What became of a model's weights: their names, and how many numbers they hold."""

    carried: dict[str, int]
    new: dict[str, int]
    left: dict[str, int]

    def __str__(self) -> str:
        return "\n".join(
            f"{what:<13} {len(names):>4} tensors, {sum(names.values()):>13,} numbers{_some(names)}"
            for what, names in (("carried over:", self.carried), ("new:", self.new), ("left behind:", self.left))
        )


def fill(network: Transformer, given: StoredModel) -> Account:
    """Copy weights into a network.

    All weights must fit, except those of the strategy: they are copied if its class is the same, else the network keeps
    its own. Further rows of the network's embedding are kept too.

    Returns:
        What became of each weight.

    Raises:
        UserError: If a weight does not fit. The network is then unchanged.
    """
    own, position = network.state_dict(), given.model["position"]
    path = position if isinstance(position, str) else position["class_path"]
    same = path.rpartition(".")[2] == type(network.positions[0]).__name__
    carried: Weights = {}
    for name, value in own.items():
        found = given.weights.get(name)
        if name.startswith("positions."):
            if not same or found is None:
                continue
            if found.shape != value.shape:
                raise UserError(
                    f"weights: {name} is {tuple(found.shape)}, the strategy's is {tuple(value.shape)}; set data.length "
                    f"to {given.model['length']}, or exchange the strategy"
                )
        elif found is None or not _fits(name, found, value):
            told = "is not there" if found is None else f"is {tuple(found.shape)}"
            more = (
                f"set data.vocabulary to {len(found)}"
                if name in VOCABULARY_ROWS and found is not None
                else "leave them out"
            )
            raise UserError(
                f"weights: {name} {told}, the model's {tuple(value.shape)}: options of model or data change it; {more}"
            )
        carried[name] = found
    new = {n: w.numel() - (carried[n].numel() if n in carried else 0) for n, w in own.items()}
    with torch.no_grad():
        for name, value in own.items():
            if name in carried:
                value[: len(carried[name])].copy_(carried[name]) if value.ndim else value.copy_(carried[name])
    return Account(
        {n: w.numel() for n, w in carried.items()},
        {n: count for n, count in new.items() if count},
        {n: w.numel() for n, w in given.weights.items() if n not in carried} | dict.fromkeys(given.left, 0),
    )


def _fits(name: str, found: Tensor, value: Tensor) -> bool:
    rows = name in VOCABULARY_ROWS and len(found) <= len(value)
    return found.shape == value.shape or (rows and found.shape[1:] == value.shape[1:])


def _some(names: Mapping[str, int]) -> str:
    own = [name for name in names if name.startswith("positions.")]
    shown = own or (list(names) if len(names) <= 4 else [])
    return f" ({', '.join(shown[:4])}{', …' if len(shown) > 4 else ''})" if shown else ""

"""Weights of a model that exists in a Transformer of ours, whatever strategy that has."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from jsonargparse import ArgumentParser
from torch import Tensor

from kerple import positions
from kerple.errors import UserError
from kerple.hf.families import StoredModel, Weights, read_family
from kerple.hf.source import locate, read_model, read_model_config
from kerple.model import Transformer
from kerple.positions import Position, Shape
from kerple.runs import trust

VOCABULARY_ROWS = ("embedding.weight", "head.weight")
TRAINING_OPTIONS = ("optimizer", "lr", "betas", "adam_eps", "weight_decay", "warmup", "compile", "pad_vocabulary_to")
"""Options of `kerple.lm.LanguageModel` that say how a network is trained, not what it is."""


def read(path: str, offer: trust.Offer | None = None) -> StoredModel:
    """A model as options of ours and weights.

    Args:
        path: As for `locate`, or a checkpoint that `fit` has written.
        offer: What a checkpoint may name; none is read without it.

    Raises:
        UserError: If it is no such model, or has no counterpart here.
    """
    if offer is not None and path.endswith(".ckpt"):
        model = trust.read_config(path, offer)["model"]
        content = torch.load(path, map_location="cpu", weights_only=True)
        state = content["state_dict"].items()
        weights = {n.removeprefix("network."): w for n, w in state if n.startswith("network.")}
        options = {key: value for key, value in model.items() if key not in TRAINING_OPTIONS}
        length, rows = int(content["hyper_parameters"]["length"]), len(weights["embedding.weight"])
        return StoredModel({**options, "length": length, "vocabulary": rows}, weights)
    source = locate(path)
    config = read_model_config(source)
    return read_family(config, read_model(source, config).state_dict())


def transformer(model: Mapping[str, Any]) -> Transformer:
    """The network that options describe: those of `StoredModel.model`.

    Raises:
        UserError: If they do not fit together.
    """
    options = dict(model)
    shape = Shape(options.pop("dim"), options.pop("heads"), options.pop("length"))
    return Transformer(shape, position=strategy(options.pop("position")), **options)


def strategy(config: Mapping[str, Any] | str) -> Callable[[Shape], Position]:
    """What builds a strategy of this project, from its class_path and init_args.

    Raises:
        UserError: If it names a class of somebody else.
    """
    safe = trust.named(config, Position, trust.Offer(positions.offered()), "position")
    parser = ArgumentParser(exit_on_error=False)
    parser.add_argument("--position", type=Callable[[Shape], Position])
    return parser.instantiate_classes(parser.parse_object({"position": safe})).position


@dataclass(frozen=True)
class Account:
    """What became of a model's weights: names, and how many numbers they hold."""

    carried: dict[str, int]
    new: dict[str, int]
    left: dict[str, int]

    def __str__(self) -> str:
        return "\n".join(
            f"{what:<13} {len(names):>4} tensors, {sum(names.values()):>13,} numbers{_some(names)}"
            for what, names in (("carried over:", self.carried), ("new:", self.new), ("left behind:", self.left))
        )


def fill(network: Transformer, given: StoredModel) -> Account:
    """Put weights into a network, in place.

    Everything but the strategy must fit. Its parameters are carried over if it is of the same class; else the network's
    stay as they are. Rows that its embedding has beyond the given ones stay too.

    Raises:
        UserError: If something does not fit; nothing is changed then.
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

"""`fit --weights PATH`: start from a model that exists, with another strategy if one is asked for."""

from functools import lru_cache
from typing import Any

import yaml

from kerple.cli.offered import offer
from kerple.hf import need
from kerple.hf.families import StoredModel
from kerple.model import Transformer

OF_THE_DATA = ("length", "vocabulary")  # the model is told them by its data


@lru_cache(maxsize=1)  # asked for its options first, then for its weights
def _read(path: str, trusted: tuple[str, ...]) -> StoredModel:
    if not path.endswith(".ckpt"):
        need()
    from kerple.hf import weights

    return weights.read(path, offer(trusted))


def architecture_first(arguments: list[str], path: str, trusted: tuple[str, ...] = ()) -> list[str]:
    """Put what a model says of itself behind the configuration files and before the flags, which win over it.

    Args:
        arguments: Of ``fit``.
        path: Of the model, as for `kerple.hf.weights.read`.
        trusted: Packages whose classes a checkpoint may name.

    Raises:
        UserError: If the model cannot be had.
    """
    model = {key: value for key, value in _read(path, trusted).model.items() if key not in OF_THE_DATA}
    files, flags, rest = [], [], iter(arguments[1:])
    for argument in rest:
        name, equals, _ = argument.partition("=")
        place = files if name in ("--config", "-c") else flags
        place += [argument] if equals or place is flags else [argument, next(rest, "")]
    return [arguments[0], *files, "--config", yaml.safe_dump({"model": model}), *flags]


def start_from(network: Transformer, path: str, trusted: tuple[str, ...] = ()) -> None:
    """Fill a network and print what was carried over, what is new and what was left behind.

    Raises:
        UserError: If something but the strategy does not fit.
    """
    from kerple.hf.weights import fill

    given: Any = _read(path, trusted)
    print(f"weights of {path}:\n{fill(network, given)}", flush=True)
    _read.cache_clear()

"""`fit --weights PATH`: training that starts from the weights of another model, whose strategy may be replaced."""

from functools import lru_cache
from typing import Any

import yaml

from kerple.base.errors import UserError
from kerple.cli.allowed_classes import offer
from kerple.hf import need
from kerple.hf.families import StoredModel
from kerple.model import Transformer

OF_THE_DATA = ("length", "vocabulary")  # the model takes these from the data


@lru_cache(maxsize=1)  # called for the options first, then for the weights
def _read(path: str, trusted: tuple[str, ...]) -> StoredModel:
    if not path.endswith(".ckpt"):
        need()
    from kerple.hf import weights

    try:
        return weights.read(path, offer(trusted))
    except UserError as error:  # of a model that `test` calls --hf
        raise UserError(f"weights: {str(error).removeprefix('hf: ')}") from error


def architecture_first(arguments: list[str], path: str, trusted: tuple[str, ...] = ()) -> list[str]:
    """Insert a model's architecture after the configuration files, which it replaces, and before the flags.

    Args:
        arguments: Arguments of ``fit``.
        path: Path or name of the model, see `kerple.hf.weights.read`.
        trusted: Packages whose classes a checkpoint may name.

    Returns:
        The arguments with the architecture.

    Raises:
        UserError: If the model cannot be read.
    """
    model = {key: value for key, value in _read(path, trusted).model.items() if key not in OF_THE_DATA}
    files: list[str] = []
    flags: list[str] = []
    rest = iter(arguments[1:])
    for argument in rest:
        name, equals, _ = argument.partition("=")
        place = files if name in ("--config", "-c") else flags
        place += [argument] if equals or place is flags else [argument, next(rest, "")]
    return [arguments[0], *files, "--config", yaml.safe_dump({"model": model}), *flags]


def start_from(network: Transformer, path: str, trusted: tuple[str, ...] = ()) -> None:
    """Copy a model's weights into a network, and print what was copied, what is new and what was left out.

    Raises:
        UserError: If a weight other than the strategy's does not fit.
    """
    from kerple.hf.weights import fill

    given: Any = _read(path, trusted)
    print(f"weights of {path}:\n{fill(network, given)}", flush=True)
    _read.cache_clear()

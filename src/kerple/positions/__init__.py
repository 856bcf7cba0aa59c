"""Positional strategies: every module beside this one is imported, so a new file is enough to add a name."""

import inspect
from importlib import import_module
from pkgutil import iter_modules
from typing import Any

from kerple.errors import UserError
from kerple.positions.base import Position, Shape

__all__ = ["Position", "Shape", "build", "names"]


def _strategies() -> dict[str, type[Position]]:
    found: dict[str, type[Position]] = {}
    for module in iter_modules(__path__):
        for name, value in vars(import_module(f"{__name__}.{module.name}")).items():
            if inspect.isclass(value) and issubclass(value, Position) and not inspect.isabstract(value):
                found[name] = value
    return found


_BY_NAME = _strategies()
globals().update(_BY_NAME)


def names() -> list[str]:
    """Names of all strategies, sorted: what `--model.position` accepts."""
    return sorted(_BY_NAME)


def build(name: str, *, dim: int, heads: int, length: int, **options: Any) -> Position:
    """Build a strategy by name.

    Args:
        name: One of `names()`.
        dim: Width D of the model.
        heads: Attention heads H; must divide ``dim``.
        length: Training length in tokens.
        **options: The strategy's own options.

    Raises:
        UserError: If there is no such strategy, or a number is out of range.
    """
    if name not in _BY_NAME:
        raise UserError(f"position: got {name!r}, expected one of {', '.join(names())}")
    return _BY_NAME[name](Shape(dim, heads, length), **options)

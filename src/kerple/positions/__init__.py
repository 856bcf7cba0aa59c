"""Positional strategies: every module below this one is imported, so a new file is enough to add a name."""

import inspect
from collections.abc import Callable
from importlib import import_module
from pkgutil import walk_packages
from typing import Any

from kerple.base.errors import unknown
from kerple.positions.base import Position, Shape
from kerple.positions.token_positions import AttentionWeights, QueryKeyBlock, TokenPositions

__all__ = ["AttentionWeights", "Position", "QueryKeyBlock", "Shape", "TokenPositions", "build", "names", "strategies"]


def _strategies_by_name() -> dict[str, type[Position]]:
    modules = [import_module(module.name) for module in walk_packages(__path__, f"{__name__}.")]
    classes = {value for module in modules for value in vars(module).values() if inspect.isclass(value)}
    by_name = {c.__name__: c for c in classes if issubclass(c, Position) and not inspect.isabstract(c)}
    return dict(sorted(by_name.items()))  # in one order, whatever the hashes of the classes are


_BY_NAME = _strategies_by_name()


def __getattr__(name: str) -> type[Position]:
    if name in _BY_NAME:
        return _BY_NAME[name]
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def names() -> list[str]:
    """Names of all strategies, sorted: what `--model.position` accepts."""
    return list(_BY_NAME)


def strategies() -> dict[str, type[Position]]:
    """All strategies by name."""
    return dict(_BY_NAME)


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
        raise unknown("position", name, names())
    strategy: Callable[..., Position] = _BY_NAME[name]
    return strategy(Shape(dim, heads, length), **options)

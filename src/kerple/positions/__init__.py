"""Positional strategies. This file imports all modules of the package and collects the strategies in them.

To add a strategy, add a file.
"""

import inspect
from collections.abc import Callable
from importlib import import_module
from pkgutil import walk_packages
from typing import Any

from kerple.base.errors import unknown
from kerple.positions.base import Position, Shape, StrategyBuilder
from kerple.positions.token_positions import AttentionWeights, QueryKeyBlock, TokenPositions

__all__ = [
    "AttentionWeights",
    "Position",
    "QueryKeyBlock",
    "Shape",
    "StrategyBuilder",
    "TokenPositions",
    "build",
    "names",
    "strategies",
]


def _strategies_by_name() -> dict[str, type[Position]]:
    modules = [import_module(module.name) for module in walk_packages(__path__, f"{__name__}.")]
    classes = {value for module in modules for value in vars(module).values() if inspect.isclass(value)}
    by_name = {c.__name__: c for c in classes if issubclass(c, Position) and not inspect.isabstract(c)}
    return dict(sorted(by_name.items()))  # the order of a set changes between processes


_BY_NAME = _strategies_by_name()


def __getattr__(name: str) -> type[Position]:
    if name in _BY_NAME:
        return _BY_NAME[name]
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def names() -> list[str]:
    """Return the names of all strategies, sorted. `--model.position` accepts these names."""
    return list(_BY_NAME)


def strategies() -> dict[str, type[Position]]:
    """Return all strategies by name."""
    return dict(_BY_NAME)


def build(name: str, *, dim: int, heads: int, length: int, **options: Any) -> Position:
    """Build a strategy by name.

    Args:
        name: One of `names()`.
        dim: Width D of the model.
        heads: Number of attention heads H; must divide ``dim``.
        length: Training length in tokens.
        **options: Options of the strategy.

    Raises:
        UserError: If there is no strategy of this name, or an argument is out of range.
    """
    if name not in _BY_NAME:
        raise unknown("name", name, names())
    strategy: Callable[..., Position] = _BY_NAME[name]
    return strategy(Shape(dim, heads, length), **options)

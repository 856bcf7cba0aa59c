"""The options of a class and their types, from which trust decides whether a value could make the parser import."""

import datetime
import enum
import inspect
import logging
import os
from collections import abc
from collections.abc import Iterable, Iterator
from pathlib import Path
from types import UnionType
from typing import Any, Literal, Union, get_args, get_origin

from jsonargparse._parameter_resolvers import get_signature_parameters

ANYTHING = Any
PLAIN = {int, float, bool, str, complex, type(None), Path, os.PathLike, datetime.timedelta}
CONTAINERS = {list, tuple, dict, set, frozenset, abc.Sequence, abc.Iterable, abc.Mapping, abc.Collection}


def parameters(owner: type) -> dict[str, tuple[Any, Any]]:
    """Type and default of each option of a class, also of those that its `__init__` passes on to another class."""
    resolved = get_signature_parameters(owner, "__init__", logger=logging.getLogger("jsonargparse"))
    return {
        p.name: (ANYTHING if p.annotation is inspect.Parameter.empty else p.annotation, p.default) for p in resolved
    }


def options(owner: type) -> dict[str, Any]:
    """Names and types of the options of a class; an option without annotation has the type `ANYTHING`."""
    return {name: kind for name, (kind, _) in parameters(owner).items()}


def base_in(kind: Any, bases: Iterable[type]) -> type | None:
    """The first base class of which the type needs an instance, or a function that returns one, or None."""
    inside = [leaf for leaf in _leaves(kind) if inspect.isclass(leaf)]
    return next((base for base in bases if any(issubclass(leaf, base) for leaf in inside)), None)


def is_plain(kind: Any) -> bool:
    """Whether a type consists of numbers, texts and containers of them, for which the parser imports nothing."""
    return all(leaf in PLAIN or (inspect.isclass(leaf) and issubclass(leaf, enum.Enum)) for leaf in _leaves(kind))


def takes_null(kind: Any) -> bool:
    """Whether None is a value of a type; of one that is not known it may be."""
    return any(leaf in (type(None), ANYTHING, object) for leaf in _leaves(kind))


def takes_several(kind: Any) -> bool:
    """Whether values of a type may be sequences; of one that is not known they may."""
    several = [*CONTAINERS, ANYTHING, object]
    return any(part in several or get_origin(part) in several for part in (kind, *get_args(kind)))


def _leaves(kind: Any) -> Iterator[Any]:
    if get_origin(kind) is Literal:
        yield str
    elif isinstance(kind, list):  # of the arguments of a Callable
        for part in kind:
            yield from _leaves(part)
    elif arguments := [part for part in get_args(kind) if part is not ...]:
        if get_origin(kind) not in CONTAINERS | {Union, UnionType}:
            yield get_origin(kind)
        for part in arguments:
            yield from _leaves(part)
    else:
        yield kind

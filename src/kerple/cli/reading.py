"""Parsing of a command line; the message about a mistake is that of the parser."""

import os
import re
from argparse import ArgumentError
from collections.abc import Iterator
from functools import reduce
from importlib import import_module
from itertools import pairwise
from pathlib import Path
from typing import Any

import yaml
from jsonargparse import ArgumentParser, Namespace

from kerple.base.errors import UserError
from kerple.base.shipped_configs import OPTIONS


def parse(parser: ArgumentParser, arguments: list[str]) -> Namespace:
    """Parse the arguments of a command.

    Args:
        parser: Parser of the command, with ``exit_on_error=False``.
        arguments: Arguments of the command line.

    Raises:
        UserError: If they do not parse. The parser raises other errors than its own for some nested options, and
            accepts some mistakes.
    """
    try:
        config = parser.parse_args(arguments)
    except (ArgumentError, TypeError, ValueError) as error:
        names = ""
        if 'key "model.position"' in str(error):  # the parser does not say which names there are
            names = f"; strategies: {', '.join(import_module('kerple.positions').names())}"
        raise UserError(f"{error}{names}") from error
    options = config.get(str(config.get("subcommand")), config)  # those of `fit` are below the name of the command
    for name in ("trainer", "model.position"):  # the parser also accepts a list here
        if isinstance(options.get(name), list):
            raise UserError(f"{name}: got {options[name]}, expected a mapping of options")
    parsed = options.as_dict()
    known = {_without_marks(path) for path, _ in _items(parsed)}
    for given in _given(arguments):  # the parser drops unknown options whose value is an empty mapping
        for path, value in _items(given):
            if value == {} and _without_marks(path) not in known:
                raise UserError(f"{'.'.join(map(str, path))}: is no option")
    for path, value in _items(parsed):  # loggers alone have such options, which they pass on to their services
        if path[-1] == "dict_kwargs" and value and "logger" not in path:
            raise UserError(f"{'.'.join(map(str, path))}: is no option; the options of a class are its init_args")
    return config


def _given(arguments: list[str]) -> Iterator[Any]:
    """Yield the configurations and options in which a mapping is empty, as nested mappings."""
    for option, value in pairwise(part for argument in arguments for part in argument.split("=", 1)):
        if option in OPTIONS or (option.startswith("--") and "." in option):
            text = Path(value).read_text(encoding="utf-8") if os.path.isfile(value) else value
            if re.search(r"\{\s*\}", text):
                names = option.lstrip("-").split(".") if option not in ("-c", "--config") else []
                yield reduce(lambda inner, name: {name: inner}, reversed(names), yaml.safe_load(text))


def _items(node: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[tuple[Any, ...], Any]]:
    """Yield the path and the value of each entry of nested mappings and lists."""
    for name, value in node.items() if isinstance(node, dict) else enumerate(node) if isinstance(node, list) else ():
        yield (*path, name), value
        yield from _items(value, (*path, name))


def _without_marks(path: tuple[Any, ...]) -> tuple[Any, ...]:
    """A path as it is written in short, without the keys that mark the options of a class."""
    return tuple(name for name in path if name not in ("init_args", "dict_kwargs"))

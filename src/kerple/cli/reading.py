"""Parsing of a command line; the message about a mistake is that of the parser."""

from argparse import ArgumentError
from collections.abc import Iterator
from functools import reduce
from importlib import import_module
from itertools import chain, pairwise
from typing import Any, cast

import yaml
from jsonargparse import ArgumentParser, Namespace

from kerple.base.errors import UserError


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
    for path, value in _items(options.as_dict()):  # loggers alone pass such options on, to their services
        if path[-1] == "dict_kwargs" and value and "logger" not in path:
            raise UserError(f"{'.'.join(map(str, path))}: is no option; the options of a class are its init_args")
    given = [yaml.safe_load(path.get_content()) for path in options.get("config") or [] if path]
    for option, value in pairwise(part for argument in arguments for part in argument.split("=", 1)):
        if option.startswith("--") and value == "{}":
            given.append(reduce(lambda inner, name: {name: inner}, reversed(option[2:].split(".")), cast("Any", {})))
    for mistake in chain.from_iterable(_dropped(one, options.as_dict()) for one in given):
        raise UserError(mistake)
    return config


def _dropped(given: Any, parsed: Any, place: str = "") -> Iterator[str]:
    """Yield what is wrong with options whose value is an empty mapping, which the parser drops if no class has them."""
    if not isinstance(given, dict) or not isinstance(parsed, dict):
        return
    ours, theirs = (str(options.get("class_path", "")).rpartition(".")[2] for options in (parsed, given))
    if theirs in ("", ours):  # else another class has replaced it
        options = parsed.get("init_args") or {}
        known = parsed | options | {"init_args": options, "dict_kwargs": None}
        for name, value in given.items():
            if value == {} and name not in known:
                yield f"{place}got {name}, which is no option"
            yield from _dropped(value, known.get(name), f"{place}{name}: ")


def _items(node: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[tuple[Any, ...], Any]]:
    """Yield the path and the value of each entry of nested mappings and lists."""
    for name, value in node.items() if isinstance(node, dict) else enumerate(node) if isinstance(node, list) else ():
        yield (*path, name), value
        yield from _items(value, (*path, name))

"""Parsing of a command line; the message about a mistake is that of the parser."""

import inspect
import re
from argparse import ArgumentError
from collections.abc import Iterator
from difflib import get_close_matches
from functools import reduce
from importlib import import_module
from itertools import chain, pairwise
from pydoc import locate
from typing import Any, cast

import yaml
from jsonargparse import ArgumentParser, Namespace

from kerple.base.errors import UserError, unknown
from kerple.cli import PROGRAM

# what the parser says of a wrong strategy, of an option that does not exist, and of the class that lacks the option
STRATEGY = re.compile(r'key "model\.position":.*?(?: class: (.*?)\. Got value| path string): (.*)')
OPTION = re.compile(
    r"(?:unrecognized arguments: --|accept (?:option|nested key) '|(?:option|key) '(?=[\w.-]+' is not))([\w.-]+)", re.I
)
CLASS = re.compile(r"class_path[= ]'([\w.]+)'")


def command_parser(command: str, description: str | None = None) -> ArgumentParser:
    """An empty parser for the options of a command."""
    return ArgumentParser(prog=f"{PROGRAM} {command}", description=description, exit_on_error=False, allow_abbrev=False)


def parse(parser: ArgumentParser, arguments: list[str], command: ArgumentParser | None = None) -> Namespace:
    """Parse the arguments of a command.

    Args:
        parser: Parser of the command, with ``exit_on_error=False``.
        arguments: Arguments of the command line.
        command: Parser that has the command's options, if it is one inside of ``parser``.

    Raises:
        UserError: If they do not parse. The parser raises other errors than its own for some nested options, and
            accepts some mistakes.
    """
    try:
        config = parser.parse_args(arguments)
    except (ArgumentError, TypeError, ValueError) as error:
        raise _mistake(" ".join(str(error).split()), command or parser) from error
    options = config.get(str(config.get("subcommand")), config)  # those of `fit` are below the name of the command
    for path, value in _items(options.as_dict()):
        place = ".".join(map(str, path))
        # the parser also accepts a list for these two, and a function where a class builds what a function returns
        if inspect.isroutine(value) or (place in ("trainer", "model.position") and isinstance(value, list)):
            raise UserError(f"{place}: got {value}, expected a mapping of options, or a class")
        if path[-1] == "dict_kwargs" and value and "logger" not in path:  # loggers pass them on, to their services
            raise UserError(f"{place}: is no option; the options of a class are its init_args")
    given = [yaml.safe_load(path.get_content()) for path in options.get("config") or [] if path]
    for option, value in pairwise(part for argument in arguments for part in argument.split("=", 1)):
        if option.startswith("--") and value == "{}":
            given.append(reduce(lambda inner, name: {name: inner}, reversed(option[2:].split(".")), cast("Any", {})))
    for mistake in chain.from_iterable(_dropped(one, options.as_dict()) for one in given):
        raise UserError(mistake)
    return config


def _mistake(message: str, parser: ArgumentParser) -> UserError:
    """The error of a command line about which the parser says this, with a suggestion for a name that is misspelt."""
    if option := OPTION.search(message):
        names: Any = re.findall(r"--([\w.-]+)", parser.format_help())
        # the class is named before its option, except that of a strategy
        if kinds := CLASS.findall(message[: option.start()])[::-1] + CLASS.findall(message):
            message = f"{option[1]} is no option of {kinds[0]}"
            names = inspect.signature(cast("Any", locate(kinds[0]))).parameters
        nearest = get_close_matches(option[1], names, 1)
        return UserError(f"{message}; did you mean {nearest[0]}?" if nearest else message)
    if strategy := STRATEGY.search(message):
        reason, value = strategy.groups()
        if (name := value.removeprefix("kerple.positions.")).isidentifier():
            return unknown("model.position", name, import_module("kerple.positions").names())
        message = f"model.position: got {value}: {reason or 'expected the name of a strategy or module.Class'}"
    return UserError(message)


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

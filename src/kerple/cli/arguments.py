"""Parsing of a command line, with one error message for a wrong option."""

import inspect
import re
from argparse import ArgumentError
from difflib import get_close_matches
from importlib import import_module
from pydoc import locate
from typing import Any, cast

from jsonargparse import ArgumentParser, Namespace

from kerple.base.errors import UserError, unknown
from kerple.cli import PROGRAM

# messages of jsonargparse: a wrong strategy, an unknown option, and the class that does not have the option
STRATEGY = re.compile(r'key "model\.position":.*?(?: class: (.*?)\. Got value| path string): (.*)')
OPTION = re.compile(
    r"(?:unrecognized arguments: --|accept (?:option|nested key) '|(?:option|key) '(?=[\w.-]+' is not))([\w.-]+)", re.I
)
CLASS = re.compile(r"class_path[= ]'([\w.]+)'")


def command_parser(command: str, description: str | None = None) -> ArgumentParser:
    """A parser of a command, without options."""
    return ArgumentParser(prog=f"{PROGRAM} {command}", description=description, exit_on_error=False, allow_abbrev=False)


def parse(parser: ArgumentParser, arguments: list[str], command: ArgumentParser | None = None) -> Namespace:
    """Parse the arguments of a command.

    Args:
        parser: Parser of the command, with ``exit_on_error=False``.
        arguments: Arguments of the command line.
        command: The subparser with the command's options, if ``parser`` has subcommands.

    Raises:
        UserError: If an argument is wrong.
    """
    try:
        config = parser.parse_args(arguments)
    except (ArgumentError, TypeError, ValueError) as error:
        raise _mistake(" ".join(str(error).split()), command or parser) from error
    options = config.get(str(config.get("subcommand")), config)  # options of `fit` are below the subcommand
    for option in ("trainer", "model.position"):
        # the parser also accepts lists and functions for these options
        if isinstance(value := options.get(option), list) or inspect.isroutine(value):
            raise UserError(f"{option}: got {value}, expected a mapping of options, or a class")
    return config


def _mistake(message: str, parser: ArgumentParser) -> UserError:
    """The error for a message of the parser, with a suggestion for a misspelt name."""
    if option := OPTION.search(message):
        names: Any = re.findall(r"--([\w.-]+)", parser.format_help())
        # the message names the class before its option, except for a strategy
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

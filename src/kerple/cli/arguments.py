"""Parsing of command lines, with one error message for wrong options."""

import argparse
import inspect
import re
from argparse import ArgumentError
from collections.abc import Collection
from difflib import get_close_matches
from importlib import import_module
from pydoc import locate
from typing import Any, cast

from jsonargparse import ArgumentParser, Namespace

from kerple.base.errors import UserError, unknown, user_location
from kerple.cli import PROGRAM

# messages of jsonargparse: a wrong strategy, an unknown option of a class, and the class
STRATEGY = re.compile(r'key "model\.position":.*?(?: class: (.*?)\. Got value| path string): (.*)')
NO_STRATEGY = re.compile(r"Expected '([\w.]+)' to be a class that instantiates into")
OPTION = re.compile(r"(?:accept (?:option|nested key) '|(?:option|key) '(?=[\w.-]+' is not))([\w.-]+)", re.I)
CLASS = re.compile(r"class_path[= ]'([\w.]+)'")


def command_parser(command: str, description: str | None = None) -> ArgumentParser:
    """Return a parser for a command. The caller adds the options."""
    return ArgumentParser(prog=f"{PROGRAM} {command}", description=description, exit_on_error=False, allow_abbrev=False)


def add_folder_arguments(parser: ArgumentParser, experiment: str, name: str) -> None:
    """Add the options of a run's folder: the default of ``experiment``, and the name of the folder for the help."""
    parser.add_argument("--experiment", default=experiment, help="Folder of a group of runs, inside --logs.")
    parser.add_argument("--logs", default="logs", help="Folder of all runs.")
    text = f"Folder of the results; null: <logs>/<experiment>/{name}, or a new version of it."
    parser.add_argument("--run_dir", type=str | None, default=None, help=text)


def add_checkpoint_arguments(parser: ArgumentParser) -> None:
    """Add the options of a checkpoint to read: its path, and the packages whose classes it may use."""
    parser.add_argument("--ckpt_path", type=str, required=True, help="a checkpoint of `fit`")
    parser.add_argument("--trust", default="", help="packages whose classes the checkpoint may use: a,b,c")


def peek(arguments: list[str], *names: str) -> tuple[argparse.Namespace, list[str]]:
    """Read some options before all arguments are parsed.

    Returns:
        The values by name, and the other arguments. The value of ``config`` is a list. Each other value is a string,
        or None if the option is missing.
    """
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False, exit_on_error=False)
    for name in names:
        if name == "config":
            parser.add_argument("--config", "-c", action="append", default=[])
        else:
            parser.add_argument(f"--{name}")
    return parser.parse_known_args(arguments)


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
        message, location = _error_message(" ".join(str(error).split()), command or parser), user_location(error)
        raise UserError(f"{message} ({location})" if location else message) from error
    options = config.get(str(config.get("subcommand")), config)  # options of `fit` are below the subcommand
    for option in ("trainer", "model.position"):
        # the parser also accepts lists and functions for these options
        if isinstance(value := options.get(option), list) or inspect.isroutine(value):
            raise UserError(f"{option}: got {value}, expected a mapping of options, or a class")
    return config


def _error_message(message: str, parser: ArgumentParser) -> str:
    """The error message for a message of the parser, with suggestions for misspelt names."""
    misspelt, names = [], cast("Any", re.findall(r"--([\w.-]+)", parser.format_help()))
    if message.startswith("unrecognized arguments: "):
        misspelt = re.findall(r" --([\w.-]+)", message)
    elif option := OPTION.search(message):
        misspelt = [option[1]]
        # the message names the class before its option, except for a strategy
        if kinds := CLASS.findall(message[: option.start()])[::-1] + CLASS.findall(message):
            message = f"{option[1]} is not an option of {kinds[0]}"
            names = inspect.signature(cast("Any", locate(kinds[0]))).parameters
    elif strategy := NO_STRATEGY.search(message):
        message = f"model.position: got {strategy[1]}, expected a subclass of kerple.positions.Position"
    elif strategy := STRATEGY.search(message):
        reason, value = strategy.groups()
        if (name := value.removeprefix("kerple.positions.")).isidentifier():
            return str(unknown("model.position", name, import_module("kerple.positions").names()))
        message = f"model.position: got {value}: {reason or 'expected the name of a strategy or module.Class'}"
    nearest = [match for name in misspelt for match in _nearest(name, names)]
    return f"{message}; did you mean {' and '.join(nearest)}?" if nearest else message


def _nearest(name: str, names: Collection[str]) -> list[str]:
    """The shortest name that begins like this one, or the most similar name, in a list; empty if there is none."""
    longer = sorted((other for other in names if other.startswith(name)), key=len)
    return longer[:1] or get_close_matches(name, names, 1)

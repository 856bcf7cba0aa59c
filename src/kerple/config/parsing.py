"""Parsing of command lines. A wrong option is reported in one line."""

import inspect
import re
import sys
from argparse import ArgumentError
from collections.abc import Collection
from difflib import get_close_matches
from importlib import import_module
from pydoc import locate
from typing import Any, cast

from jsonargparse import ArgumentParser, Namespace

from kerple.base.errors import UserError, unknown, user_location
from kerple.config.options import RenamedOption, subclasses

BOOLEANS = ("true", "false", "yes", "no", "on", "off")  # values of a switch

# Patterns for jsonargparse's messages. STRATEGY has two groups: the reason why a value of model.position is wrong, and
# this value. Each other pattern has one group: the name of an existing class that is not a strategy (NO_STRATEGY), of
# an unknown option (OPTION), or of a class (CLASS).
STRATEGY = re.compile(r'key "model\.position":.*?(?: class: (.*?)\. Got value| path string): (.*)')
NO_STRATEGY = re.compile(r"Expected '([\w.]+)' to be a class that instantiates into")
OPTION = re.compile(r"(?:accept (?:option|nested key) '|(?:option|key) '(?=[\w.-]+' is not))([\w.-]+)", re.I)
REQUIRED = "the following arguments are required: "
MISSING = re.compile(rf"{REQUIRED}([\w, ]+?)(?= Given| - |$)")
CLASS = re.compile(r"class_path[= ]'([\w.]+)'")

# Patterns for messages about a value: names of the options from the outermost to the innermost, values, a value inside
# an object, accepted words and types, and the module and name of the base class of accepted classes.
KEY = re.compile(r'Parser key "([\w.-]+)": ')
VALUE = re.compile(r"(?:Got|Given) value: (.+?)(?=\. Got value| Given value| - |$)")
CLASS_NAME = re.compile(r"import path string: (.+?)(?=\. Got value| Given value| - |$)")
INNER_VALUE = re.compile(r"NestedArg\(key='([\w.]*)', val='?(.*?)'?\)")
WORDS = re.compile(r"Literal\[(.+?)\]")
TYPE = re.compile(r"Expected a (?:<class '(?:\w+\.)*(?!NoneType)(\w+)'>|(tuple with \d+ elements))")
BASE = re.compile(r"(?:<class '|, )([\w.]+)\.(\w+)(?:'>|\])")


def parse(parser: ArgumentParser, arguments: list[str], command: ArgumentParser | None = None) -> Namespace:
    """Parse the arguments of a command.

    Args:
        parser: Parser of the command, with ``exit_on_error=False``.
        arguments: Arguments of the command line.
        command: The subparser with the command's options, if ``parser`` has subcommands. The names of its options are
            suggested for misspelt names.

    Returns:
        The options. Their classes are not yet built.

    Raises:
        UserError: If an argument is wrong.
    """
    try:
        config = parser.parse_args(_with_values(arguments, parser))
    except (ArgumentError, TypeError, ValueError) as error:
        message = _error_message(" ".join(str(error).split()), command or parser)
        location = user_location(error)
        raise UserError(f"{message} ({location})" if location else message) from error
    options = config.get(str(config.get("subcommand")), config)  # options of `fit` are below the subcommand
    for action in (command or parser)._actions:
        if isinstance(action, RenamedOption) and (value := options.pop(action.dest, None)) is not None:
            options[action.name] = options[action.name] or value  # of a file with the earlier name
    for option in ("trainer", "model.position", "model.optimizer", "model.schedule"):
        # the parser also accepts lists and functions; a checkpoint may name only classes, so could not be read again
        if isinstance(value := options.get(option), list) or inspect.isroutine(value):
            raise UserError(f"{option}: got {value}, expected a mapping of options, or a class")
    return config


def _with_values(arguments: list[str], parser: ArgumentParser) -> list[str]:
    """Add ``true`` after a switch without a value, which would otherwise take a positional argument that follows it."""
    actions = [action for action in parser._actions if action.nargs == "?" and action.const is True]
    has_positional = not all(action.option_strings for action in parser._actions)
    switches = {option for action in actions for option in action.option_strings if has_positional}
    followed = zip(arguments, [*arguments, ""][1:], strict=True)
    return [
        part
        for argument, value in followed
        for part in ([argument, "true"] if argument in switches and value.lower() not in BOOLEANS else [argument])
    ]


def _error_message(message: str, parser: ArgumentParser) -> str:
    """Return a clearer form of a message of the parser, with suggestions for misspelt names."""
    misspelt = []
    names = cast("Any", re.findall(r"--([\w.-]+)", parser.format_help()))
    if message.startswith("unrecognized arguments: "):
        misspelt = re.findall(r" --([\w.-]+)", message)
    elif message.startswith(REQUIRED):  # the parser puts a subcommand before the names of its options
        required = message.removeprefix(REQUIRED).replace(f"{parser.prog.split()[-1]}.", "").split(", ")
        return REQUIRED + ", ".join(f"--{name}" if name in names else name for name in required)
    elif (option := OPTION.search(message)) and option[1] not in KEY.findall(message):
        misspelt = [option[1]]
        message = re.sub("^Option '(.+)' is not accepted$", r"\1 is not an option of this command", message)
        # the message names the class before its option, or after it if the class is a strategy
        if kinds := CLASS.findall(message[: option.start()])[::-1] + CLASS.findall(message):
            message = f"{option[1]} is not an option of {kinds[0]}"
            names = inspect.signature(cast("Any", locate(kinds[0]))).parameters
    elif (missing := MISSING.search(message)) and (kinds := CLASS.findall(message)):
        option_name = ".".join(dict.fromkeys(KEY.findall(message)))
        return f"{option_name}: {kinds[0].rpartition('.')[2]}: {missing[0]}; add them as --{option_name}.NAME"
    elif strategy := NO_STRATEGY.search(message):
        message = f"model.position: got {strategy[1]}, expected a subclass of kerple.positions.Position"
    elif len(KEY.findall(message)) == 1 and "Namespace(" not in message and (strategy := STRATEGY.search(message)):
        reason, value = strategy.groups()
        if (name := value.removeprefix("kerple.positions.")).isidentifier():
            return str(unknown("model.position", name, import_module("kerple.positions").names()))
        message = f"model.position: got {value}: {reason or 'expected the name of a strategy or module.Class'}"
    else:
        message = _value_message(message)
    if nearest := [match for name in misspelt for match in _nearest(name, names)]:
        return f"{message}; did you mean {' and '.join(nearest)}?"
    return f"{message}; remove it, or correct its name" if misspelt else message


def _value_message(message: str) -> str:
    """Return the full name of an option, its value and the accepted values, from a message about a wrong value."""
    if not (keys := KEY.findall(message)):
        return message
    option, reason = ".".join(dict.fromkeys(keys)), KEY.split(message)[-1]  # the reason for the innermost option
    class_names = CLASS_NAME.findall(reason)
    values = [value for value in (*VALUE.findall(reason), *class_names) if "Namespace(" not in value]
    value = INNER_VALUE.sub(r"\1=\2", values[0] if values else "").removeprefix(f"{keys[-1]}=")
    words = list(dict.fromkeys(re.findall(r"[\w-]+", " ".join(WORDS.findall(reason)))))
    types = {"".join(found) for found in TYPE.findall(reason)}
    bases = [getattr(sys.modules.get(module), name, None) for module, name in BASE.findall(message)]
    names = [*words, *(kind.__name__ for base in bases if isinstance(base, type) for kind in subclasses(base))]
    if value in class_names and (nearest := _nearest(value, names)):
        return f"{option}: got {value}, did you mean {nearest[0]}?"
    if words and not class_names:
        return str(unknown(option, value, words))
    expected = " or ".join([*words, *sorted(types), *(["the name of a class"] if class_names else [])])
    if value and expected:
        return f"{option}: got {value}, expected {expected}"
    return f"{option}: {re.split(r'[.]? (?:Got|Given) value', reason.rpartition('callable class: ')[2])[0]}"


def _nearest(name: str, names: Collection[str]) -> list[str]:
    """Return a list of at most one name: the shortest that begins with ``name``, or else the most similar one."""
    longer = sorted((other for other in names if other.startswith(name)), key=len)
    return longer[:1] or get_close_matches(name, names, 1)

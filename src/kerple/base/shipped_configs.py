"""Search for the configurations that this package ships, from any working folder."""

from pathlib import Path

import kerple

FILE_OPTIONS = ("--config", "-c", "--model", "--data", "--trainer")  # whose value may be a file


def config_path(path: str) -> str:
    """The path of a configuration: the user's own file if it exists, else the shipped file of that name, else ``path``.

    For example, ``configs/demo.yaml`` is the shipped demo in any folder that has no such file.
    """
    if Path(path).exists() or Path(path).parts[:1] != ("configs",):
        return path
    package = Path(kerple.__file__).parent
    for root in (package, package.parents[1]):  # as installed, or as checked out
        if (root / path).is_file():
            return str(root / path)
    return path


def with_shipped_configs(arguments: list[str]) -> list[str]:
    """The arguments of a command line, with the file that `config_path` returns for each FILE of ``--config FILE``."""
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

"""Search for the configurations that this package ships, from any working folder."""

from pathlib import Path

import kerple

OPTIONS = ("--config", "-c")


def found(path: str) -> str:
    """The path of the user's own file, or else of the shipped file of that name, or else ``path`` itself.

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
    """The arguments of a command line with each ``--config FILE`` replaced by the file that `found` returns."""
    replaced: list[str] = []
    for argument in arguments:
        option, equals, value = argument.partition("=")
        if replaced and replaced[-1] in OPTIONS:
            replaced.append(found(argument))
        elif equals and option in OPTIONS:
            replaced.append(f"{option}={found(value)}")
        else:
            replaced.append(argument)
    return replaced

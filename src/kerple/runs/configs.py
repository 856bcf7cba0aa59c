"""Where the configurations that this package ships are found, from whichever folder a command is started in."""

from pathlib import Path

import kerple

OPTIONS = ("--config", "-c")


def found(path: str) -> str:
    """The file a user means by ``path``: their own, else the shipped one of that name, else ``path`` as it is.

    ``configs/demo.yaml`` names the shipped demo in any folder that has no such file of its own.
    """
    if Path(path).exists() or Path(path).parts[:1] != ("configs",):
        return path
    package = Path(kerple.__file__).parent
    for root in (package, package.parents[1]):  # as installed, or as checked out
        if (root / path).is_file():
            return str(root / path)
    return path


def with_shipped_configs(arguments: list[str]) -> list[str]:
    """The command line with every ``--config FILE`` replaced by the file that is meant."""
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

"""Import of all modules of a package, whose classes then have names on the command line."""

from contextlib import suppress
from importlib import import_module
from pkgutil import iter_modules

from kerple.base.errors import UserError


def import_modules(package: str) -> None:
    """Import every module of a package; one whose optional package is not installed is left out."""
    for module in iter_modules(import_module(package).__path__, f"{package}."):
        with suppress(UserError):
            import_module(module.name)

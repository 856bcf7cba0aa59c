"""Import of all modules of a package, whose classes then have names on the command line."""

from contextlib import suppress
from importlib import import_module
from pkgutil import iter_modules

from kerple.base.errors import UserError


def import_modules(package: str, skip: tuple[str, ...] = ()) -> None:
    """Import every module of a package but those of these names; one that lacks an optional package is left out."""
    for module in iter_modules(import_module(package).__path__):
        with suppress(UserError):
            if module.name not in skip:
                import_module(f"{package}.{module.name}")

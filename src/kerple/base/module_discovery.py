"""Import of all modules of a package. Commands accept the short name of a class only if its module is imported."""

from contextlib import suppress
from importlib import import_module
from pkgutil import iter_modules

from kerple.base.errors import UserError


def import_modules(package: str, skip: tuple[str, ...] = ()) -> None:
    """Import the modules of a package, except those in ``skip`` and those whose optional dependencies are missing."""
    names = {module.name for module in iter_modules(import_module(package).__path__)}
    assert names >= set(skip), f"{package} has no module for each of {skip}"
    for name in sorted(names.difference(skip)):
        with suppress(UserError):  # a module raises it if an optional dependency is missing
            import_module(f"{package}.{name}")

"""Measurements and callbacks: importing this module imports every module that may define one.

A measurement or a callback has a name on the command line once its module is imported, so a new one needs a file and
nothing else.
"""

from contextlib import suppress
from importlib import import_module
from pkgutil import iter_modules

from kerple import measure, training
from kerple.base.errors import UserError

for package in (measure, training):
    for module in iter_modules(package.__path__, f"{package.__name__}."):
        with suppress(UserError):  # of a module whose optional package is not installed
            import_module(module.name)

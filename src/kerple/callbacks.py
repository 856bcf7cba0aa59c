"""Callbacks, which measure, save and watch a run: importing this module imports every module that may define one.

A callback has a name on the command line once its module is imported, so a new one needs a file and nothing else.
"""

from importlib import import_module
from pkgutil import iter_modules

from kerple import analyses, evaluation, tasks, training

for package in (analyses, evaluation, tasks, training):
    for module in iter_modules(package.__path__, f"{package.__name__}."):
        import_module(module.name)

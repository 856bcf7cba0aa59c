"""Measurements and callbacks: importing this module imports every module that may define one.

A measurement or a callback has a name on the command line once its module is imported, so a new one needs a file and
nothing else.
"""

from kerple.base.imports import import_modules

for package in ("kerple.measure", "kerple.training"):
    import_modules(package)

"""Lightning callbacks: they measure, save and watch a run. All of this package's modules are imported, so that the
command line knows each callback by its class name alone.
"""

import inspect
from importlib import import_module
from pkgutil import iter_modules

from pytorch_lightning import Callback

for _module in iter_modules(__path__):
    for _name, _value in vars(import_module(f"{__name__}.{_module.name}")).items():
        if inspect.isclass(_value) and issubclass(_value, Callback) and _value.__module__.startswith(__name__):
            globals()[_name] = _value

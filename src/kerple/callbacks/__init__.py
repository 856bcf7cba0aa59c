"""What hooks evaluation into Lightning: modules beside this one are imported, so their callbacks have short names."""

import inspect
from importlib import import_module
from pkgutil import iter_modules

from pytorch_lightning import Callback

for _module in iter_modules(__path__):
    for _name, _value in vars(import_module(f"{__name__}.{_module.name}")).items():
        if inspect.isclass(_value) and issubclass(_value, Callback) and _value.__module__.startswith(__name__):
            globals()[_name] = _value

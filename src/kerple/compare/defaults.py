"""Default values of options.

An option that was added after a run has no value in the configuration of that run. As long as it has its default value
now, the two configurations are the same.
"""

from importlib import import_module
from typing import Any

from jsonargparse._parameter_resolvers import get_signature_parameters


def is_default(config: dict[str, Any], key: str) -> bool:
    """Whether an option has the default value that the signature of its class gives it."""
    owner, name = _owner(config, key)
    options = {option.name: option for option in get_signature_parameters(owner)} if owner is not None else {}
    if name not in options:
        return False
    default = options[name].default
    return config[key] == (list(default) if isinstance(default, tuple) else default)


def _owner(config: dict[str, Any], key: str) -> tuple[type | None, str]:
    """The class to which an option belongs, or None, and the option's name in its signature."""
    from pytorch_lightning import Trainer  # imported only for an option that a record lacks

    from kerple.training.language_model import LanguageModel

    parent, separator, name = key.rpartition(".init_args.")
    if not separator:
        section, _, name = key.partition(".")
        return {"model": LanguageModel, "trainer": Trainer}.get(section), name
    path = config.get(f"{parent}.class_path")
    if path is None:
        return None, name
    module, _, attribute = path.rpartition(".")
    return getattr(import_module(module), attribute), name

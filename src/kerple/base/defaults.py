"""Default values of options.

An option that was added after a run has no value in the configuration of that run. As long as it has its default value
now, the two configurations are the same.
"""

from importlib import import_module
from typing import Any

from jsonargparse._parameter_resolvers import get_signature_parameters

SECTIONS = {"model": "kerple.training.language_model.LanguageModel", "trainer": "pytorch_lightning.Trainer"}


def is_default(config: dict[str, Any], key: str) -> bool:
    """Whether an option has the default value that the signature of its class gives it."""
    owner, name = _owner(config, key)
    if owner is None:
        return False
    module, _, attribute = owner.rpartition(".")
    options = {option.name: option for option in get_signature_parameters(getattr(import_module(module), attribute))}
    if name not in options:
        return False
    default = options[name].default
    return config[key] == (list(default) if isinstance(default, tuple) else default)


def _owner(config: dict[str, Any], key: str) -> tuple[str | None, str]:
    """Import path of the class to which an option belongs, or None, and the option's name in its signature."""
    parent, separator, name = key.rpartition(".init_args.")
    if separator:
        return config.get(f"{parent}.class_path"), name
    section, _, name = key.partition(".")
    return SECTIONS.get(section), name

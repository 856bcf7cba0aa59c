"""Resolved configurations of runs with dotted keys, and their differences."""

import json
import re
from importlib import import_module
from typing import Any

from jsonargparse._parameter_resolvers import get_signature_parameters

# options that do not change the numbers of a run: where data is read (its checksum is compared instead), where and how
# often a run writes, and which packages it may import
LOCATIONS = re.compile(
    r"trust|data\.(init_args\.)?(corpus|directory|workers|prepare_workers|prepare_engine|cache)"
    r"|trainer\.(default_root_dir|log_every_n_steps)|.*(save_dir|dirpath)"
)
SECTIONS = {"model": "kerple.training.language_model.LanguageModel", "trainer": "pytorch_lightning.Trainer"}


def flat(config: dict[str, Any]) -> dict[str, Any]:
    """Flatten a nested configuration to one level of dotted keys.

    The keys of objects in a list, such as callbacks, are their class names. Values are converted to JSON and back.
    """
    flattened: dict[str, Any] = {}
    for key, value in config.items():
        if isinstance(value, list) and any(isinstance(item, dict) for item in value):
            named = {str(item.get("class_path", i)).rsplit(".", 1)[-1]: item for i, item in enumerate(value)}
            value = named if len(named) == len(value) else value
        if isinstance(value, dict) and value:
            flattened |= {f"{key}.{inner}": leaf for inner, leaf in flat(value).items()}
        else:
            flattened[key] = value
    return json.loads(json.dumps(flattened))


def configured_length(config: dict[str, Any]) -> int | None:
    """Training length in a configuration with dotted keys, or None if its data has no such option."""
    keys = ("data.init_args.train_length", "data.train_length", "data.init_args.length", "data.length")
    return next((config[key] for key in keys if config.get(key) is not None), None)


def differences(written: dict[str, Any], resolved: dict[str, Any]) -> list[str]:
    """Describe each option that differs between two configurations, with both values.

    Args:
        written: Configuration of a finished run, with dotted keys. It may have options that ``resolved`` lacks.
        resolved: Configuration that the comparison has now. If an option is ``auto`` in it, any value is accepted.
    """
    before, now = with_class_names(written), with_class_names(resolved)
    keys = [*now, *(key for key in before if key.startswith("trainer.callbacks.") and key not in now)]
    return [
        f"{key}: {before.get(key)!r} -> {now.get(key)!r}"
        for key in keys
        if before.get(key) != now.get(key)
        and now.get(key) != "auto"
        and not LOCATIONS.fullmatch(key)
        and not (key not in before and is_default(resolved, key))  # an option that is newer than the run
    ]


def with_class_names(config: dict[str, Any]) -> dict[str, Any]:
    """A configuration in which class names replace the import paths of this package, and strings replace infinities."""
    text = re.sub(r'"kerple\.(?:\w+\.)*(\w+)"', r'"\1"', json.dumps(config))
    return json.loads(text, parse_constant=str)


def is_default(config: dict[str, Any], key: str) -> bool:
    """Whether an option has the default value in the signature of its class.

    An option that is newer than a run is not in the run's configuration. If it has its default value now, the two
    configurations are the same.
    """
    parent, separator, name = key.rpartition(".init_args.")
    section, _, option = key.partition(".")
    path = config.get(f"{parent}.class_path") if separator else SECTIONS.get(section)
    if path is None:
        return False
    module, _, attribute = path.rpartition(".")  # imported here, because Lightning takes seconds
    options = {known.name: known for known in get_signature_parameters(getattr(import_module(module), attribute))}
    if (name := name if separator else option) not in options:
        return False
    default = options[name].default
    return config[key] == (list(default) if isinstance(default, tuple) else default)

"""Resolved configurations of runs with dotted keys, and their differences."""

import json
import re
from pkgutil import resolve_name
from typing import Any

from jsonargparse._parameter_resolvers import get_signature_parameters

# Options that do not change the results of a run: the place, preparation and loading of its data, the place and
# frequency of its output, and the packages from which it may import classes. The data is compared by its checksum.
STORAGE_OPTIONS = re.compile(
    r"trust|data\.(init_args\.)?(corpus|directory|workers|prepare_workers|prepare_engine|cache|cache_gb)"
    r"|trainer\.(default_root_dir|log_every_n_steps)|.*(save_dir|dirpath)"
)
# options for folders and files of a run, and for trusted packages; run_dir is the earlier name of output
FOLDER_OPTIONS = ("output", "run_dir", "logs", "experiment", "ckpt_path", "config", "trust")
# values of removed options of strategies with which a strategy was as it is today: PaTH's kernel of one token
WITHOUT_EFFECT = {"convolution": 1}
# option of runs from the time when `data.sections` was the number of parts of the corpus; 1 was the whole corpus
EARLIER_SECTIONS = "data.init_args.prepare_engine"
# options of the Trainer for which 1 is one batch and 1.0 is all batches
NUMBER_OR_FRACTION = re.compile(r"(trainer\.)?(limit_\w+_batches|overfit_batches|val_check_interval)")
# class whose parameters are the options of a section; it is imported only when needed, because Lightning takes seconds
SECTIONS = {"model": "kerple.training.language_model.LanguageModel", "trainer": "pytorch_lightning.Trainer"}


def flat(config: dict[str, Any]) -> dict[str, Any]:
    """Flatten a nested configuration to one level of dotted keys.

    The items of a list of objects, such as callbacks, have their class names as keys, unless two have the same class.
    Values are converted to JSON and back, which replaces tuples by lists, and dates by strings.
    """
    flattened: dict[str, Any] = {}
    for key, value in config.items():
        if isinstance(value, list) and any(isinstance(item, dict) for item in value):
            named = {str(item.get("class_path", i)).rsplit(".", 1)[-1]: item for i, item in enumerate(value)}
            value = named if len(named) == len(value) else value  # two of one class: the list stays one value
        if isinstance(value, dict) and value:
            flattened |= {f"{key}.{inner}": leaf for inner, leaf in flat(value).items()}
        else:
            flattened[key] = value
    return json.loads(json.dumps(flattened, default=str))


def configured_length(config: dict[str, Any]) -> int | None:
    """The training length in a configuration with dotted keys; None if its data has no option for it."""
    keys = ("data.init_args.train_length", "data.train_length", "data.init_args.length", "data.length")
    return next((config[key] for key in keys if config.get(key) is not None), None)


def differences(written: dict[str, Any], resolved: dict[str, Any]) -> list[str]:
    """Describe each option that differs between two configurations as ``option: old value -> new value``.

    If an option was an object or a mapping and is none now, its old value is the class path or the mapping.

    Some differences are left out:

    - options of `STORAGE_OPTIONS`,
    - options that only ``written`` has, except those of callbacks and of the strategy; a value in `WITHOUT_EFFECT` of
      a removed option of a strategy is no difference,
    - options that only ``resolved`` has, if they have their default value, because they are newer than the run,
    - options that are ``auto`` in ``resolved``.

    Args:
        written: Configuration of an existing run, with dotted keys.
        resolved: Configuration that the comparison has now, with dotted keys.
    """
    before, now = with_class_names(written), with_class_names(resolved)
    if EARLIER_SECTIONS in before and before.get("data.init_args.sections") == 1:
        del before["data.init_args.sections"]
    objects = {key: value for key in now if key not in before and (value := _object(before, key)) is not None}
    kept = ("trainer.callbacks.", "model.position.init_args.")
    removed = [key for key in before if key.startswith(kept) and key not in now]
    removed = [key for key in removed if not key.startswith(tuple(f"{name}." for name in objects))]
    keys = [*now, *(k for k in removed if (k.rpartition(".")[2], before[k]) not in WITHOUT_EFFECT.items())]
    before |= objects
    return [
        f"{key}: {before.get(key)!r} -> {now.get(key)!r}"
        for key in keys
        if not same_value(key, before.get(key), now.get(key))
        and now.get(key) != "auto"
        and not STORAGE_OPTIONS.fullmatch(key)
        and (key in before or not is_default(resolved, key))
    ]


def same_value(option: str, one: Any, other: Any) -> bool:
    """Return whether two values of an option are equal. For `NUMBER_OR_FRACTION`, 1 and 1.0 are not."""
    if isinstance(one, dict) and isinstance(other, dict):
        return one.keys() == other.keys() and all(same_value(name, one[name], other[name]) for name in one)
    return one == other and (one != 1 or type(one) is type(other) or not NUMBER_OR_FRACTION.fullmatch(option))


def _object(config: dict[str, Any], key: str) -> Any:
    """Return the class path or the mapping that an option has in dotted keys; None if no key is below the option."""
    options = {name.removeprefix(f"{key}."): value for name, value in config.items() if name.startswith(f"{key}.")}
    return options.get("class_path", options or None)


def with_class_names(config: dict[str, Any]) -> dict[str, Any]:
    """Replace import paths of this package's classes by their names, and infinities and NaN by strings."""
    return json.loads(re.sub(r'"kerple\.(?:\w+\.)*(\w+)"', r'"\1"', json.dumps(config)), parse_constant=str)


def is_default(config: dict[str, Any], key: str) -> bool:
    """Whether an option has the default value in the signature of its class; False if its class is not known."""
    parent, separator, name = key.rpartition(".init_args.")
    path = config.get(f"{parent}.class_path")
    if not separator:
        section, _, name = key.partition(".")
        path = SECTIONS.get(section)
    if path is None:
        return False
    parameters = get_signature_parameters(resolve_name(path))
    defaults = {p.name: list(p.default) if isinstance(p.default, tuple) else p.default for p in parameters}
    return name in defaults and config[key] == defaults[name]

"""Old names of options in checkpoints and in the records of comparisons, and weights that are no longer there.

Old modules of classes are in `kerple.cli.allowed_classes.RENAMED`.
"""

import re
from collections.abc import Container, Iterable
from typing import Any

OLD_SHARING = "share_across_layers"  # until 0.2 an option of some strategies, now model.per_layer for all
OLD_VALIDATION, NEW_VALIDATION = "val_examples", "validation_examples"  # of TaskData, until 0.2 and now

# until 0.2 each layer had a table of embeddings, though only the first layer's is read
UNREAD = re.compile(r"(network\.)?positions\.[1-9]\d*\.(.+\.)?table")


def unread(stored: Iterable[str], own: Container[str]) -> list[str]:
    """Names of stored weights that the model, whose weights are ``own``, had in older versions and never read."""
    return [name for name in stored if isinstance(name, str) and name not in own and UNREAD.fullmatch(name)]


def as_today(config: dict[str, Any]) -> dict[str, Any]:
    """Rename the old options in a stored configuration, in place, and return it."""
    model = config.get("model")
    if isinstance(model, dict):
        shared = [value for value in _taken(model.get("position"), OLD_SHARING) if value is not None]
        if shared and model.get("per_layer") is None:
            model["per_layer"] = not shared[0]
    data = config.get("data")
    if isinstance(data, dict):
        for value in _taken(data, OLD_VALIDATION):
            data.setdefault("init_args", {})[NEW_VALIDATION] = value
    return config


def options_as_today(config: dict[str, Any]) -> dict[str, Any]:
    """A flat configuration, as comparisons keep it, with the names that options have today."""
    place = "data.init_args."
    return {place + NEW_VALIDATION if key == place + OLD_VALIDATION else key: value for key, value in config.items()}


def _taken(node: Any, key: str) -> list[Any]:
    """Remove a key everywhere in nested lists and mappings, and return its values, outermost first."""
    if isinstance(node, list):
        return [value for item in node for value in _taken(item, key)]
    if not isinstance(node, dict):
        return []
    own = [node.pop(key)] if key in node else []
    return own + [value for item in node.values() for value in _taken(item, key)]

"""Configurations as one level of dotted keys, so that reports and comparisons can tell how two differ."""

import json
from typing import Any


def flatten(config: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    """Join nested keys by dots. Lists and empty mappings count as values."""
    flat: dict[str, Any] = {}
    for key, value in config.items():
        if isinstance(value, dict) and value:
            flat |= flatten(value, f"{prefix}{key}.")
        else:
            flat[f"{prefix}{key}"] = value
    return flat


def flat(config: dict[str, Any]) -> dict[str, Any]:
    """Flatten a nested configuration, also lists of objects (callbacks), whose keys are their class names.

    Values are as JSON reads them back.
    """
    flattened: dict[str, Any] = {}
    for key, value in flatten(config).items():
        if isinstance(value, list) and any(isinstance(item, dict) for item in value):
            named = {str(item.get("class_path", i)).rsplit(".", 1)[-1]: item for i, item in enumerate(value)}
            flattened |= flatten(named, f"{key}.") if len(named) == len(value) else {key: value}
        else:
            flattened[key] = value
    return json.loads(json.dumps(flattened))

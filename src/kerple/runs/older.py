"""Translation of configurations that older versions stored in checkpoints."""

from typing import Any

OLD_SHARING = "share_across_layers"  # until 0.2 an option of some strategies, now model.per_layer for all


def as_today(config: dict[str, Any]) -> dict[str, Any]:
    """Rename the old options in a stored configuration, in place, and return it."""
    model = config.get("model")
    if isinstance(model, dict):
        shared = [value for value in _taken(model.get("position"), OLD_SHARING) if value is not None]
        if shared and model.get("per_layer") is None:
            model["per_layer"] = not shared[0]
    return config


def _taken(node: Any, key: str) -> list[Any]:
    """Remove a key everywhere in nested lists and mappings, and return its values, outermost first."""
    if isinstance(node, list):
        return [value for item in node for value in _taken(item, key)]
    if not isinstance(node, dict):
        return []
    own = [node.pop(key)] if key in node else []
    return own + [value for item in node.values() for value in _taken(item, key)]

"""What older versions stored in a checkpoint's configuration, said as this one reads it."""

from typing import Any

OLD_SHARING = "share_across_layers"  # an option of some strategies until 0.2: now model.per_layer, of all


def as_today(config: dict[str, Any]) -> dict[str, Any]:
    """A stored configuration with the names of today; what it does not have to change is left as it is."""
    model = config.get("model")
    if isinstance(model, dict):
        shared = [value for value in _taken(model.get("position"), OLD_SHARING) if value is not None]
        if shared and model.get("per_layer") is None:
            model["per_layer"] = not shared[0]
    return config


def _taken(node: Any, key: str) -> list[Any]:
    """Values of a key anywhere inside, outermost first, taken out."""
    if isinstance(node, list):
        return [value for item in node for value in _taken(item, key)]
    if not isinstance(node, dict):
        return []
    own = [node.pop(key)] if key in node else []
    return own + [value for item in node.values() for value in _taken(item, key)]

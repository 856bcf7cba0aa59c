"""Reading of JSON and YAML files that contain a mapping."""

import json
from pathlib import Path
from typing import Any

import yaml

from kerple.base.errors import UserError


def read_mapping(path: Path) -> dict[str, Any]:
    """Return the content of a JSON or YAML file. Only files whose names end in .json are read as JSON.

    Raises:
        UserError: If the file cannot be read, or does not contain a mapping.
    """
    try:
        text = path.read_text(encoding="utf-8")
        content = json.loads(text) if path.suffix == ".json" else yaml.safe_load(text)
    except (OSError, ValueError, RecursionError, yaml.YAMLError) as error:
        raise UserError(f"{path}: cannot be read ({error}); correct the file, or give another one") from error
    if not isinstance(content, dict):
        raise UserError(f"{path}: got {text!r:.60}, expected a mapping of names to values, such as `name: value`")
    return content

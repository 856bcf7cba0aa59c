"""Reading of JSON and YAML files that hold a mapping."""

import json
from pathlib import Path
from typing import Any

import yaml

from kerple.base.errors import UserError


def read_mapping(path: Path) -> dict[str, Any]:
    """The content of a file, which is read as JSON if its name ends in .json, and else as YAML.

    Raises:
        UserError: The file cannot be read, or does not hold a mapping.
    """
    try:
        text = path.read_text(encoding="utf-8")
        content = json.loads(text) if path.suffix == ".json" else yaml.safe_load(text)
    except (OSError, ValueError, RecursionError, yaml.YAMLError) as error:
        raise UserError(f"{path}: cannot be read ({error})") from error
    if not isinstance(content, dict):
        raise UserError(f"{path}: holds a {type(content).__name__}, expected a mapping, such as `name: value`")
    return content

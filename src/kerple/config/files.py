"""Files with options: reading of mappings from YAML and JSON, and paths of the configurations in this package."""

import json
import os
from itertools import pairwise
from pathlib import Path
from typing import Any

import kerple
from kerple.base.errors import UserError, require

FILE_OPTIONS = ("--config", "-c", "--model", "--data", "--trainer")  # their values may be files


def read_mapping(path: Path) -> dict[str, Any]:
    """Return the content of a JSON or YAML file. Only files whose names end in .json are read as JSON.

    Raises:
        UserError: If the file cannot be read, or does not contain a mapping.
    """
    import yaml  # not at the top, because the entry point imports this file for its paths, and its help needs no YAML

    try:
        text = path.read_text(encoding="utf-8")
        content = json.loads(text) if path.suffix == ".json" else yaml.safe_load(text)
    except (OSError, ValueError, RecursionError, yaml.YAMLError) as error:
        raise UserError(f"{path}: cannot be read ({error}); correct the file, or give another one") from error
    expected = "a mapping of names to values, such as `name: value`"
    require(isinstance(content, dict), str(path), f"{text!r:.60}", expected)
    return content


def config_path(path: str) -> str:
    """Return ``path``, or this path in the package if ``path`` begins with ``configs`` and does not exist.

    For example, ``configs/demo.yaml`` is the demo of this package in any folder without such a file.
    """
    if os.path.exists(path) or Path(path).parts[:1] != ("configs",):
        return path
    package = Path(kerple.__file__).parent
    files = (package / path, package.parents[1] / path)  # of an installed package, or of a checkout
    return next((str(file) for file in files if file.is_file()), path)


def with_shipped_configs(arguments: list[str]) -> list[str]:
    """Return the arguments of a command line, with the values of `FILE_OPTIONS` replaced by `config_path`."""
    replaced = []
    for previous, argument in pairwise(["", *arguments]):
        option, equals, value = argument.partition("=")
        if previous in FILE_OPTIONS:
            replaced.append(config_path(argument))
        else:
            replaced.append(f"{option}={config_path(value)}" if equals and option in FILE_OPTIONS else argument)
    return replaced

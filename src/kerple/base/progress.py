"""The progress of a run in a small JSON file, which the run writes and `compare` reads."""

import json
import math
from contextlib import suppress
from pathlib import Path
from typing import Any

from kerple.base.atomic import write

FILE = "progress.json"  # in the folder of a fit or a test


def note(path: Path, **content: Any) -> None:
    """Replace the content of the file atomically. Errors of the disk are ignored: a run does not need this file."""
    with suppress(OSError):
        write(path, json.dumps(content), durable=False)


def read(path: Path) -> dict[str, Any]:
    """The content of the file, empty if there is none."""
    try:
        content = json.loads(path.read_text())
    except (OSError, ValueError):
        return {}
    return content if isinstance(content, dict) else {}


def duration(seconds: float) -> str:
    """A number of seconds as text, such as 45 s, 3 min or 2 h 05 min."""
    if seconds < 90:
        return f"{seconds:.0f} s"
    minutes = round(seconds / 60)
    return f"{minutes} min" if minutes < 90 else f"{minutes // 60} h {minutes % 60:02} min"


def line(content: dict[str, Any]) -> str:
    """The content of the file as one line of text."""
    if "done" not in content:
        return str(content.get("doing", "starting"))
    unit = "step" if content["doing"] == "training" else "block"
    position = math.ceil(content["done"])  # a long block can be done in part
    parts = [f"{content['doing']}, {unit} {position:,} of {content['of']:,}" if content["of"] > 0 else content["doing"]]
    parts += [f"{duration(content['left'])} left"] if content.get("left", 0) >= 0.5 else []  # none at the end
    parts += [f"loss {content['loss']:.3f}"] if "loss" in content else []
    parts += [f"{content['tokens_per_second']:,.0f} tokens/s"] if "tokens_per_second" in content else []
    return ", ".join(parts)

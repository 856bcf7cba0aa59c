"""The progress of a run in a small JSON file, which the run writes and `compare` reads."""

import json
import math
from contextlib import suppress
from pathlib import Path
from typing import Any

from kerple.base.atomic import write
from kerple.base.errors import UserError
from kerple.base.mapping import read_mapping

FILE = "progress.json"  # in the folder of a fit or a test


def write_progress(path: Path, **content: Any) -> None:
    """Replace the content of the file atomically. Errors of the disk are ignored: a run does not need this file.

    Args:
        path: The file.
        **content: ``stage``, such as training; the steps or blocks that are ``done``, and their ``total``; those done
            since this start, ``done_since_start``, and the ``seconds`` for them; and, as far as they are known,
            ``seconds_left``, ``loss`` and ``tokens_per_second``.
    """
    with suppress(OSError):
        write(path, json.dumps(content), durable=False)


def read_progress(path: Path) -> dict[str, Any]:
    """The content of the file, empty if there is none."""
    try:
        return read_mapping(path)
    except UserError:
        return {}


def duration(seconds: float) -> str:
    """A number of seconds as text, such as 45 s, 3 min or 2 h 05 min."""
    if seconds < 90:
        return f"{seconds:.0f} s"
    minutes = round(seconds / 60)
    return f"{minutes} min" if minutes < 90 else f"{minutes // 60} h {minutes % 60:02} min"


def line(content: dict[str, Any]) -> str:
    """The content of the file as one line of text."""
    if "done" not in content:
        return str(content.get("stage", "starting"))
    unit = "step" if content["stage"] == "training" else "block"
    position = math.ceil(content["done"])  # a long block can be done in part
    parts = [content["stage"]]
    parts += [f"{unit} {position:,} of {content['total']:,}"] if content["total"] > 0 else []
    left = content.get("seconds_left", 0)
    parts += [f"{duration(left)} left"] if left >= 0.5 else []  # none at the end
    parts += [f"loss {content['loss']:.3f}"] if "loss" in content else []
    parts += [f"{content['tokens_per_second']:,.0f} tokens/s"] if "tokens_per_second" in content else []
    return ", ".join(parts)

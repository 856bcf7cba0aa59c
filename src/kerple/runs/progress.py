"""How far a run is, in a small file beside it: written by the run, read by whoever waits for it."""

import json
import os
from pathlib import Path
from typing import Any

VARIABLE = "KERPLE_PROGRESS"  # of the environment: the file a run writes to, none if it is not set


def note(path: Path, **what: Any) -> None:
    """Replace what the file says. It is whole at any moment; a full disk is no reason to end a run."""
    fresh = path.with_name(f"{path.name}.{os.getpid()}")
    try:
        fresh.write_text(json.dumps(what))
        fresh.replace(path)
    except OSError:
        fresh.unlink(missing_ok=True)


def read(path: Path) -> dict[str, Any]:
    """What the file says, nothing if there is none."""
    try:
        content = json.loads(path.read_text())
    except (OSError, ValueError):
        return {}
    return content if isinstance(content, dict) else {}


def duration(seconds: float) -> str:
    """Seconds as a person says them: 45 s, 3 min, 2 h 05 min."""
    if seconds < 90:
        return f"{seconds:.0f} s"
    minutes = round(seconds / 60)
    return f"{minutes} min" if minutes < 90 else f"{minutes // 60} h {minutes % 60:02} min"


def line(told: dict[str, Any]) -> str:
    """One line of what a run tells of itself."""
    if "done" not in told:
        return str(told.get("doing", "starting"))
    unit = "step" if told["doing"] == "training" else "block"
    parts = [f"{told['doing']}, {unit} {told['done']:,} of {told['of']:,}" if told["of"] > 0 else told["doing"]]
    parts += [f"loss {told['loss']:.3f}"] if "loss" in told else []
    parts += [f"{told['tokens_per_second']:,.0f} tokens/s"] if "tokens_per_second" in told else []
    parts += [f"{duration(told['left'])} left"] if told.get("left") else []
    return ", ".join(parts)

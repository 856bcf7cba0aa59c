"""Runs as they are committed, with numbers that a test makes up."""

from collections.abc import Iterable
from pathlib import Path
from typing import Any

from kerple.evaluation import results
from kerple.evaluation.results import Row


def write(
    folder: Path, rows: Iterable[Row], cost: dict[str, Any], documents: list[int] | None = None, **config: Any
) -> None:
    """Write a run.

    Args:
        folder: Of the run: results/NAME/runs/[PART/]LABEL/seed-N.
        rows: Its sums.
        cost: What it cost.
        documents: The document of each block; None for none.
        **config: Its configuration, with underscores for dots.
    """
    results.write(folder, "extrapolation", rows, {} if documents is None else {"block_document": documents})
    _, about = results.read(folder)
    about["run"] = {"config": {"data.init_args." + key: value for key, value in config.items()}, "cost": cost}
    about["run"]["config"] |= {"trainer.max_steps": config.get("max_steps", 1)}
    results.write_about(folder, about)

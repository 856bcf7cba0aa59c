"""The page and the JSON file of a report."""

import json
import math
from dataclasses import asdict
from importlib import resources
from pathlib import Path
from typing import Any

from jinja2 import Environment, StrictUndefined

from kerple.base.atomic import write
from kerple.probe.report import Report


def write_report(report: Report, folder: Path) -> None:
    """Write ``probe.html`` and ``probe.json`` into a folder."""
    template = resources.files("kerple.probe").joinpath("probe.html.jinja").read_text(encoding="utf-8")
    environment = Environment(autoescape=True, trim_blocks=True, lstrip_blocks=True, undefined=StrictUndefined)
    folder.mkdir(parents=True, exist_ok=True)
    write(folder / "probe.html", environment.from_string(template).render(report=report))
    content = asdict(report) | {"faults": report.faults}
    checks: list[Any] = [*report.layers, *report.invariances]
    for entry, check in zip([*content["layers"], *content["invariances"]], checks, strict=True):
        entry["verdict"] = check.verdict
        if not math.isfinite(entry.get("difference") or 0):
            entry["difference"] = None
    write(folder / "probe.json", json.dumps(content, indent=1, ensure_ascii=False, allow_nan=False) + "\n")

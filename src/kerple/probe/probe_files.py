"""The page and the JSON file of a report."""

import base64
import io
import json
import math
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from matplotlib.figure import Figure

from kerple.base.atomic import write
from kerple.base.templates import render_template
from kerple.probe.report import Report


def write_report(report: Report, folder: Path) -> None:
    """Write ``probe.html`` and ``probe.json`` into a folder."""
    folder.mkdir(parents=True, exist_ok=True)
    write(folder / "probe.html", render_template("kerple.probe", "probe.html.jinja", report=report, embedded=_embedded))
    measured = [{"name": r.name, "report": r.report, "scalars": r.scalars, "tables": r.tables} for r in report.results]
    content = asdict(replace(report, results=[])) | {"faults": report.faults, "results": measured}
    checks: list[Any] = [*report.layers, *report.invariances]
    for entry, check in zip([*content["layers"], *content["invariances"]], checks, strict=True):
        entry["verdict"] = check.verdict
        if not math.isfinite(entry.get("difference") or 0):
            entry["difference"] = None
    write(folder / "probe.json", json.dumps(content, indent=1, ensure_ascii=False, allow_nan=False) + "\n")


def _embedded(figure: Figure) -> str:
    """The figure as PNG, in base64."""
    file = io.BytesIO()
    figure.savefig(file, dpi=120)
    return base64.b64encode(file.getvalue()).decode()

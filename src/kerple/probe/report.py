"""`probe_model`: all checks of one model, their report, and its page and JSON file."""

import base64
import io
import json
import math
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from itertools import groupby
from pathlib import Path
from typing import Any

import torch
from matplotlib.figure import Figure

from kerple.base.atomic import write
from kerple.base.errors import UserError
from kerple.base.templates import render_template
from kerple.measure.result import Result
from kerple.probe.invariances import Invariance, measure_invariances
from kerple.probe.measured import Verdict, measure_layers


@dataclass
class Report:
    """The report on one model.

    Args:
        model: Name of the model.
        family: Type of its configuration.
        layers: Comparison of each layer with the configuration.
        invariances: Tests of the invariances of the logits.
        results: Results of measures on text.
        text: Name of the text and sha256 of its tokens.
    """

    model: str
    family: str
    layers: list[Verdict] = field(default_factory=list)
    invariances: list[Invariance] = field(default_factory=list)
    results: list[Result] = field(default_factory=list)
    text: str = ""

    @property
    def faults(self) -> list[str]:
        """One line for each check that failed."""
        lines = [f"layer {v.layer}: {difference}" for v in self.layers for difference in v.differences]
        for i in self.invariances:
            if i.verdict == "broken":
                difference = f"logits differ by {i.difference:.3g}, more than {i.allowed:.2g} by rounding"
                lines.append(f"{i.name}: {i.reason or difference}")
        return lines

    @property
    def outcome(self) -> str:
        """The number of failed checks, as a sentence."""
        checks = len(self.layers) + len(self.invariances)
        return f"{len(self.faults) or 'no'} checks failed" if checks else "no check was run"

    @property
    def groups(self) -> Iterator[tuple[str, Verdict]]:
        """Indices of consecutive layers with equal verdicts, and the first of these verdicts."""
        for _, same in groupby(self.layers, key=lambda v: (v.expected, v.measured, v.differences, v.unknown)):
            group = list(same)
            numbers = f"{group[0].layer} to {group[-1].layer}" if group[1:] else f"{group[0].layer}"
            yield numbers, group[0]

    def summary(self) -> str:
        """The report for the terminal."""
        lines = [f"{self.model} ({self.family})"]
        for numbers, verdict in self.groups:
            lines += [f"layer {numbers}: {verdict.verdict}", f"  configuration: {verdict.expected}"]
            lines += [f"  forward pass: {verdict.measured}"] if verdict.measured else []
            lines += [f"  {line}" for line in (*verdict.differences, verdict.unknown) if line]
        for i in self.invariances:
            number = "" if i.difference is None else f", {i.difference:.2g} against {i.allowed:.2g}"
            because = i.reason or (i.by_design if i.verdict == "broken by design" else None)
            lines.append(f"{i.name}: {i.verdict}{number}{f' ({because})' if because else ''}")
        lines += [f"{result.name}: {result.report}" for result in self.results]
        return "\n".join([*lines, self.outcome])

    def write(self, folder: Path) -> None:
        """Write ``probe.html`` and ``probe.json`` into a folder."""
        folder.mkdir(parents=True, exist_ok=True)
        page = render_template("kerple.probe", "probe.html.jinja", report=self, embedded=_embedded)
        write(folder / "probe.html", page)
        invariances = [asdict(i) | {"verdict": i.verdict} for i in self.invariances]
        for entry in invariances:
            if not math.isfinite(entry["difference"] or 0):
                entry["difference"] = None
        keys = ("name", "report", "scalars", "tables")
        content = vars(self) | {
            "layers": [asdict(v) | {"verdict": v.verdict} for v in self.layers],
            "invariances": invariances,
            "results": [{key: vars(result)[key] for key in keys} for result in self.results],
            "faults": self.faults,
        }
        write(folder / "probe.json", json.dumps(content, indent=1, ensure_ascii=False, allow_nan=False) + "\n")


def probe_model(model: Any, config: Any, name: str = "", layers: bool = True, invariances: bool = True) -> Report:
    """Check the positions of a model.

    Args:
        model: A `transformers.PreTrainedModel` in evaluation mode and fp32.
        config: The configuration of its text model, as it was read from the model's files.
        name: Name of the model in the report.
        layers: Whether each layer is compared with the configuration.
        invariances: Whether the invariances are tested.

    Raises:
        UserError: If the model is not in fp32, because its rounding looks like a fault.
    """
    if model.dtype != torch.float32:
        raise UserError(f"model: got {model.dtype}, expected torch.float32; use model.float()")
    report = Report(name or type(model).__name__, config.model_type)
    report.layers = measure_layers(model, config) if layers else []
    report.invariances = measure_invariances(model, config) if invariances else []
    return report


def _embedded(figure: Figure) -> str:
    """The figure as PNG, in base64."""
    file = io.BytesIO()
    figure.savefig(file, dpi=120)
    return base64.b64encode(file.getvalue()).decode()

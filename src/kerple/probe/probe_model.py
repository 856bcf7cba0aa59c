"""`probe_model`: checks of a model's positional encoding, and `Report`: their results as text, HTML and JSON."""

import base64
import io
import json
import math
import re
from collections import Counter
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
from matplotlib.figure import Figure

from kerple.base.atomic import write
from kerple.base.errors import require
from kerple.base.templates import render_template
from kerple.measure.result import Result
from kerple.probe.invariances import Invariance, measure_invariances
from kerple.probe.layer_checks import Verdict, measure_layers
from kerple.probe.layer_figure import layer_figure

SUMMARY = ("layer", "expected", "measured", "differences", "unknown", "verdict")  # of a layer, in probe.json
RESULT = ("name", "report", "skipped", "scalars", "tables")  # of a measurement, in probe.json
NUMBER = r"\d+\.?\d*(?:e[-+]?\d+)?"


@dataclass
class Report:
    """Results of all checks of one model.

    Args:
        model: Name of the model.
        family: ``model_type`` of its configuration.
        layers: Comparison of each layer with the configuration; empty if layers are not checked.
        invariances: Results of the tests of invariances; empty if these are not tested.
        results: Results of measurements on text.
        text: Name of the text and sha256 of its tokens; empty without measurements on text.
        sources: Path or name from which the model was read, see `kerple.base.run_folder.report_directory`.
    """

    model: str
    family: str
    layers: list[Verdict] = field(default_factory=list)
    invariances: list[Invariance] = field(default_factory=list)
    results: list[Result] = field(default_factory=list)
    text: str = ""
    sources: list[str] = field(default_factory=list)

    @property
    def faults(self) -> list[str]:
        """Lines that describe the failed checks, one for each difference of a layer and each broken invariance."""
        lines = [f"layer {v.layer}: {difference}" for v in self.layers for difference in v.differences]
        for i in self.invariances:
            if i.verdict == "broken":
                difference = f"logits differ by {i.difference:.3g}, but rounding explains at most {i.allowed:.2g}"
                lines.append(f"{i.name}: {i.reason or difference}")
        return lines

    @property
    def inconclusive(self) -> bool:
        """Whether there is no fault because nothing was judged: no layer, or without layers no invariance."""
        verdicts = [checked.verdict for checked in self.layers or self.invariances]
        return bool(verdicts) and not self.faults and all(verdict.startswith("not ") for verdict in verdicts)

    @property
    def outcome(self) -> str:
        """Statement of the number of faults, and of the layers in which faults were sought."""
        if not self.layers and not self.invariances:
            return "no check was run"
        faults = f"{len(self.faults) or 'no'} fault{'' if len(self.faults) == 1 else 's'} found"
        if not self.layers:
            return "nothing could be measured" if self.inconclusive else faults
        counts = Counter(verdict.verdict for verdict in self.layers)
        measured = f"{len(self.layers) - counts['not measured']} of {len(self.layers)} layers measured"
        measured += f", {counts['not judged']} of them not judged" if counts["not judged"] else ""
        if self.inconclusive:
            faults = f"nothing could be {'judged' if counts['not judged'] else 'measured'}"
        return f"{faults}; {measured}"

    @property
    def groups(self) -> Iterator[tuple[str, Verdict]]:
        """Layers with equal verdicts: their indices, such as ``0 to 4, 6``, and the verdict of the first.

        Verdicts are equal if their texts differ only by numbers that differ by at most 0.2%.
        """
        groups: list[list[Verdict]] = []
        for verdict in self.layers:
            same = next((group for group in groups if _alike(group[0], verdict)), None)
            if same is None:
                groups.append(same := [])
            same.append(verdict)
        for group in groups:
            yield _ranges([verdict.layer for verdict in group]), group[0]

    def summary(self) -> str:
        """Return the report as text for the terminal."""
        lines = [f"{self.model} ({self.family})"]
        for numbers, verdict in self.groups:
            lines += [f"layer {numbers}: {verdict.verdict}", f"  configuration: {verdict.expected}"]
            lines += [f"  forward pass: {verdict.measured}"] if verdict.measured else []
            lines += [f"  {line}" for line in (*verdict.differences, verdict.unknown) if line]
        for i in self.invariances:
            number = "" if i.difference is None else f", difference {i.difference:.2g}, allowed {i.allowed:.2g}"
            because = i.reason or (i.by_design if i.verdict == "broken by design" else None)
            lines.append(f"{i.name}: {i.verdict}{number}{f' ({because})' if because else ''}")
        lines += [f"{result.name}: {result.report or result.skipped}" for result in self.results]
        return "\n".join([*lines, self.outcome])

    def write(self, folder: Path) -> None:
        """Write ``probe.html`` and ``probe.json`` into a folder."""
        values = {"report": self, "embedded": embedded, "figure": layer_figure([*self.groups])}
        write(folder / "probe.html", render_template("kerple.probe", "probe.html.jinja", **values))
        invariances = [asdict(i) | {"verdict": i.verdict} for i in self.invariances]
        for entry in invariances:  # JSON has neither inf nor NaN
            entry["difference"] = entry["difference"] if math.isfinite(entry["difference"] or 0) else None
        content = vars(self) | {
            "layers": [{name: getattr(v, name) for name in SUMMARY} for v in self.layers],
            "invariances": invariances,
            "results": [{key: vars(r)[key] for key in RESULT} for r in self.results],
            "faults": self.faults,
            "outcome": self.outcome,
        }
        write(folder / "probe.json", json.dumps(content, indent=1, ensure_ascii=False, allow_nan=False) + "\n")


def probe_model(model: Any, config: Any, name: str = "", layers: bool = True, invariances: bool = True) -> Report:
    """Check the positional encoding of a model.

    Args:
        model: A `transformers.PreTrainedModel` in evaluation mode and fp32.
        config: Configuration of the text model, with which the layers are compared. Read it from the model's files,
            because loading may have changed ``model.config``.
        name: Name of the model in the report; empty for the name of its class.
        layers: Whether to compare each layer with the configuration.
        invariances: Whether to test the invariances of the logits.

    Raises:
        UserError: If the model is not in fp32, because the rounding of other dtypes would look like a fault, or in
            training mode, because dropout would hide faults.
    """
    require(model.dtype == torch.float32, "model", model.dtype, "torch.float32; use model.float()")
    require(not model.training, "model", "training mode", "evaluation mode without dropout; use model.eval()")
    report = Report(name or type(model).__name__, config.model_type)
    report.layers = measure_layers(model, config) if layers else []
    report.invariances = measure_invariances(model, config) if invariances else []
    return report


def _ranges(layers: list[int]) -> str:
    """Return indices as ranges, such as ``0 to 4, 6``; of more than four ranges, only the first three."""
    starts = [i for i in layers if i - 1 not in layers]
    ends = [i for i in layers if i + 1 not in layers]
    ranges = [f"{a} to {b}" if a < b else f"{a}" for a, b in zip(starts, ends, strict=True)]
    return ", ".join(ranges if len(ranges) < 5 else [*ranges[:3], f"… ({len(layers)} layers)"])


def _alike(a: Verdict, b: Verdict) -> bool:
    """Return whether two verdicts differ only by small differences of numbers, see `Report.groups`."""
    texts = [repr((v.expected, v.measured, v.differences, v.unknown)) for v in (a, b)]
    numbers = [[float(x) for x in re.findall(NUMBER, text)] for text in texts]
    same = re.sub(NUMBER, "", texts[0]) == re.sub(NUMBER, "", texts[1])
    return same and all(math.isclose(x, y, rel_tol=2e-3) for x, y in zip(*numbers, strict=True))


def embedded(figure: Figure) -> str:
    """Return the figure as a PNG in base64."""
    file = io.BytesIO()
    figure.savefig(file, dpi=120)
    return base64.b64encode(file.getvalue()).decode()

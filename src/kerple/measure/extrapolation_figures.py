"""The table and the figures of `Extrapolation`."""

from collections.abc import Sequence
from typing import Any

import pandas as pd
from matplotlib.figure import Figure

from kerple.measure.drawing import label_axes, panel
from kerple.measure.measurement import Measurement


def perplexity_table(measurements: Sequence[Measurement], training_length: int) -> str:
    """Perplexity and bits per byte as text: a row for each length, a column for each protocol, and notes below."""
    cells: dict[str, dict[str, str]] = {}
    for m in measurements:
        times = "" if m.length % training_length else f" ({m.length // training_length}×)"
        cells.setdefault(m.protocol.label, {})[f"{m.length:,}{times}"] = _cell(m)
    counts = sorted({f"{m.protocol.label} {int(m.loss.targets.sum()):,}" for m in measurements if not m.skip_reason})
    notes = [f"{m.protocol.label} at {m.length:,}: skipped, {m.skip_reason}" for m in measurements if m.skip_reason]
    lines = ["Perplexity (bits per byte) by evaluation length", pd.DataFrame(cells).to_string()]
    return "\n".join([*lines, *(f"targets scored: {count}" for count in counts), *notes])


def perplexity_figure(measurements: Sequence[Measurement], training_length: int, title: str) -> Figure:
    """Figure of perplexity against length, with a curve for each protocol and a mark at the training length."""
    result, axes = panel(6.4, 4.2)
    perplexities = {m: float(m.loss.perplexity()) for m in measurements if not m.skip_reason}
    for protocol in dict.fromkeys(m.protocol for m in perplexities):
        points = [(m.length, ppl) for m, ppl in perplexities.items() if m.protocol == protocol]
        note = f" (targets from {protocol.skip:,} on)" if protocol.skip else ""
        axes.plot(*zip(*points, strict=True), marker="o", markersize=4, label=protocol.label + note)
    if perplexities and max(perplexities.values()) > 4 * min(perplexities.values()):
        axes.set_yscale("log")
    lengths, xlabel = sorted({m.length for m in measurements}), "evaluation length (tokens)"
    label_axes(axes, training_length, lengths, xlabel=xlabel, ylabel="perplexity (per token)", title=title)
    return result


def context_gain_figure(rows: Sequence[dict[str, Any]], title: str) -> Figure:
    """Figure of the context gain against the distance beyond the window.

    Args:
        rows: Rows of `kerple.measure.metrics.ContextGain`, of which at least one is beyond the window.
        title: Title of the figure.
    """
    beyond = [row for row in rows if row["first"] >= row["window"]]
    result, axes = panel(6.4, 4.2)
    distances = [row["first"] - row["window"] for row in beyond]
    gains, errors = ([row[name] for row in beyond] for name in ("gain", "gain_error"))
    axes.errorbar(distances, gains, errors, marker="o", markersize=3, elinewidth=0.8, label="± error over text")
    axes.axhline(0, color="black", linewidth=0.8)
    xlabel = f"distance beyond the {beyond[0]['window']:,} tokens of the window"
    label_axes(axes, xlabel=xlabel, ylabel="windowed - full (nats per token)", title=title)
    return result


def _cell(m: Measurement) -> str:
    if m.skip_reason:
        return "skipped"
    ppl = f"{float(m.loss.perplexity()):,.2f}"
    return f"{ppl} ({float(m.loss.bits_per_byte()):.3f})" if m.loss.bytes.any() else ppl

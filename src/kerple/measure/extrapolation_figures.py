"""The table and the figures of `Extrapolation`."""

from collections.abc import Sequence
from typing import Any

import pandas as pd
from matplotlib.figure import Figure

from kerple.measure.plotting import label_axes, panel
from kerple.measure.protocols import ProtocolLosses


def perplexity_table(measurements: Sequence[ProtocolLosses], training_length: int) -> str:
    """Return perplexity and bits per byte as text, with a row for each length and a column for each protocol."""
    cells: dict[str, dict[str, str]] = {}
    for m in measurements:
        times = "" if m.length % training_length else f" ({m.length // training_length}×)"
        bits = f" ({float(m.loss.bits_per_byte()):.3f})" if m.loss.text_bytes.any() else ""
        cells.setdefault(m.protocol.label, {})[f"{m.length:,}{times}"] = f"{float(m.loss.perplexity()):,.2f}{bits}"
    counts = sorted({f"targets scored: {m.protocol.label} {int(m.loss.targets.sum()):,}" for m in measurements})
    return "\n".join(["Perplexity (bits per byte) by evaluation length", pd.DataFrame(cells).to_string(), *counts])


def perplexity_figure(
    measurements: Sequence[ProtocolLosses], lengths: Sequence[int], training_length: int, title: str
) -> Figure:
    """Draw perplexity against length.

    Args:
        measurements: The measurements. There is a curve for each protocol.
        lengths: Ticks of the axis in tokens.
        training_length: Training length in tokens, marked by a vertical line.
        title: Title of the figure.
    """
    figure, axes = panel(6.4, 4.2)
    perplexities = {m: float(m.loss.perplexity()) for m in measurements}
    for protocol in dict.fromkeys(m.protocol for m in perplexities):
        points = [(m.length, ppl) for m, ppl in perplexities.items() if m.protocol == protocol]
        note = f" (without the first {protocol.skip:,} targets)" if protocol.skip else ""
        axes.plot(*zip(*points, strict=True), marker="o", markersize=4, label=protocol.label + note)
    if perplexities and max(perplexities.values()) > 4 * min(perplexities.values()):
        axes.set_yscale("log")
    xlabel, ylabel = "evaluation length (tokens)", "perplexity (per token)"
    label_axes(axes, training_length, lengths, xlabel=xlabel, ylabel=ylabel, title=title)
    return figure


def context_gain_figure(rows: Sequence[dict[str, Any]], title: str) -> Figure:
    """Draw the context gain at the positions beyond the window.

    Args:
        rows: Rows of `kerple.measure.loss_metrics.ContextGain`. In at least one row, ``first`` is at least ``window``.
        title: Title of the figure.
    """
    beyond = [row for row in rows if row["first"] >= row["window"]]
    figure, axes = panel(6.4, 4.2)
    positions = [row["first"] - row["window"] for row in beyond]
    gains, errors = ([row[name] for row in beyond] for name in ("gain", "gain_error"))
    label = "± standard error over segments"
    axes.errorbar(positions, gains, errors, marker="o", markersize=3, elinewidth=0.8, label=label)
    axes.axhline(0, color="black", linewidth=0.8)
    xlabel = f"position minus the window of {beyond[0]['window']:,} tokens"
    label_axes(axes, xlabel=xlabel, ylabel="windowed - full (nats per token)", title=title)
    return figure

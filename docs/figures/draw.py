"""Draws the figures of the documentation: `python docs/figures/draw.py` writes the SVG files beside this one."""

from pathlib import Path

import torch
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle

from kerple import positions

HERE = Path(__file__).parent
INK, LIGHT, MARK = "#3b4a6b", "#d7dcec", "#d9822b"


def bias_against_distance() -> Figure:
    """Biases of 8 heads as the strategies start."""
    torch.manual_seed(0)
    drawn = Figure(figsize=(9, 2.6), layout="constrained")
    distance = torch.arange(513)
    for axes, name in zip(drawn.subplots(1, 4), ("ALiBi", "KerplePower", "KerpleLog", "T5"), strict=True):
        table = positions.build(name, dim=64, heads=8, length=64).bias(distance)  # (H, 513)
        axes.plot(distance, table.detach().T, color=INK, linewidth=0.9)
        axes.set(title=name, xlabel="distance (tokens)")
        axes.set_ylim(*((-30, 2) if name != "T5" else (-0.1, 0.1)))
        axes.grid(alpha=0.3)
    drawn.axes[0].set_ylabel("bias (added to the score)")
    return drawn


def hankel_view() -> Figure:
    """A block of reversed queries, each cell with the distance that it reads."""
    drawn = Figure(figsize=(7, 2.6), layout="constrained")
    axes = drawn.add_subplot()
    rows, keys, first = 3, 8, 5  # queries 5, 6, 7 reversed, keys 0..7
    for i in range(rows):
        query = first + rows - 1 - i
        for n in range(keys):
            d = query - n
            _cell(axes, n, -i, str(d) if d >= 0 else "−∞", LIGHT if d >= 0 else "white")
        axes.text(-0.3, -i + 0.5, f"query {query}", ha="right", va="center")
    for n in range(keys):
        axes.text(n + 0.5, 1.25, f"key {n}", ha="center", fontsize=8)
    for j in range(rows + keys - 1):
        d = first + rows - 1 - j
        _cell(axes, j, -4.4, str(d) if d >= 0 else "−∞", "#f4dfc8")
    axes.text(-0.3, -3.9, "one vector", ha="right", va="center")
    axes.text(rows + keys - 0.8, -3.9, "row i is this vector\nfrom entry i on", va="center", fontsize=9)
    axes.set(xlim=(-2, 13.5), ylim=(-4.8, 1.7))
    axes.axis("off")
    return drawn


def protocols() -> Figure:
    """What each protocol lets the last scored targets of a block see."""
    drawn = Figure(figsize=(8, 3.2), layout="constrained")
    axes = drawn.add_subplot()
    block, length = 16, 8
    lines = [
        ("full", [(s, s + length, s, s + length) for s in (0, 8)]),
        ("windowed, w = 4", [(s, s + length, s, s + length) for s in (0, 8)]),
        ("sliding, stride 4", [(0, 8, 0, 8), (4, 12, 8, 12), (8, 16, 12, 16)]),
        ("last, k = 2", [(s, s + length, s + length - 2, s + length) for s in (0, 8)]),
        ("per_position", [(s, s + length, s, s + length) for s in (0, 8)]),
    ]
    y = 0.0
    for name, segments in lines:
        axes.text(-0.4, y - 0.5 * 0.45 * len(segments) + 0.2, name, ha="right", va="center")
        for start, end, scored, stop in segments:
            axes.add_patch(
                Rectangle((start, y - 0.3), end - start, 0.34, facecolor=LIGHT, edgecolor=INK, linewidth=0.8)
            )
            axes.add_patch(
                Rectangle((scored, y - 0.3), stop - scored, 0.34, facecolor=MARK, alpha=0.75, edgecolor="none")
            )
            if name.startswith("windowed"):  # what the last target of the segment attends to
                axes.plot(
                    [end - 4, end - 4, end, end], [y - 0.34, y - 0.42, y - 0.42, y - 0.34], color=INK, linewidth=1.2
                )
                axes.text(end - 4.15, y - 0.5, "the last target sees 4 keys", ha="right", va="center", fontsize=7)
            if name == "per_position":
                for t in range(start, end):
                    axes.text(t + 0.5, y - 0.13, str(t - start), ha="center", va="center", fontsize=6, color="white")
            y -= 0.66 if name.startswith("windowed") else 0.45
        y -= 0.35
    axes.text(0, 0.55, "a block of 16 tokens, L = 8: orange is scored, pale is only read", fontsize=9)
    axes.set(xlim=(-4.2, block + 0.3), ylim=(y, 0.9))
    axes.axis("off")
    return drawn


def _cell(axes: Axes, x: float, y: float, text: str, colour: str) -> None:
    axes.add_patch(Rectangle((x, y), 1, 1, facecolor=colour, edgecolor=INK, linewidth=0.6))
    axes.text(x + 0.5, y + 0.5, text, ha="center", va="center", fontsize=9)


if __name__ == "__main__":
    for draw in (bias_against_distance, hankel_view, protocols):
        draw().savefig(HERE / f"{draw.__name__.replace('_', '-')}.svg", metadata={"Date": None})

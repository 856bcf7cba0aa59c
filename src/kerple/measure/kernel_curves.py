"""`KernelCurves`: the bias of each head against the distance from query to key, in a trained model."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
import torch
from matplotlib.figure import Figure
from torch import Tensor

from kerple.base.errors import require
from kerple.data.evaluation_text import Text
from kerple.measure.measure import Measure, require_capabilities
from kerple.measure.plotting import label_axes
from kerple.measure.result import Result
from kerple.measure.runner import Runner
from kerple.model import Transformer
from kerple.positions import Position

KernelTables = tuple[str, Position, dict[str, Tensor | None]]
"""A layer, its strategy, and the tables of `kernel_tables`."""


@dataclass
class KernelCurves(Measure):
    """Tabulates and draws the bias of each head against the distance from query to key. It reads no text.

    Some strategies also multiply the attention score by a weight that depends on the distance.
    The result has ``kernels.csv`` (layer, head, distance, bias, weight) and a figure. The measurement is skipped if the
    strategy has neither a bias nor a weight that is a function of the distance.

    Args:
        length: Number of distances, 0..length-1; None for 32 × the training length. The table has at most 201
            distances, in logarithmic steps.

    Raises:
        UserError: If ``length`` is below 2.
    """

    length: int | None = None

    name: ClassVar[str] = "kernels"
    needs: ClassVar[tuple[type, ...]] = (Transformer,)

    def __post_init__(self) -> None:
        require(self.length is None or self.length >= 2, "KernelCurves: length", self.length, "at least 2")

    def check(self, network: Any, text: Any) -> None:
        require_capabilities(self, network, self.needs)

    def skip_reason(self, network: Any) -> str | None:
        return None if next(kernel_tables(network, 2), None) else f"{network.name} has no bias by distance"

    def measure(self, network: Any, text: Text, runner: Runner) -> Result:
        training_length = network.shape.length
        length = self.length or 32 * training_length
        curves = list(kernel_tables(network, length))
        distances = sorted({0, *np.geomspace(1, length - 1, 200).round().astype(int).tolist()})
        rows = [
            {"layer": layer, "head": head, "distance": d}
            | {kind: None if table is None else float(table[head, d]) for kind, table in tables.items()}
            for layer, _, tables in curves
            for head in range(network.shape.heads)
            for d in distances
        ]
        figure = _figure(curves, distances, training_length, network.name)
        return Result(self.name, {self.name: rows}, {self.name: figure})


@torch.no_grad()
def kernel_tables(network: Transformer, length: int) -> Iterator[KernelTables]:
    """Yield (layer, strategy, tables) for each layer whose strategy has a bias or a weight by distance.

    If all layers share one strategy, it is yielded once, and the layer is "all". The tables have the keys ``bias`` and
    ``weight``. A table is (heads, distances 0..length-1) fp32, or None if the strategy does not have it.
    """
    positions = network.positions
    for layer, position in enumerate(positions):
        if position.uses("bias") or position.uses("score_scale"):
            distance = torch.arange(length, dtype=torch.float32, device=network.head.weight.device)
            tables = {"bias": position.bias(distance), "weight": position.score_scale(distance)}
            yield "all" if len(positions) == 1 else str(layer), position, tables


def _figure(curves: list[KernelTables], distances: list[int], training_length: int, strategy: str) -> Figure:
    """Draw the curves of all heads against distance, with a panel for each layer and kind (bias or weight).

    Args:
        curves: The results of `kernel_tables`. Of more than four layers, the first, the middle and the last are drawn.
        distances: Distances to draw.
        training_length: Training length in tokens, marked by a vertical line.
        strategy: Name of the strategy, for the titles.
    """
    drawn = curves if len(curves) <= 4 else [curves[0], curves[len(curves) // 2], curves[-1]]
    labels = {"bias": "bias added to the scaled score (nats)", "weight": "factor of the score"}
    panels = [(layer, kind, t) for layer, _, tables in drawn for kind, t in tables.items() if t is not None]
    figure = Figure(figsize=(7.6, 3.8 * len(panels)), layout="constrained")
    for axes, (layer, kind, table) in zip(figure.subplots(len(panels), squeeze=False)[:, 0], panels, strict=True):
        for head, curve in enumerate(table.cpu()):
            axes.plot(distances, curve[distances].tolist(), label=f"head {head}", color=f"C{head % 10}")
        axes.set_xscale("symlog", linthresh=1)
        axes.set_xlim(0, distances[-1])
        title = f"{strategy}: {kind} of each head, layer {layer}"
        label_axes(axes, training_length, xlabel="distance to the key (tokens)", ylabel=labels[kind], title=title)
    return figure

"""`KernelCurves`: the bias of each head against distance in a trained model."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from matplotlib.figure import Figure
from torch import Tensor

from kerple.base.errors import UserError
from kerple.data.text import Text
from kerple.measure.drawing import label_axes
from kerple.measure.measure import Measure, require_capabilities
from kerple.measure.result import Result
from kerple.measure.runner import Runner
from kerple.model import Transformer
from kerple.positions import Position


@dataclass
class KernelCurves(Measure):
    """Tabulates the bias of each head, and its weight if the strategy has one, against distance. It reads no text.

    The result has ``kernels.csv`` (layer, head, distance, bias, weight) and a figure. A strategy whose bias is not a
    function of the distance is skipped.

    Args:
        length: Number of distances, 0..length-1; None for 32 × the training length.

    Raises:
        UserError: If the length is below 2.
    """

    length: int | None = None

    name: ClassVar[str] = "kernels"
    needs: ClassVar[tuple[type, ...]] = (Transformer,)

    def __post_init__(self) -> None:
        if self.length is not None and self.length < 2:
            raise UserError(f"KernelCurves: length: got {self.length}, expected at least 2 distances")

    def check(self, network: Any, text: Any) -> None:
        require_capabilities(self, network, self.needs)

    def skip_reason(self, network: Any) -> str | None:
        return None if any(True for _ in kernel_tables(network, 2)) else f"{network.name} has no bias by distance"

    def measure(self, network: Any, text: Text, runner: Runner) -> Result:
        trained = network.shape.length
        length = self.length or 32 * trained
        tables = list(kernel_tables(network, length))
        spaced = torch.logspace(0, torch.log10(torch.tensor(float(length - 1))), 200).round().long()
        distances = sorted({0, *spaced.clamp(max=length - 1).tolist()})
        rows = [
            {"layer": layer, "head": head, "distance": d}
            | {kind: None if table is None else float(table[head, d]) for kind, table in of_layer.items()}
            for layer, _, of_layer in tables
            for head in range(network.shape.heads)
            for d in distances
        ]
        return Result(self.name, {self.name: rows}, {self.name: _figure(tables, distances, trained, network.name)})


@torch.no_grad()
def kernel_tables(network: Transformer, length: int) -> Iterator[tuple[str, Position, dict[str, Tensor | None]]]:
    """Yield (layer, strategy, bias and weight) for each strategy that has a bias or a weight.

    The layer is "all" if all layers share one strategy. Bias and weight are (H, length) fp32; one of them is None if
    the strategy does not have it.
    """
    positions = network.positions
    for layer, position in enumerate(positions):
        if position.uses("bias") or position.uses("score_scale"):
            distance = torch.arange(length, dtype=torch.float32, device=network.head.weight.device)
            tables = {"bias": position.bias(distance), "weight": position.score_scale(distance)}
            yield "all" if len(positions) == 1 else str(layer), position, tables


def _figure(
    tables: list[tuple[str, Position, dict[str, Tensor | None]]], distances: list[int], trained: int, strategy: str
) -> Figure:
    """Draw the curves of all heads against distance, with a panel for each layer and kind (bias or weight).

    Args:
        tables: The tables of `kernel_tables`. Of more than four layers, the first, the middle and the last are drawn.
        distances: Distances to draw.
        trained: Training length, for the mark.
        strategy: Name of the strategy, for the titles.
    """
    few = tables if len(tables) <= 4 else [tables[0], tables[len(tables) // 2], tables[-1]]
    labels = {"bias": "bias added to the scaled score (nats)", "weight": "weight times the score"}
    panels = [(layer, kind, t) for layer, _, kinds in few for kind, t in kinds.items() if t is not None]
    figure = Figure(figsize=(7.6, 3.8 * len(panels)), layout="constrained")
    for axes, (layer, kind, table) in zip(figure.subplots(len(panels), squeeze=False)[:, 0], panels, strict=True):
        for head, curve in enumerate(table.cpu()):
            axes.plot(distances, curve[distances].tolist(), label=f"head {head}", color=f"C{head % 10}")
        axes.set_xscale("symlog", linthresh=1)
        axes.set_xlim(0, distances[-1])
        title = f"{strategy}: {kind} of each head, layer {layer}"
        label_axes(axes, trained, xlabel="distance to the key (tokens)", ylabel=labels[kind], title=title)
    return figure

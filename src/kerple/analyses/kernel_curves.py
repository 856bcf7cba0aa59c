"""`Kernels`: each head's bias against distance, after training and in the course of it."""

from collections.abc import Iterator
from typing import Any

import torch
from matplotlib.figure import Figure
from pytorch_lightning import Callback, LightningModule, Trainer
from torch import Tensor

from kerple.base.errors import UserError
from kerple.evaluation.analysis import publish, skip, strategy_name
from kerple.evaluation.typed import network_of
from kerple.positions import Position


class Kernels(Callback):
    """Draws each head's bias, and its weight if the strategy has one, against distance.

    At the end of `test` it writes ``kernels.csv`` (layer, head, distance, bias, weight) and a figure. During `fit` it
    records the strategy's parameters and the bias at a few distances; at the end of `fit` it writes them as
    ``kernels_trajectory.csv`` (step, layer, head, name, value) and a figure. Strategies whose bias is no function of
    the distance are skipped with a message.

    Args:
        length: Number of distances, 0..length-1; None for 32 × the training length.
        every: Steps between two records during `fit`.
        distances: Distances at which the bias is recorded during `fit`.

    Raises:
        UserError: If a number is not positive.
    """

    def __init__(
        self, length: int | None = None, every: int = 10, distances: tuple[int, ...] = (1, 10, 100, 1000)
    ) -> None:
        super().__init__()
        if every < 1 or (length is not None and length < 2) or min(distances, default=0) < 0:
            raise UserError(
                f"Kernels: got length {length}, every {every}, distances {list(distances)}; expected a length of at "
                "least 2, a positive number of steps and distances of at least 0"
            )
        self.length = length
        self.every = every
        self.distances = tuple(distances)
        self.trajectory: list[dict[str, Any]] = []

    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if not any(p["step"] == trainer.global_step for p in self.trajectory):
            self._note(trainer.global_step, pl_module)

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        step = trainer.global_step
        if step % self.every == 0 and (not self.trajectory or self.trajectory[-1]["step"] != step):
            self._note(step, pl_module)

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if self.trajectory:
            drawn = _trajectory_figure(self.trajectory, strategy_name(pl_module))
            publish(trainer, "kernels_trajectory", drawn, self.trajectory)

    def state_dict(self) -> dict[str, Any]:
        return {"trajectory": self.trajectory}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.trajectory = list(state_dict["trajectory"])

    def on_test_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        length = self.length or 32 * network_of(pl_module).shape.length
        found = list(bias_tables(pl_module, length))
        if not found:
            skip(trainer, "kernels", f"Kernels: skipped: {strategy_name(pl_module)} has no bias by distance")
            return
        distances = _spaced(length)
        rows = [
            {
                "layer": layer,
                "head": head,
                "distance": d,
                "bias": None if bias is None else float(bias[head, d]),
                "weight": None if weight is None else float(weight[head, d]),
            }
            for layer, _, bias, weight in found
            for head in range(network_of(pl_module).shape.heads)
            for d in distances
        ]
        publish(trainer, "kernels", _figure(found, distances, pl_module), rows)

    @torch.no_grad()
    def _note(self, step: int, pl_module: LightningModule) -> None:
        reach = max(self.distances, default=0) + 1
        for layer, position, bias, weight in bias_tables(pl_module, reach):
            heads = network_of(pl_module).shape.heads
            curves = dict(per_head(position, heads))
            for kind, table in (("bias", bias), ("weight", weight)):
                if table is not None:
                    curves |= {f"{kind} at {d}": table[:, d] for d in self.distances}
            self.trajectory += [
                {"step": step, "layer": layer, "head": head, "name": name, "value": float(values[head])}
                for name, values in curves.items()
                for head in range(heads)
            ]


def bias_tables(
    pl_module: LightningModule, length: int
) -> Iterator[tuple[str, Position, Tensor | None, Tensor | None]]:
    """Yield (layer, strategy, bias, weight) for each strategy that has a bias or a weight.

    The layer is "all" if one strategy serves all layers. Bias and weight are (H, length) fp32, or None if the strategy
    does not have the one or the other.
    """
    positions = network_of(pl_module).positions
    for layer, position in enumerate(positions):
        if position.uses("bias") or position.uses("weight"):
            with torch.no_grad():
                distance = torch.arange(length, dtype=torch.float32, device=pl_module.device)
                bias, weight = position.bias(distance), position.weight(distance)
            yield "all" if len(positions) == 1 else str(layer), position, bias, weight


def per_head(position: Position, heads: int) -> Iterator[tuple[str, Tensor]]:
    """Yield the names and values (H,) of parameters with one number per head; of buffers if nothing is learned."""
    learned = list(position.named_parameters())
    for name, values in learned or position.named_buffers():
        if values.shape == (heads,):
            yield name, values.detach()


def _of_layer(layer: str) -> str:
    return "all layers" if layer == "all" else f"layer {layer}"


def _spaced(length: int) -> list[int]:
    steps = torch.logspace(0, torch.log10(torch.tensor(float(length - 1))), 200).round().long()
    return sorted({0, *steps.clamp(max=length - 1).tolist()})


def _figure(
    found: list[tuple[str, Position, Tensor | None, Tensor | None]], distances: list[int], pl_module: LightningModule
) -> Figure:
    kinds = [kind for kind, i in (("bias", 2), ("weight", 3)) if any(f[i] is not None for f in found)]
    shown = found if len(found) <= 4 else [found[0], found[len(found) // 2], found[-1]]
    drawn = Figure(figsize=(7.6, 3.8 * len(kinds) * len(shown)), layout="constrained")
    panels = drawn.subplots(len(shown) * len(kinds), squeeze=False)[:, 0]
    trained, heads = network_of(pl_module).shape.length, network_of(pl_module).shape.heads
    for axes, (kind, (layer, position, bias, weight)) in zip(
        panels, [(kind, entry) for entry in shown for kind in kinds], strict=True
    ):
        table = bias if kind == "bias" else weight
        learned = dict(per_head(position, heads))
        for head, curve in enumerate(() if table is None else table.cpu()):
            numbers = ", ".join(f"{name} {float(values[head]):.3g}" for name, values in learned.items())
            label = f"head {head}" + (f": {numbers}" if numbers else "")
            axes.plot(distances, curve[distances].tolist(), label=label, color=f"C{head % 10}")
        axes.axvline(trained, color="0.6", linestyle="--", linewidth=1, label=f"training length {trained:,}")
        axes.set_xscale("symlog", linthresh=1)
        axes.set_xlim(0, distances[-1])
        axes.set(
            xlabel="distance to the key (tokens)",
            ylabel="bias added to the scaled score (nats)" if kind == "bias" else "weight times the score",
            title=f"{strategy_name(pl_module)}: {kind} of each head, {_of_layer(layer)}",
        )
        axes.grid(alpha=0.3)
        axes.legend(fontsize=7, loc="center left", bbox_to_anchor=(1, 0.5), frameon=False)
    return drawn


def _trajectory_figure(trajectory: list[dict[str, Any]], name: str) -> Figure:
    layer = trajectory[0]["layer"]
    names = list(dict.fromkeys(p["name"] for p in trajectory if p["layer"] == layer))
    columns = min(3, len(names))
    drawn = Figure(figsize=(4.2 * columns, 3.2 * -(-len(names) // columns)), layout="constrained")
    panels = drawn.subplots(-(-len(names) // columns), columns, squeeze=False).flatten()
    for axes, quantity in zip(panels, names, strict=False):
        points = [p for p in trajectory if p["name"] == quantity and p["layer"] == layer]
        for head in dict.fromkeys(p["head"] for p in points):
            at_head = [(p["step"], p["value"]) for p in points if p["head"] == head]
            axes.plot(*zip(*at_head, strict=True), label=f"head {head}", color=f"C{head % 10}")
        axes.set(xlabel="optimiser step", ylabel=quantity + (" (nats)" if quantity.startswith("bias") else ""))
        axes.grid(alpha=0.3)
    for axes in panels[len(names) :]:
        axes.set_visible(False)
    drawn.axes[0].legend(fontsize=7)
    drawn.suptitle(f"{name}: bias and parameters over training, {_of_layer(layer)}")
    return drawn

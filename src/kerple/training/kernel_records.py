"""`Kernels`: a callback that records each head's bias and the strategy's parameters during a fit."""

from typing import Any

import torch
from matplotlib.figure import Figure
from pytorch_lightning import Callback, LightningModule, Trainer
from torch import Tensor

from kerple.base.errors import require
from kerple.measure.kernel_curves import KernelCurves, kernel_tables
from kerple.measure.plotting import grid, label_axes
from kerple.measure.result import Result
from kerple.training.measure_callback import publish, runner
from kerple.training.trainer_access import network_of, refuse_shards

MAX_RECORDS = 400  # limited, because each checkpoint contains the records


class Kernels(Callback):
    """Records the bias of each head by distance, and the weight (`Position.score_scale`) of scores, if any.

    During `fit`, the callback records the bias and the weight at a few distances, and each parameter of the strategy
    that has one number for each head. For a strategy without parameters, it records the buffers of this shape. At the
    end of `fit`, it writes the records as ``kernels_trajectory.csv`` (step, layer, head, name, value), and draws the
    records of the first layer. At the end of `test`, it runs `KernelCurves`.

    When there are more than `MAX_RECORDS` records, every second one is dropped and ``every`` is doubled. Strategies
    that have neither a bias nor a weight by distance are not recorded.

    Args:
        length: Number of distances of `KernelCurves`, 0..length-1; null for 32 × the training length.
        every: Initial number of steps between two records during `fit`.
        distances: Distances at which bias and weight are recorded during `fit`.

    Raises:
        UserError: If a number is too small.
    """

    def __init__(
        self, length: int | None = None, every: int = 10, distances: tuple[int, ...] = (1, 10, 100, 1000)
    ) -> None:
        super().__init__()
        require(length is None or length >= 2, "Kernels: length", length, "2 or more")
        require(every >= 1, "Kernels: every", every, "1 or more")
        require(min(distances, default=0) >= 0, "Kernels: distances", distances, "0 or more")
        self.length, self.every, self.distances = length, every, tuple(distances)
        self._every_at_start = every
        self.steps: list[int] = []
        self.records: list[Tensor] = []  # for each of these steps, (quantities, heads)

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        refuse_shards(trainer, "Kernels", "leave it out of the fit")
        if not self.steps:
            self._record(trainer.global_step, pl_module)

    def on_train_batch_end(self, trainer: Trainer, pl_module: LightningModule, *_: Any) -> None:
        step = trainer.global_step
        if self.steps and step % self.every == 0 and self.steps[-1] != step:
            self._record(step, pl_module)

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if not self.steps:
            return
        quantities = list(self._quantities(pl_module))
        values = torch.stack(self.records)  # (steps, quantities, heads)
        rows = [
            {"step": step, "layer": layer, "head": head, "name": name, "value": value}
            for step, of_step in zip(self.steps, values.tolist(), strict=True)
            for (layer, name), of_heads in zip(quantities, of_step, strict=True)
            for head, value in enumerate(of_heads)
        ]
        figure = _trajectory_figure(self.steps, quantities, values, network_of(pl_module).name)
        publish(Result("kernels", {"kernels_trajectory": rows}, {"kernels_trajectory": figure}), trainer)

    def state_dict(self) -> dict[str, Any]:
        records = {"steps": self.steps, "records": self.records, "distances": self.distances}
        return records | {"every": self.every, "every_at_start": self._every_at_start}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        if state_dict.get("distances", self.distances) == self.distances:  # else new records begin at this step
            self.steps, self.records = state_dict["steps"], state_dict["records"]
            if state_dict.get("every_at_start", self._every_at_start) == self._every_at_start:  # else the new option
                self.every = state_dict["every"]

    def on_test_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        publish(KernelCurves(self.length).run(network_of(pl_module), None, runner(trainer, pl_module)), trainer)

    def _record(self, step: int, pl_module: LightningModule) -> None:
        """Record the values of this step, if the strategy has any to record."""
        if quantities := self._quantities(pl_module):
            self.steps.append(step)
            self.records.append(torch.stack(list(quantities.values())).float().cpu())
        if len(self.steps) > MAX_RECORDS:
            self.steps, self.records, self.every = self.steps[::2], self.records[::2], 2 * self.every

    def _quantities(self, pl_module: LightningModule) -> dict[tuple[str, str], Tensor]:
        """Return the current values to record, (heads,), by layer and name.

        The layer is named as in `kernel_tables`. The name is that of a parameter or buffer, or that of a bias or
        weight, such as ``bias at 10`` for distance 10.
        """
        quantities: dict[tuple[str, str], Tensor] = {}
        for layer, position, tables in kernel_tables(network_of(pl_module), max(self.distances, default=0) + 1):
            # for a strategy without parameters, such as ALiBi, its buffers are recorded
            tensors: list[tuple[str, Tensor]] = [*position.named_parameters()] or [*position.named_buffers()]
            heads = (network_of(pl_module).shape.heads,)
            quantities |= {(layer, name): values.detach() for name, values in tensors if values.shape == heads}
            for kind, table in tables.items():
                if table is not None:
                    quantities |= {(layer, f"{kind} at {d}"): table[:, d] for d in self.distances}
        return quantities


def _trajectory_figure(steps: list[int], quantities: list[tuple[str, str]], values: Tensor, strategy: str) -> Figure:
    """Draw the records of the first layer over training, with a panel for each quantity and a line for each head.

    Args:
        steps: Steps of the records.
        quantities: Layer and name of each quantity.
        values: The records, (steps, quantities, heads).
        strategy: Name of the strategy, for the title.
    """
    first = [i for i, (layer, _) in enumerate(quantities) if layer == quantities[0][0]]  # of the first layer
    figure, panels = grid(len(first), 4.2, 3.2)
    for axes, i in zip(panels, first, strict=True):
        for head, line in enumerate(values[:, i].T.tolist()):
            axes.plot(steps, line, label=f"head {head}", color=f"C{head % 10}")
        label_axes(axes, xlabel="optimiser step", ylabel=quantities[i][1])
    figure.suptitle(f"{strategy}: bias and parameters over training, layer {quantities[0][0]}")
    return figure

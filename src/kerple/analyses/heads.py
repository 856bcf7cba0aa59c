"""`AttentionStatistics` and `AttentionMaps`: entropy, mean distance and maps of the attention of heads."""

from collections.abc import Sequence
from itertools import product

import torch
from matplotlib.figure import Figure
from pytorch_lightning import LightningModule, Trainer
from torch import Tensor

from kerple.analyses.attention_maps import entropy, mean_distance, visit_probabilities
from kerple.base.errors import UserError
from kerple.evaluation.analysis import Analysis, publish, strategy_name
from kerple.evaluation.typed import network_of

MEASURES = {"entropy": "entropy of the attention (nats)", "distance": "mean attended distance (tokens)"}


class AttentionStatistics(Analysis):
    """Measures the entropy and the mean attended distance of each head, as means over all queries and segments.

    Writes ``attention_statistics.csv`` (layer, head, entropy in nats, distance in tokens) and a figure of both. For
    comparison: uniform attention to n keys has the entropy log n, and in a segment of L tokens a mean distance of about
    L/4.

    Args:
        length: Targets in a segment; None for the training length. Memory grows with its square.
        blocks: Number of segments.
    """

    name = "attention_statistics"

    def analyse(self, trainer: Trainer, pl_module: LightningModule) -> None:
        network, length = network_of(pl_module), self._length(pl_module)
        sums = torch.zeros(len(MEASURES), len(network.blocks), network.shape.heads, dtype=torch.float64)
        sums = sums.to(pl_module.device)

        def add(layer: int, p: Tensor) -> None:
            for i, measure in enumerate((entropy, mean_distance)):
                sums[i, layer] += measure(p).double().mean((0, 2))  # (B, H, T) -> (H,)

        for _, tokens in self.read(trainer, pl_module):
            visit_probabilities(network, tokens[:, :-1], add)
        means = (trainer.strategy.reduce(sums, reduce_op="sum") / self.blocks).cpu()
        rows = [
            {
                "layer": layer,
                "head": head,
                "entropy": float(means[0, layer, head]),
                "distance": float(means[1, layer, head]),
            }
            for layer, head in product(range(means.shape[1]), range(means.shape[2]))
        ]
        publish(trainer, self.name, _statistics_figure(means, pl_module, length), rows)


class AttentionMaps(Analysis):
    """Draws the attention probabilities of chosen heads on the first segment of the test split.

    Writes a figure and ``attention_maps.csv``: layer, head, query, key, probability, for every key that a query sees.

    Args:
        heads: Pairs (layer, head); None for the first head of the first 6 layers.
        length: Targets in the segment; None for the training length.

    Raises:
        UserError: If there is no such layer or head.
    """

    name = "attention_maps"

    def __init__(self, heads: Sequence[tuple[int, int]] | None = None, length: int | None = None) -> None:
        super().__init__(length, blocks=1)
        self.heads = heads

    def analyse(self, trainer: Trainer, pl_module: LightningModule) -> None:
        network, length = network_of(pl_module), self._length(pl_module)
        layers, heads = len(network.blocks), network.shape.heads
        chosen = [(pair[0], pair[1]) for pair in self.heads or [(layer, 0) for layer in range(min(layers, 6))]]
        if wrong := [pair for pair in chosen if not (0 <= pair[0] < layers and 0 <= pair[1] < heads)]:
            raise UserError(f"AttentionMaps: heads: got {wrong}, expected layers 0..{layers - 1}, heads 0..{heads - 1}")
        maps: dict[tuple[int, int], Tensor] = {}

        def keep(layer: int, p: Tensor) -> None:
            maps.update({pair: p[0, pair[1]].cpu() for pair in chosen if pair[0] == layer})

        for _, tokens in self.read(trainer, pl_module):
            visit_probabilities(network, tokens[:, :-1], keep)
        if not trainer.is_global_zero:
            publish(trainer, self.name, None, [])
            return
        rows = [
            {"layer": layer, "head": head, "query": m, "key": n, "probability": float(maps[layer, head][m, n])}
            for layer, head in chosen
            for m in range(length)
            for n in range(m + 1)
        ]
        publish(trainer, self.name, _maps_figure({pair: maps[pair] for pair in chosen}, pl_module), rows)


def _statistics_figure(means: Tensor, pl_module: LightningModule, length: int) -> Figure:
    layers, heads = means.shape[1:]
    drawn = Figure(figsize=(2.4 + 0.9 * heads, 1.8 + 1.0 * layers), layout="constrained")
    for axes, values, label in zip(drawn.subplots(1, 2, sharey=True), means, MEASURES.values(), strict=True):
        image = axes.imshow(values.numpy(), aspect="auto", cmap="viridis")
        middle = float(values.min() + values.max()) / 2
        for layer, head in product(range(layers), range(heads)):
            value = float(values[layer, head])
            colour = "white" if value < middle else "black"
            axes.text(head, layer, f"{value:.3g}", ha="center", va="center", color=colour, fontsize=8)
        axes.set(xlabel="head", ylabel="layer", xticks=range(heads), yticks=range(layers))
        axes.set_title(label, fontsize=9)
        drawn.colorbar(image, ax=axes)
    drawn.suptitle(f"{strategy_name(pl_module)}: attention in segments of {length:,} tokens", fontsize=10)
    return drawn


def _maps_figure(maps: dict[tuple[int, int], Tensor], pl_module: LightningModule) -> Figure:
    columns = min(3, len(maps))
    rows = -(-len(maps) // columns)
    drawn = Figure(figsize=(3.8 * columns + 0.6, 3.6 * rows + 0.4), layout="constrained")
    panels = drawn.subplots(rows, columns, squeeze=False)
    for axes in panels.flat[len(maps) :]:
        axes.set_visible(False)
    for axes, ((layer, head), p) in zip(panels.flat, maps.items(), strict=False):
        # the square root makes 64 equal probabilities in a row visible beside a single large one
        shown = p.sqrt().masked_fill(torch.ones_like(p).triu(1).bool(), float("nan"))
        image = axes.imshow(shown.numpy(), cmap="magma", vmin=0, vmax=1, interpolation="nearest")
        axes.set(xlabel="key position", ylabel="query position", title=f"layer {layer}, head {head}")
    drawn.colorbar(image, ax=panels, label="√ of the attention probability", shrink=0.8)
    drawn.suptitle(f"{strategy_name(pl_module)}: attention of the first test segment")
    return drawn

"""`AttentionStatistics` and `AttentionMaps`: which keys each head attends to, as numbers and pictures."""

from collections.abc import Sequence

import torch
from matplotlib.figure import Figure
from pytorch_lightning import LightningModule, Trainer
from torch import Tensor

from kerple.base.errors import UserError
from kerple.evaluation.analysis import Analysis, publish
from kerple.evaluation.figures import heat_map
from kerple.evaluation.typed import network_of, strategy_name


def entropy(probabilities: Tensor) -> Tensor:
    """Entropy -Σ p log p, in nats, of each query's probabilities (…, T, T) over its keys; (…, T)."""
    return torch.special.entr(probabilities).sum(-1)


def mean_distance(probabilities: Tensor) -> Tensor:
    """Mean attended distance Σ p·d, in tokens, of each query under probabilities (…, queries, keys); (…, queries)."""
    index = torch.arange(probabilities.shape[-1], device=probabilities.device)
    distance = (index[:, None] - index).clamp(min=0)  # (T, T)
    return (probabilities * distance).sum(-1)


class AttentionStatistics(Analysis):
    """Measures the entropy and the mean attended distance of each head, as means over all queries and segments.

    Writes ``attention_statistics.csv`` (layer, head, entropy in nats, distance in tokens) and a figure of both. For
    comparison: uniform attention to n keys has the entropy log n, and in a segment of L tokens a mean distance of about
    L/4.

    Args:
        length: Targets in a segment, at most 512; None for the training length.
        blocks: Number of segments.
    """

    name = "attention_statistics"
    max_length = 512  # H · T² probabilities

    def analyse(self, trainer: Trainer, pl_module: LightningModule) -> None:
        network = network_of(pl_module)
        sums = torch.zeros(2, len(network.blocks), network.shape.heads, dtype=torch.float64, device=pl_module.device)

        def add(layer: int, p: Tensor) -> None:
            for i, measure in enumerate((entropy, mean_distance)):
                sums[i, layer] += measure(p).double().mean((0, 2))  # (B, H, T) -> (H,)

        for _, tokens in self.read(trainer, pl_module):
            network.visit_attention(tokens[:, :-1], add)
        means = (trainer.strategy.reduce(sums, reduce_op="sum") / self.blocks).cpu()  # (2, layers, H)
        rows = [
            {"layer": layer, "head": head, "entropy": value, "distance": distance}
            for layer, of_layer in enumerate(means.permute(1, 2, 0).tolist())
            for head, (value, distance) in enumerate(of_layer)
        ]
        title = f"{strategy_name(pl_module)}: attention in segments of {self.targets(pl_module):,} tokens"
        publish(trainer, self.name, _statistics_figure(means, title), rows)


class AttentionMaps(Analysis):
    """Draws the attention probabilities of chosen heads on the first segment of the test split.

    Args:
        heads: Pairs (layer, head); None for the first head of the first 6 layers.
        length: Targets in the segment, at most 512; None for the training length.

    Raises:
        UserError: If there is no such layer or head.
    """

    name = "attention_maps"
    max_length = 512  # H · T² probabilities

    def __init__(self, heads: Sequence[tuple[int, int]] | None = None, length: int | None = None) -> None:
        super().__init__(length, blocks=1)
        self.heads = heads

    def analyse(self, trainer: Trainer, pl_module: LightningModule) -> None:
        network = network_of(pl_module)
        layers, heads = len(network.blocks), network.shape.heads
        chosen = [(layer, head) for layer, head in self.heads or [(layer, 0) for layer in range(min(layers, 6))]]
        if wrong := [(m, h) for m, h in chosen if not (0 <= m < layers and 0 <= h < heads)]:
            raise UserError(f"AttentionMaps: heads: got {wrong}, expected layers 0..{layers - 1}, heads 0..{heads - 1}")
        maps: dict[tuple[int, int], Tensor] = {}

        def keep(layer: int, p: Tensor) -> None:
            maps.update({pair: p[0, pair[1]].cpu() for pair in chosen if pair[0] == layer})

        for _, tokens in self.read(trainer, pl_module):  # on the first device alone
            network.visit_attention(tokens[:, :-1], keep)
        title = f"{strategy_name(pl_module)}: attention of the first test segment"
        publish(trainer, self.name, _maps_figure(maps, title) if maps else None, [])


def _statistics_figure(means: Tensor, title: str) -> Figure:
    layers, heads = means.shape[1:]
    figure = Figure(figsize=(2.4 + 0.9 * heads, 1.8 + 1.0 * layers), layout="constrained")
    labels = ("entropy of the attention (nats)", "mean attended distance (tokens)")
    for axes, values, label in zip(figure.subplots(1, 2, sharey=True), means, labels, strict=True):
        figure.colorbar(heat_map(axes, values, ".3g", cmap="viridis"), ax=axes)
        axes.set(xlabel="head", ylabel="layer", xticks=range(heads), yticks=range(layers))
        axes.set_title(label, fontsize=9)
    figure.suptitle(title, fontsize=10)
    return figure


def _maps_figure(maps: dict[tuple[int, int], Tensor], title: str) -> Figure:
    columns = min(3, len(maps))
    rows = -(-len(maps) // columns)
    figure = Figure(figsize=(3.8 * columns + 0.6, 3.6 * rows + 0.4), layout="constrained")
    panels = figure.subplots(rows, columns, squeeze=False)
    for axes in panels.flat[len(maps) :]:
        axes.set_visible(False)
    for axes, ((layer, head), p) in zip(panels.flat, maps.items(), strict=False):
        # the square root makes 64 equal probabilities in a row visible beside a single large one
        visible = p.sqrt().masked_fill(torch.ones_like(p).triu(1).bool(), float("nan"))
        image = axes.imshow(visible.numpy(), cmap="magma", vmin=0, vmax=1, interpolation="nearest")
        axes.set(xlabel="key position", ylabel="query position", title=f"layer {layer}, head {head}")
    figure.colorbar(image, ax=panels, label="√ of the attention probability", shrink=0.8)
    figure.suptitle(title)
    return figure

"""`AttentionStatistics` and `AttentionMaps`: statistics and heat maps of attention probabilities by head."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from itertools import product
from typing import Any, ClassVar

import torch
from matplotlib.figure import Figure
from torch import Tensor

from kerple.base.errors import require
from kerple.data.evaluation_text import Text, TextBlocks
from kerple.measure.measure import BlockMeasure
from kerple.measure.plotting import grid, heat_map
from kerple.measure.result import Result
from kerple.measure.runner import Runner
from kerple.model import Transformer
from kerple.model.network import Network, SupportsAttentionProbabilities

MAX_TOKENS = 512  # in a block, because a layer has heads × tokens² probabilities


def entropy(probabilities: Tensor) -> Tensor:
    """Return the entropy -Σ p log p in nats, (…, queries), of probabilities (…, queries, keys)."""
    return torch.special.entr(probabilities).sum(-1)


def mean_distance(probabilities: Tensor) -> Tensor:
    """Return the mean attended distance Σ p·d in tokens, (…, queries), of probabilities (…, queries, keys)."""
    index = torch.arange(probabilities.shape[-1], device=probabilities.device)
    distance = (index[:, None] - index).clamp(min=0)  # (T, T)
    return (probabilities * distance).sum(-1)


def _visit_block(
    network: Any, blocks: TextBlocks, index: int, runner: Runner, visit: Callable[[int, Tensor], None]
) -> None:
    """Call ``visit`` with the attention probabilities of each layer in a block of text."""
    documents = {name: x[:, :-1] for name, x in blocks.document_options(index, runner.device).items()}
    network.visit_attention(blocks[index].to(runner.device)[None, :-1], visit, **documents)


@dataclass
class AttentionStatistics(BlockMeasure):
    """Measures the entropy and the mean attended distance of each head, as means over all queries and blocks.

    The result has ``attention_statistics.csv`` (layer, head, entropy in nats, distance in tokens) and a figure of both.
    The probabilities of a query are divided by their sum, which is below 1 with a sink, a BOS token or StickBreaking.
    For comparison, uniform attention to n keys has the entropy log n. In a block of L tokens, uniform attention has a
    mean distance of about L/4.

    Args:
        length: Number of tokens in a block, at most 512; None for the training length.
        blocks: Number of blocks.
    """

    name: ClassVar[str] = "attention_statistics"
    needs: ClassVar[tuple[type, ...]] = (SupportsAttentionProbabilities,)
    max_length: ClassVar[int | None] = MAX_TOKENS

    def measure(self, network: Any, text: Text, runner: Runner) -> Result:
        blocks = self.text_blocks(network, text)
        sums = dict[int, Tensor]()  # sums by layer, (2, heads)

        def add(layer: int, p: Tensor) -> None:
            """Add the means over queries of the probabilities (1, heads, queries, keys)."""
            p = p / p.sum(-1, keepdim=True).clamp(min=torch.finfo(p.dtype).tiny)
            sums[layer] = sums.get(layer, 0) + torch.stack([entropy(p), mean_distance(p)]).double().mean((1, 3))

        for i, _ in runner.part(blocks):
            _visit_block(network, blocks, i, runner, add)
        if not sums:  # a process without blocks adds zeros
            _visit_block(network, blocks, 0, runner, lambda layer, p: add(layer, p * 0))
        means = runner.sum(torch.stack([sums[layer] for layer in sorted(sums)], 1)) / len(blocks)  # (2, layers, heads)
        rows = [
            {"layer": layer, "head": head, "entropy": nats, "distance": distance}
            for layer, heads in enumerate(means.permute(1, 2, 0).tolist())
            for head, (nats, distance) in enumerate(heads)
        ]
        title = f"{network.name}: attention in blocks of {self.targets(network):,} tokens"
        return Result(self.name, {self.name: rows}, {self.name: _statistics_figure(means, title)})


@dataclass
class AttentionMaps(BlockMeasure):
    """Draws the attention probabilities of some heads in the first block of the text.

    Args:
        heads: Pairs (layer, head); None for the first head of each of the first 6 layers.
        length: Number of tokens in the block, at most 512; None for the training length.

    Raises:
        UserError: If a layer or head does not exist.
    """

    heads: Sequence[tuple[int, int]] | None = None
    blocks: int | None = field(default=1, init=False)

    name: ClassVar[str] = "attention_maps"
    needs: ClassVar[tuple[type, ...]] = (SupportsAttentionProbabilities,)
    max_length: ClassVar[int | None] = MAX_TOKENS

    def check(self, network: Network, text: Any) -> None:
        super().check(network, text)
        if isinstance(network, Transformer):  # the heads of other networks are known after a forward pass
            self._check_heads(product(range(len(network.blocks)), range(network.shape.heads)))

    def measure(self, network: Any, text: Text, runner: Runner) -> Result:
        pairs = [(layer, head) for layer, head in self.heads or product(range(6), [0])]
        maps: dict[tuple[int, int], Tensor | None] = {}  # of all layers and heads; None for those that are not drawn

        def add(layer: int, p: Tensor) -> None:
            """Add the maps of a layer from its probabilities (1, heads, queries, keys)."""
            for head in range(p.shape[1]):
                maps[layer, head] = p[0, head].cpu() if (layer, head) in pairs else None

        _visit_block(network, self.text_blocks(network, text), 0, runner, add)
        self._check_heads(maps)
        drawn = {pair: p for pair in pairs if (p := maps.get(pair)) is not None}
        title = f"{network.name}: attention in the first block of the text"
        return Result(self.name, figures={self.name: _maps_figure(drawn, title)})

    def _check_heads(self, existing: Iterable[tuple[int, int]]) -> None:
        """Raise a UserError unless all pairs of ``heads`` are among these."""
        existing = set(existing)
        missing = [(layer, head) for layer, head in self.heads or () if (layer, head) not in existing]
        expected = "pairs of a layer in 0..{} and a head in 0..{}".format(*max(existing))
        require(not missing, "AttentionMaps: heads", missing, expected)


def _statistics_figure(means: Tensor, title: str) -> Figure:
    """Draw the means of entropy and distance, (2, layers, heads), as heat maps."""
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
    """Draw the probabilities (queries, keys) of each pair (layer, head)."""
    figure, panels = grid(len(maps), 4, 3.8)
    for axes, ((layer, head), p) in zip(panels, maps.items(), strict=True):
        # the square root makes small probabilities visible beside a large one; NaN leaves future keys white
        visible = p.sqrt().masked_fill(torch.ones_like(p).triu(1).bool(), float("nan"))
        image = axes.imshow(visible.numpy(), cmap="magma", vmin=0, vmax=1, interpolation="nearest")
        axes.set(xlabel="key position", ylabel="query position", title=f"layer {layer}, head {head}")
    figure.colorbar(image, ax=panels, label="√ of the attention probability", shrink=0.8)
    figure.suptitle(title)
    return figure

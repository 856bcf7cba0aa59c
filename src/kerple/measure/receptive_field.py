"""`ReceptiveField`: the distance up to which a model uses its context, by gradients and by windows.

Both measurements are those of Chi et al. 2023 (arXiv 2212.10356, section 3).
"""

from collections.abc import Mapping
from dataclasses import dataclass
from itertools import takewhile
from typing import Any, ClassVar

import torch
from matplotlib.figure import Figure
from torch import Tensor, nn

from kerple.data.evaluation_text import Text
from kerple.measure.measure import BlockMeasure
from kerple.measure.plotting import label_axes
from kerple.measure.result import Result
from kerple.measure.runner import Runner
from kerple.model.network import HasEmbedding, SupportsWindows
from kerple.positions.visibility import EVERYTHING, Visibility

TOLERANCE = 0.01  # a window is sufficient if it increases the perplexity of full attention by at most this fraction


def gradient_by_distance(network: Any, tokens: Tensor, **options: Tensor) -> Tensor:
    """Return the influence of each input on the loss of the last target, as a fraction of the total.

    The influence of the input at distance d is ``‖∂ loss of the last target / ∂ embedding of this input‖₂``. The last
    input has the distance 0.

    Args:
        network: A network with a layer of token embeddings (`kerple.model.network.HasEmbedding`), in evaluation mode.
            It runs in the precision of its weights, without autocast.
        tokens: Blocks of text, (B, L+1) int64.
        **options: Other arguments of the network's ``losses``, such as ``documents``.

    Returns:
        Fractions by distance, (B, L) fp64. The sum of a row is 1.
    """
    embedded: list[Tensor] = []

    def replace_by_leaf(_: nn.Module, __: tuple[Tensor, ...], output: Tensor) -> Tensor:
        embedded.append(output.detach().requires_grad_())
        return embedded[0]

    hook = network.embedding.register_forward_hook(replace_by_leaf)
    # a backward pass cannot use tensors of inference mode, so the tokens are cloned outside of this mode
    with hook, torch.autocast(tokens.device.type, enabled=False), torch.inference_mode(False), torch.enable_grad():
        losses = network.losses(tokens.clone(), last=1, **{name: x.clone() for name, x in options.items()})
        (gradient,) = torch.autograd.grad(losses.sum(), embedded)  # (B, L, D)
    gradient = gradient[:, 1 - tokens.shape[1] :]  # without the BOS token that the network may prepend
    norms = gradient.double().norm(dim=-1).flip(1)  # (B, L), entry d at distance d
    return norms / norms.sum(1, keepdim=True)


def distance_covering(cumulative: Tensor, fraction: float) -> int:
    """Return the smallest distance at which the cumulative fractions (L,) reach ``fraction``, 0..1."""
    # the factor allows for rounding errors in the cumulative sum
    return min(int((cumulative < fraction * (1 - 1e-12)).sum()), len(cumulative) - 1)


def smallest_sufficient(perplexities: Mapping[int, float]) -> int:
    """Return the smallest window such that it and all larger windows are sufficient.

    Args:
        perplexities: Perplexity of each window. The largest window is the whole block, that is, full attention.
    """
    bound = perplexities[max(perplexities)] * (1 + TOLERANCE)
    return min(takewhile(lambda window: perplexities[window] <= bound, sorted(perplexities, reverse=True)))


@dataclass
class ReceptiveField(BlockMeasure):
    """Measures the distance up to which a model uses its context, in two ways.

    - *Gradient*: the influence of each input on the loss of the last target, see `gradient_by_distance`. The cumulative
      influence at a distance is that of all inputs up to this distance.
    - *Window*: the smallest window such that it and all larger windows are sufficient. A window is sufficient if its
      perplexity exceeds that of full attention by at most 1%. The windows are the powers of 2 below the length of the
      block, and this length.

    The two distances may differ, because n layers with a window of w keys together reach n · (w - 1) tokens back.

    The result has a figure, ``receptive_field.csv`` (distance, fraction of the influence, cumulative fraction) and
    ``receptive_window.csv`` (window, sum of the losses, targets, perplexity, ratio to the perplexity of full attention,
    whether it is the smallest sufficient window).

    Args:
        length: Number of targets in a block; None for the training length. A multiple of the training length shows
            whether the model uses tokens at distances that did not occur in training.
        blocks: Number of blocks.
    """

    name: ClassVar[str] = "receptive_field"
    needs: ClassVar[tuple[type, ...]] = (HasEmbedding, SupportsWindows)

    def measure(self, network: Any, text: Text, runner: Runner) -> Result:
        length, blocks = self.targets(network), self.text_blocks(network, text)
        windows = [*(2**i for i in range((length - 1).bit_length())), length]
        losses = {window: runner.losses() for window in windows}
        fractions = torch.zeros(length, dtype=torch.float64, device=runner.device)
        for i, tokens in runner.blocks(blocks):
            documents = blocks.document_options(i, runner.device)
            fractions += gradient_by_distance(network, tokens, **documents)[0] / len(blocks)
            with runner.autocast():
                for window, loss in losses.items():
                    visibility = EVERYTHING if window == length else Visibility(window)
                    loss.update(network.losses(tokens, visibility=visibility, **documents), 0)
        fractions = runner.sum(fractions)
        runner.synchronise(*losses.values())
        perplexities = {window: float(loss.perplexity()) for window, loss in losses.items()}
        full, cumulative = perplexities[length], fractions.cumsum(0)
        sufficient = smallest_sufficient(perplexities)
        gradients = zip(fractions.tolist(), cumulative.tolist(), strict=True)
        rows = [{"distance": d, "share": s, "cumulative": c} for d, (s, c) in enumerate(gradients)]
        window_rows = [
            {"window": window, "nll_sum": float(loss.nll), "targets": int(loss.targets), "ppl": perplexities[window]}
            | {"ratio_to_full": perplexities[window] / full, "smallest_sufficient": window == sufficient}
            for window, loss in losses.items()
        ]
        title = f"{network.name}: receptive field in {len(blocks)} blocks of {length:,} tokens"
        figure = _figure(cumulative, perplexities, sufficient, network.training_length, title)
        return Result(self.name, {self.name: rows, "receptive_window": window_rows}, {self.name: figure})


def _figure(
    cumulative: Tensor, perplexities: dict[int, float], sufficient: int, training_length: int | None, title: str
) -> Figure:
    """Draw the cumulative fractions by distance (L,), and the perplexity of each window."""
    length = len(cumulative)
    figure = Figure(figsize=(10.4, 4.2), layout="constrained")
    left, right = figure.subplots(1, 2)
    left.plot(range(1, length + 1), cumulative.tolist(), label="cumulative fraction")
    for fraction, style in ((0.5, ":"), (0.9, "-."), (0.99, "--")):
        last = distance_covering(cumulative, fraction) + 1
        left.axvline(last, color="C1", linestyle=style, linewidth=1, label=f"{fraction:.0%} in the last {last:,}")
    right.plot(list(perplexities), list(perplexities.values()), marker="o", markersize=4, label="windowed")
    full = perplexities[length]
    label = f"within {TOLERANCE:.0%} of full"
    right.axhspan(full, full * (1 + TOLERANCE), color="C2", alpha=0.25, label=label)
    right.axvline(sufficient, color="C1", linestyle="--", linewidth=1, label=f"smallest sufficient: {sufficient:,}")
    for axes in (left, right):
        axes.set_xscale("log", base=2)
        axes.xaxis.set_major_formatter("{x:,.0f}")
    ylabel = "fraction of the influence on the last target's loss"
    label_axes(left, training_length, xlabel="last inputs (tokens)", ylabel=ylabel, ylim=(0, 1.02))
    label_axes(right, training_length, xlabel="window (keys in each layer)", ylabel="perplexity")
    figure.suptitle(title)
    return figure

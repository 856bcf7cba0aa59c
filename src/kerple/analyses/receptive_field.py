"""`ReceptiveField`: how far back a model uses its context, by gradients and by the smallest sufficient window.

Both measures are those of Chi et al. 2023 (arXiv 2212.10356, section 3).
"""

from collections.abc import Mapping

import torch
from matplotlib.figure import Figure
from pytorch_lightning import LightningModule, Trainer
from torch import Tensor, nn

from kerple.evaluation.analysis import Analysis, publish, synchronise
from kerple.evaluation.figures import finish
from kerple.evaluation.metrics import TokenLoss
from kerple.evaluation.typed import network_of, strategy_name, trained_with
from kerple.model import Transformer
from kerple.positions.visibility import Visibility

TOLERANCE = 0.01  # a window is sufficient if its perplexity exceeds the full one by at most this share


def gradient_by_distance(network: Transformer, tokens: Tensor) -> Tensor:
    """Share of each input in the gradient of the last position's loss.

    ``s_d = ‖∂ loss of the last target / ∂ embedding of the input at distance d‖₂``, divided by its sum over d.

    Args:
        network: The model, in evaluation mode. It runs in the precision of its weights, without autocast.
        tokens: (B, L+1) int64.

    Returns:
        (B, L) fp64. Entry d is the share of the input that is d tokens before the last one; rows add up to 1.
    """
    embedded: list[Tensor] = []

    def replace_by_leaf(_: nn.Module, __: tuple[Tensor, ...], output: Tensor) -> Tensor:
        embedded.append(output.detach().requires_grad_())
        return embedded[0]

    hook = network.embedding.register_forward_hook(replace_by_leaf)
    try:
        # a backward pass cannot use tensors of inference mode, so they are copied outside of it
        with torch.inference_mode(False), torch.enable_grad(), torch.autocast(tokens.device.type, enabled=False):
            loss = network.losses(tokens.clone(), last=1).sum()
            (gradient,) = torch.autograd.grad(loss, embedded)  # (B, L, D)
    finally:
        hook.remove()
    norms = gradient.double().norm(dim=-1).flip(1)  # (B, L), entry d at distance d
    return norms / norms.sum(1, keepdim=True)


def distance_covering(cumulative: Tensor, part: float) -> int:
    """Smallest distance at which the cumulative shares (L,) of the distances reach ``part``, in 0..1."""
    return min(int((cumulative < part * (1 - 1e-12)).sum()), len(cumulative) - 1)


def smallest_sufficient(perplexities: Mapping[int, float]) -> int:
    """Smallest window that is sufficient, as are all larger ones.

    Args:
        perplexities: Perplexity with each window; the largest window is the whole segment.
    """
    sufficient = full = max(perplexities)
    for window in sorted(perplexities, reverse=True):
        if perplexities[window] > perplexities[full] * (1 + TOLERANCE):
            break
        sufficient = window
    return sufficient


class ReceptiveField(Analysis):
    """Measures how far back a model uses its context in two ways.

    The first is the norm of the gradient of the last position's loss at each input, as a cumulative share over
    distance. The second is the smallest window, of the powers of 2, whose perplexity is within 1% of the full one. They
    need not agree: with a window w, L layers reach L · (w - 1) tokens back. Writes ``receptive_field.csv`` (distance,
    share of the gradient, cumulative share) and ``receptive_window.csv`` (window, sum of the losses, targets,
    perplexity, ratio to full, whether it is the smallest sufficient one).

    Args:
        length: Targets in a segment; None for the training length. A multiple of the training length shows whether
            the model uses farther tokens than it was trained with.
        blocks: Number of segments.
    """

    name = "receptive_field"

    def analyse(self, trainer: Trainer, pl_module: LightningModule) -> None:
        network, length = network_of(pl_module), self.targets(pl_module)
        windows = [*(2**i for i in range((length - 1).bit_length())), length]
        losses = {w: TokenLoss().to(pl_module.device) for w in windows}
        shares = torch.zeros(length, dtype=torch.float64, device=pl_module.device)
        for _, tokens in self.read(trainer, pl_module):
            shares += gradient_by_distance(network, tokens)[0] / self.blocks
            with trainer.precision_plugin.forward_context():
                for window, loss in losses.items():
                    loss.update(network.losses(tokens, visibility=Visibility(None if window == length else window)), 0)
        shares = trainer.strategy.reduce(shares, reduce_op="sum").cpu()
        synchronise(*losses.values())
        perplexities = {w: float(loss.perplexity()) for w, loss in losses.items()}
        full, cumulative = perplexities[length], shares.cumsum(0)
        sufficient = smallest_sufficient(perplexities)
        gradients = zip(shares.tolist(), cumulative.tolist(), strict=True)
        rows = [{"distance": d, "share": s, "cumulative": c} for d, (s, c) in enumerate(gradients)]
        publish(trainer, self.name, self._figure(cumulative, perplexities, sufficient, pl_module), rows)
        rows = [
            {"window": window, "nll_sum": float(loss.nll), "targets": int(loss.targets), "ppl": perplexities[window]}
            | {"ratio_to_full": perplexities[window] / full, "smallest_sufficient": window == sufficient}
            for window, loss in losses.items()
        ]
        publish(trainer, "receptive_window", None, rows)

    def _figure(
        self, cumulative: Tensor, perplexities: dict[int, float], sufficient: int, pl_module: LightningModule
    ) -> Figure:
        training_length, length = trained_with(pl_module), len(cumulative)
        figure = Figure(figsize=(10.4, 4.2), layout="constrained")
        left, right = figure.subplots(1, 2)
        left.plot(range(1, length + 1), cumulative.tolist(), label="cumulative share")
        for part, style in ((0.5, ":"), (0.9, "-."), (0.99, "--")):
            last = distance_covering(cumulative, part) + 1
            left.axvline(last, color="C1", linestyle=style, linewidth=1, label=f"{part:.0%} in the last {last:,}")
        right.plot(list(perplexities), list(perplexities.values()), marker="o", markersize=4, label="windowed")
        full, label = perplexities[length], f"within {TOLERANCE:.0%} of full"
        right.axhspan(full, full * (1 + TOLERANCE), color="C2", alpha=0.25, label=label)
        right.axvline(sufficient, color="C1", linestyle="--", linewidth=1, label=f"smallest sufficient: {sufficient:,}")
        for axes in (left, right):
            axes.set_xscale("log", base=2)
            axes.xaxis.set_major_formatter("{x:,.0f}")
        share = "cumulative share of the norm of the last loss's gradient"
        finish(left, training_length, xlabel="last inputs (tokens)", ylabel=share, ylim=(0, 1.02))
        finish(right, training_length, xlabel="window (keys in each layer)", ylabel="perplexity")
        figure.suptitle(f"{strategy_name(pl_module)}: receptive field in {self.blocks} segments of {length:,} tokens")
        return figure

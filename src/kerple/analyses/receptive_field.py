"""`ReceptiveField`: how far back a model uses its context, by gradients and by the smallest sufficient window."""

from collections.abc import Sequence

import torch
from matplotlib.figure import Figure
from pytorch_lightning import LightningModule, Trainer
from torch import Tensor

from kerple.analyses.gradient_distance import distance_covering, gradient_by_distance, smallest_sufficient
from kerple.base.errors import UserError
from kerple.evaluation.analysis import Analysis, publish, skip, strategy_name, synchronise
from kerple.evaluation.metrics import TokenLoss
from kerple.evaluation.typed import network_of


class ReceptiveField(Analysis):
    """Measures how far back a model uses its context in two ways (Chi et al. 2023, arXiv 2212.10356).

    The first is the norm of the gradient of the last position's loss at each input, as a cumulative share over
    distance. The second is the smallest window whose perplexity is within ``tolerance`` of the full one. They need not
    agree: with a window w, L layers reach L · (w - 1) tokens back. Writes ``receptive_field.csv`` (distance, share of
    the gradient, cumulative share) and ``receptive_window.csv`` (window, sum of the losses, targets, perplexity, ratio
    to full, whether it is the smallest sufficient one).

    Args:
        length: Targets in a segment; None for the training length. A multiple of the training length shows whether
            the model uses farther tokens than it was trained with.
        blocks: Number of segments.
        windows: Windows to try, in keys; None for the powers of 2 below the length. The full window is always tried.
        tolerance: Largest relative excess of perplexity at which a window counts as sufficient.

    Raises:
        UserError: If a number is out of range.
    """

    name = "receptive_field"

    def __init__(
        self,
        length: int | None = None,
        blocks: int = 32,
        windows: Sequence[int] | None = None,
        tolerance: float = 0.01,
    ) -> None:
        super().__init__(length, blocks)
        if tolerance < 0 or (windows is not None and (not windows or min(windows) < 1)):
            raise UserError(
                f"ReceptiveField: got windows {windows} and tolerance {tolerance}, expected positive windows and a "
                "tolerance of at least 0"
            )
        self.windows = windows
        self.tolerance = tolerance

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        super().setup(trainer, pl_module, stage)
        length = self._length(pl_module)
        if stage == "test" and self.windows and max(self.windows) > length:
            raise UserError(
                f"ReceptiveField: windows: got {max(self.windows)}, expected at most {length}, the length of a "
                "segment; choose shorter windows or a longer length"
            )

    def analyse(self, trainer: Trainer, pl_module: LightningModule) -> None:
        network, length = network_of(pl_module), self._length(pl_module)
        given = self.windows or [2**i for i in range(length.bit_length())]
        windows = sorted(set(given) - {length})
        losses = {w: TokenLoss().to(pl_module.device) for w in (*windows, length)}
        shares = torch.zeros(length, dtype=torch.float64, device=pl_module.device)
        for _, tokens in self.read(trainer, pl_module):
            shares += gradient_by_distance(network, tokens)[0] / self.blocks
            with trainer.precision_plugin.forward_context():
                for window, loss in losses.items():
                    loss.update(network.losses(tokens, window=None if window == length else window), 0)
        shares = trainer.strategy.reduce(shares, reduce_op="sum").cpu()
        synchronise(*losses.values())
        perplexities = {w: float(loss.perplexity()) for w, loss in losses.items()}
        enough = smallest_sufficient(perplexities, perplexities[length], self.tolerance)
        if enough is None:  # a number is within any tolerance of itself
            skip(trainer, self.name, f"ReceptiveField: skipped: the loss of {strategy_name(pl_module)} is no number")
            return
        cumulative = shares.cumsum(0)
        publish(
            trainer,
            self.name,
            self._figure(cumulative, perplexities, enough, pl_module),
            [
                {"distance": d, "share": float(shares[d]), "cumulative": float(cumulative[d])}
                for d in range(len(shares))
            ],
        )
        publish(
            trainer,
            "receptive_window",
            None,
            [
                {
                    "window": window,
                    "nll_sum": float(loss.nll.sum()),
                    "targets": int(loss.targets.sum()),
                    "ppl": perplexities[window],
                    "ratio_to_full": perplexities[window] / perplexities[length],
                    "smallest_sufficient": window == enough,
                }
                for window, loss in losses.items()
            ],
        )

    def _figure(
        self, cumulative: Tensor, perplexities: dict[int, float], enough: int, pl_module: LightningModule
    ) -> Figure:
        trained, length = network_of(pl_module).shape.length, len(cumulative)
        drawn = Figure(figsize=(10.4, 4.2), layout="constrained")
        left, right = drawn.subplots(1, 2)
        left.plot(range(1, length + 1), cumulative.tolist(), label="cumulative share")
        shares = cumulative.diff(prepend=torch.zeros(1, dtype=cumulative.dtype))
        for part, style in ((0.5, ":"), (0.9, "-."), (0.99, "--")):
            reached = distance_covering(shares, part) + 1
            left.axvline(reached, color="C1", linestyle=style, linewidth=1, label=f"{part:.0%} in the last {reached:,}")
        left.set(
            xlabel="last inputs (tokens)",
            ylabel="cumulative share of the gradient's norm",
            title="gradient of the last position's loss",
            ylim=(0, 1.02),
        )
        right.plot(list(perplexities), list(perplexities.values()), marker="o", markersize=4, label="windowed")
        full = perplexities[length]
        right.axhspan(
            full, full * (1 + self.tolerance), color="C2", alpha=0.25, label=f"within {self.tolerance:.0%} of full"
        )
        right.axvline(enough, color="C1", linestyle="--", linewidth=1, label=f"smallest sufficient: {enough:,}")
        right.set(xlabel="window (keys in each layer)", ylabel="perplexity", title="perplexity by window")
        for axes in (left, right):
            axes.axvline(trained, color="0.6", linewidth=1, label=f"training length {trained:,}")
            axes.set_xscale("log", base=2)
            axes.xaxis.set_major_formatter("{x:,.0f}")
            axes.grid(alpha=0.3)
            axes.legend(fontsize=8)
        drawn.suptitle(f"{strategy_name(pl_module)}: receptive field in {self.blocks} segments of {length:,} tokens")
        return drawn

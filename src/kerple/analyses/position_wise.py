"""`PositionWisePerplexity`: perplexity at each position, with the whole context and with the last keys only."""

import math

import torch
from matplotlib.figure import Figure
from pytorch_lightning import LightningModule, Trainer
from torch import Tensor

from kerple.base.errors import UserError
from kerple.evaluation.analysis import Analysis, publish, strategy_name, synchronise
from kerple.evaluation.metrics import TokenLoss
from kerple.evaluation.protocols import per_position
from kerple.evaluation.results import finite
from kerple.evaluation.typed import network_of


class PositionWisePerplexity(Analysis):
    """Measures perplexity at each position of long segments, by `full` and `windowed` on the same targets.

    The *context gain* at a position is the loss with the window minus the loss without it, in nats per token. It says
    what attention to farther tokens is worth there; if it is negative, they do harm. Writes ``position_wise.csv``
    (position, sums and perplexities of both, context gain) and a figure with means over bins of positions, as figure 5
    of Chi et al. 2022.

    Args:
        length: Targets in a segment.
        window: Number of keys that a query sees in `windowed`; None for the training length.
        blocks: Number of segments.
        bins: Number of points of the curves in the figure.

    Raises:
        UserError: If a number is not positive, or the window is longer than the segment.
    """

    name = "position_wise"

    def __init__(self, length: int, window: int | None = None, blocks: int = 64, bins: int = 32) -> None:
        super().__init__(length, blocks)
        if bins < 1 or (window is not None and not 1 <= window <= length):
            raise UserError(
                f"PositionWisePerplexity: got window {window} and bins {bins}, expected a window in 1..{length} and at "
                "least one bin"
            )
        self.window = window
        self.bins = bins

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        super().setup(trainer, pl_module, stage)
        window = self.window or network_of(pl_module).shape.length
        if stage == "test" and window > self._length(pl_module):
            raise UserError(
                f"PositionWisePerplexity: length: got {self._length(pl_module)}, expected at least {window}, the "
                "window, by default the training length: no target would lose any context; change one of them"
            )

    def analyse(self, trainer: Trainer, pl_module: LightningModule) -> None:
        network, length = network_of(pl_module), self._length(pl_module)
        window = self.window or network.shape.length
        full, windowed = (TokenLoss(length).to(pl_module.device) for _ in range(2))
        for _, tokens in self.read(trainer, pl_module):
            with trainer.precision_plugin.forward_context():
                full.update(per_position(network, tokens, length))
                windowed.update(per_position(network, tokens, length, window=window))
        synchronise(full, windowed)
        rows = [
            {
                "position": i,
                "window": window,
                "targets": int(full.targets[i]),
                "nll_full": float(full.nll[i]),
                "nll_windowed": float(windowed.nll[i]),
                "ppl_full": finite((full.nll[i] / full.targets[i]).exp()),
                "ppl_windowed": finite((windowed.nll[i] / windowed.targets[i]).exp()),
                "context_gain": float((windowed.nll[i] - full.nll[i]) / full.targets[i]),
            }
            for i in range(length)
        ]
        publish(trainer, self.name, self._figure(full, windowed, window, pl_module), rows)

    def _figure(self, full: TokenLoss, windowed: TokenLoss, window: int, pl_module: LightningModule) -> Figure:
        trained, width = network_of(pl_module).shape.length, -(-len(full.nll) // self.bins)
        middles = torch.arange(len(full.nll), dtype=torch.float64).split(width)
        at = [float(m.mean()) for m in middles]
        counts = _binned(full.targets, width)
        loss, loss_windowed = _binned(full.nll, width) / counts, _binned(windowed.nll, width) / counts
        drawn = Figure(figsize=(6.4, 6), layout="constrained")
        above, below = drawn.subplots(2, sharex=True, height_ratios=(3, 2))
        above.plot(at, loss.exp().tolist(), label="full", linewidth=2.5)
        above.plot(at, loss_windowed.exp().tolist(), "--", label=f"windowed: the last {window:,} keys of every layer")
        above.set(
            ylabel=f"perplexity (mean of {width} positions)" if width > 1 else "perplexity",
            title=f"{strategy_name(pl_module)}: perplexity by position, {int(full.targets[0])} segments",
        )
        below.axhline(0, color="black", linewidth=0.8)
        below.plot(at, (loss_windowed - loss).tolist(), color="C2", label="context gain")
        below.set(xlabel="position in the segment (tokens)", ylabel="windowed - full (nats per token)")
        for axes in (above, below):
            axes.axvline(trained, color="0.6", linestyle="--", linewidth=1, label=f"training length {trained:,}")
            axes.grid(alpha=0.3)
            axes.legend()
        # without the first bin, whose positions have hardly any context: its large values would flatten the rest
        tops = torch.cat([loss[1:], loss_windowed[1:]]).exp() if len(loss) > 2 else loss.exp()
        low, high = float(tops.min()), float(tops.max())
        if math.isfinite(low) and math.isfinite(high):
            above.set_ylim(low - 0.05 * (high - low), high + 0.15 * (high - low) + 1e-6)
        return drawn


def _binned(values: Tensor, width: int) -> Tensor:
    return torch.stack([part.sum() for part in values.cpu().split(width)])

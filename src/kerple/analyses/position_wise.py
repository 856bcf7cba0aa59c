"""`PositionWisePerplexity`: perplexity at each position, with the whole context and with the last keys only."""

import torch
from matplotlib.figure import Figure
from pytorch_lightning import LightningModule, Trainer

from kerple.base.errors import UserError
from kerple.evaluation.analysis import Analysis, publish, synchronise
from kerple.evaluation.figures import finish
from kerple.evaluation.metrics import TokenLoss
from kerple.evaluation.protocols import full, windowed
from kerple.evaluation.typed import network_of, strategy_name


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
        UserError: If a number is not positive. In `setup`, if the window is longer than the segment.
    """

    name = "position_wise"

    def __init__(self, length: int, window: int | None = None, blocks: int = 64, bins: int = 32) -> None:
        super().__init__(length, blocks)
        if bins < 1 or (window is not None and window < 1):
            raise UserError(f"PositionWisePerplexity: got window {window}, bins {bins}, expected positive numbers")
        self.window = window
        self.bins = bins

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        super().setup(trainer, pl_module, stage)
        length, window = self.targets(pl_module), self._keys(pl_module)
        if stage == "test" and window > length:
            raise UserError(
                f"PositionWisePerplexity: length: got {length}, expected at least {window}, the window, by default the "
                "training length: no target would lose any context; change one of them"
            )

    def analyse(self, trainer: Trainer, pl_module: LightningModule) -> None:
        network, length, window = network_of(pl_module), self.targets(pl_module), self._keys(pl_module)
        in_full, in_window = (TokenLoss(length).to(pl_module.device) for _ in range(2))
        for _, tokens in self.read(trainer, pl_module):
            with trainer.precision_plugin.forward_context():
                in_full.update(full(network, tokens, length))
                in_window.update(windowed(network, tokens, length, window=window))
        synchronise(in_full, in_window)
        targets = in_full.targets[0]  # of each position
        columns = {
            "nll_full": in_full.nll,
            "nll_windowed": in_window.nll,
            "ppl_full": (in_full.nll / targets).exp(),
            "ppl_windowed": (in_window.nll / targets).exp(),
            "context_gain": (in_window.nll - in_full.nll) / targets,
        }
        rows = [
            {"position": i, "window": window, "targets": int(targets)} | dict(zip(columns, values, strict=True))
            for i, values in enumerate(torch.stack(list(columns.values()), 1).tolist())
        ]
        publish(trainer, self.name, self._figure(in_full, in_window, pl_module), rows)

    def _keys(self, pl_module: LightningModule) -> int:
        return self.window or network_of(pl_module).shape.length

    def _figure(self, in_full: TokenLoss, in_window: TokenLoss, pl_module: LightningModule) -> Figure:
        trained, width = network_of(pl_module).shape.length, -(-len(in_full.nll) // self.bins)
        middles = torch.arange(len(in_full.nll), dtype=torch.float64).split(width)
        at = [float(m.mean()) for m in middles]
        loss, loss_windowed = (
            torch.stack([part.mean() for part in (x.nll / x.targets).cpu().split(width)]) for x in (in_full, in_window)
        )
        figure = Figure(figsize=(6.4, 6), layout="constrained")
        above, below = figure.subplots(2, sharex=True, height_ratios=(3, 2))
        above.plot(at, loss.exp().tolist(), label="full", linewidth=2.5)
        label = f"windowed: the last {self._keys(pl_module):,} keys of every layer"
        above.plot(at, loss_windowed.exp().tolist(), "--", label=label)
        below.axhline(0, color="black", linewidth=0.8)
        below.plot(at, (loss_windowed - loss).tolist(), color="C2", label="context gain")
        title = f"{strategy_name(pl_module)}: perplexity by position, {int(in_full.targets[0])} segments"
        finish(above, trained, ylabel=f"perplexity (mean of {width} positions)", title=title)
        gain = "windowed - full (nats per token)"
        finish(below, trained, xlabel="position in the segment (tokens)", ylabel=gain)
        # without the first bin, whose positions have hardly any context: its large values would flatten the rest
        values = torch.cat([loss[1:], loss_windowed[1:]]).exp() if len(loss) > 2 else loss.exp()
        low, high = float(values.min()), float(values.max())
        above.set_ylim(low - 0.05 * (high - low), high + 0.15 * (high - low) + 1e-6)
        return figure

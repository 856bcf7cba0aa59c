"""`ShiftTest`: perplexity of the same text at shifted positions, which relative strategies do not change."""

from collections.abc import Sequence
from typing import Any

from matplotlib.figure import Figure
from pytorch_lightning import LightningModule, Trainer
from pytorch_lightning.utilities import rank_zero_warn

from kerple.base.errors import UserError
from kerple.evaluation.analysis import Analysis, publish, synchronise
from kerple.evaluation.figures import finish, panel
from kerple.evaluation.metrics import TokenLoss
from kerple.evaluation.typed import max_positions, network_of, strategy_name


class ShiftTest(Analysis):
    """Perplexity of the same segments with all positions shifted by 0, 100, 200, …

    Writes ``shift.csv``: shift, sum of the losses, targets, perplexity. Shifts for which the strategy has too few
    positions are left out with a warning. To test such a strategy, for example Learned, use segments that are shorter
    than the training length.

    Args:
        shifts: Numbers of tokens that are added to every position of a segment. One shift must be 0, for comparison.
        length: Targets in a segment; None for the training length.
        blocks: Number of segments.

    Raises:
        UserError: If a shift is negative, or none is 0.
    """

    name = "shift"

    def __init__(
        self, shifts: Sequence[int] = (0, 100, 200, 300, 400, 500), length: int | None = None, blocks: int = 64
    ) -> None:
        super().__init__(length, blocks)
        if 0 not in shifts or min(shifts) < 0:
            raise UserError(f"ShiftTest: shifts: got {list(shifts)}, expected numbers of at least 0, and 0 among them")
        self.shifts = sorted(set(shifts))

    def analyse(self, trainer: Trainer, pl_module: LightningModule) -> None:
        network, length, limit = network_of(pl_module), self.targets(pl_module), max_positions(network_of(pl_module))
        possible = [shift for shift in self.shifts if shift + length <= limit]
        losses = {shift: TokenLoss().to(pl_module.device) for shift in possible}
        for _, tokens in self.read(trainer, pl_module):
            for shift, loss in losses.items():
                with trainer.precision_plugin.forward_context():
                    loss.update(network.losses(tokens, offset=shift), 0)
        synchronise(*losses.values())
        if others := [shift for shift in self.shifts if shift not in possible]:
            rank_zero_warn(f"ShiftTest: left out {others}: {strategy_name(pl_module)} has only {limit} positions")
        rows = [
            {"shift": shift, "length": length, "nll_sum": float(loss.nll), "targets": int(loss.targets)}
            | {"ppl": float(loss.perplexity())}
            for shift, loss in losses.items()
        ]
        publish(trainer, self.name, _figure(rows, strategy_name(pl_module)), rows)


def _figure(rows: Sequence[dict[str, Any]], strategy: str) -> Figure:
    figure, axes = panel(6.4, 4)
    shifts, values = zip(*((row["shift"], row["ppl"]) for row in rows), strict=True)
    axes.plot(shifts, values, marker="o", label=strategy)
    # at least 1% on both sides, so that rounding errors do not look like an effect
    axes.set_ylim(min(*values, values[0] * 0.99) * 0.99, max(*values, values[0] * 1.01) * 1.01)
    title = f"{strategy}: the same {rows[0]['length']}-token segments, shifted"
    finish(axes, xlabel="position of the first token", ylabel="perplexity", title=title)
    return figure

"""`ShiftTest`: perplexity of the same text at shifted positions, which relative strategies do not change."""

from collections.abc import Sequence
from typing import Any

from matplotlib.figure import Figure
from pytorch_lightning import LightningModule, Trainer

from kerple.base.errors import UserError
from kerple.evaluation.analysis import Analysis, publish, strategy_name, synchronise
from kerple.evaluation.metrics import TokenLoss
from kerple.evaluation.results import finite, reach
from kerple.evaluation.typed import network_of


class ShiftTest(Analysis):
    """Perplexity of the same segments with all positions shifted by 0, 100, 200, …

    Writes ``shift.csv``: shift, sum of the losses, targets, perplexity. If the strategy has too few positions for a
    shift, the row has the reason instead. To test such a strategy, for example Learned, use segments that are shorter
    than the training length.

    Args:
        shifts: What is added to every position of a segment, in tokens. One shift must be 0, for comparison.
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
        network, length = network_of(pl_module), self._length(pl_module)
        bound = reach(network)
        within = [s for s in self.shifts if bound is None or s + length <= bound]
        sums = {shift: TokenLoss().to(pl_module.device) for shift in within}
        for _, tokens in self.read(trainer, pl_module):
            for shift, loss in sums.items():
                with trainer.precision_plugin.forward_context():
                    loss.update(network.losses(tokens, offset=shift), 0)
        synchronise(*sums.values())
        rows: list[dict[str, Any]] = []
        for shift in self.shifts:
            found = sums.get(shift)
            rows.append(
                {
                    "shift": shift,
                    "length": length,
                    "nll_sum": None if found is None else float(found.nll.sum()),
                    "targets": 0 if found is None else int(found.targets.sum()),
                    "ppl": None if found is None else finite(found.perplexity()),
                    "skipped": None if found is not None else f"the strategy has only {bound} positions",
                }
            )
        publish(trainer, self.name, _figure(rows, pl_module), rows)


def _figure(rows: Sequence[dict[str, Any]], pl_module: LightningModule) -> Figure:
    drawn = Figure(figsize=(6.4, 4), layout="constrained")
    axes = drawn.add_subplot()
    points = [(r["shift"], r["ppl"]) for r in rows if r["ppl"] is not None]
    axes.plot([s for s, _ in points], [p for _, p in points], marker="o", label=strategy_name(pl_module))
    for i, row in enumerate(r for r in rows if r["skipped"] is not None):
        axes.axvline(row["shift"], color="0.7", linestyle=":", label=None if i else f"skipped: {row['skipped']}")
    if points:  # at least 1% on both sides, so that rounding errors do not look like an effect
        (_, base), values = points[0], [p for _, p in points]
        axes.set_ylim(min(*values, base * 0.99) * 0.99, max(*values, base * 1.01) * 1.01)
    axes.set(
        xlabel="position of the first token",
        ylabel="perplexity",
        title=f"{strategy_name(pl_module)}: the same {rows[0]['length']}-token segments, shifted",
    )
    axes.grid(alpha=0.3)
    axes.legend()
    return drawn

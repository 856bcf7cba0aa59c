"""`ShiftTest`: perplexity of the same text at shifted positions. A shift has no effect on relative strategies."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from matplotlib.figure import Figure

from kerple.base.errors import require
from kerple.data.evaluation_text import Text
from kerple.measure.measure import BlockMeasure, length_limit
from kerple.measure.plotting import label_axes, panel
from kerple.measure.result import Result
from kerple.measure.runner import Runner
from kerple.model.network import SupportsOffset


@dataclass
class ShiftTest(BlockMeasure):
    """Measures the perplexity of the same blocks with all positions shifted.

    The result has a figure and ``shift.csv`` (shift, length, sum of the losses, targets, perplexity). Shifts for which
    the network has too few positions are left out, and the report names them. For a strategy that has no positions
    beyond the training length, such as Learned, use a length below the training length.

    Args:
        shifts: Numbers of tokens to add to every position of a block. One shift must be 0, for comparison.
        length: Number of targets in a block; None for the training length.
        blocks: Number of blocks; None for all.

    Raises:
        UserError: If a shift is negative, or none is 0.
    """

    shifts: Sequence[int] = (0, 100, 200, 300, 400, 500)
    blocks: int | None = 64

    name: ClassVar[str] = "shift"
    needs: ClassVar[tuple[type, ...]] = (SupportsOffset,)

    def __post_init__(self) -> None:
        super().__post_init__()
        expected = "a list with 0 and with positive numbers of tokens"
        require(0 in self.shifts and min(self.shifts) >= 0, "ShiftTest: shifts", list(self.shifts), expected)

    def measure(self, network: Any, text: Text, runner: Runner) -> Result:
        length = self.targets(network)
        limit = length_limit(network)
        shifts = sorted(set(self.shifts))
        losses = {shift: runner.losses() for shift in shifts if shift + length <= limit}
        blocks = self.text_blocks(network, text)
        for i, tokens in runner.blocks(blocks):
            documents = blocks.document_options(i, runner.device)
            for shift, loss in losses.items():
                with runner.autocast():
                    loss.update(network.losses(tokens, offset=shift, **documents), 0)
        runner.synchronise(*losses.values())
        skipped = [shift for shift in shifts if shift not in losses]
        note = f"ShiftTest: shifts left out: {skipped}; {network.name} has only {limit} positions" if skipped else ""
        rows = [
            {"shift": shift, "length": length, "nll_sum": float(loss.nll), "targets": int(loss.targets)}
            | {"ppl": float(loss.perplexity())}
            for shift, loss in losses.items()
        ]
        return Result(self.name, {self.name: rows}, {self.name: _figure(rows, network.name)}, report=note)


def _figure(rows: Sequence[dict[str, Any]], strategy: str) -> Figure:
    """Draw perplexity against the shift, from the rows of the table."""
    figure, axes = panel(6.4, 4)
    shifts, values = zip(*((row["shift"], row["ppl"]) for row in rows), strict=True)
    axes.plot(shifts, values, marker="o", label=strategy)
    # the axis spans at least 1% on both sides, so that rounding errors do not look like an effect
    axes.set_ylim(min(*values, values[0] * 0.99) * 0.99, max(*values, values[0] * 1.01) * 1.01)
    title = f"{strategy}: the same blocks of {rows[0]['length']:,} tokens, shifted"
    label_axes(axes, xlabel="position of the first token", ylabel="perplexity", title=title)
    return figure

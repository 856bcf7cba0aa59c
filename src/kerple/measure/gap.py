"""`GapCurve`: the gain from a context whose positions are far from those of the targets."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
import torch
from matplotlib.figure import Figure
from numpy.typing import NDArray

from kerple.base.errors import UserError
from kerple.data.text import Text, TextBlocks
from kerple.measure.drawing import label_axes, panel
from kerple.measure.measure import Measure, known_training_length, length_limit, require_positive
from kerple.measure.result import Result
from kerple.measure.results import Row
from kerple.measure.runner import Runner
from kerple.model.network import Network, Offset


@dataclass
class GapCurve(Measure):
    """Measures the loss of ``k`` targets after ``context`` tokens, with a gap in the positions between the two.

    *No context* reads only the inputs of the targets. The fraction of its gain that the context keeps is (no context -
    gap) / (no context - no gap), in losses. This tests positions at any distance with short inputs. It does not test
    whether a model finds something in a long text. Positions in layers with a window do not jump.

    The result has ``gap.csv`` (gap, document, loss), a figure, and a line for each gap. Intervals are 95% over
    documents, and those of fractions by the jackknife.

    Args:
        gaps: Gaps in tokens; None for 1/4, 1/2, 1, 2, 4 and 16 times the training length.
        context: Number of inputs before the gap.
        k: Number of targets, whose inputs are after the gap.
        blocks: Number of first blocks of the text, each of another document.

    Raises:
        UserError: If a number is not positive.
    """

    gaps: Sequence[int] | None = None
    context: int = 256
    k: int = 64
    blocks: int = 12

    name: ClassVar[str] = "gap"
    needs: ClassVar[tuple[type, ...]] = (Offset,)

    def __post_init__(self) -> None:
        require_positive(self, "context", "k", "blocks")
        if self.gaps is not None and (not self.gaps or min(self.gaps) < 1):
            raise UserError(f"GapCurve: gaps: got {list(self.gaps)}, expected positive numbers")

    def check(self, network: Network, text: Any) -> None:
        super().check(network, text)
        self.fitting_gaps(network)
        self._blocks(text)

    def fitting_gaps(self, network: Network) -> list[int]:
        """0 and the gaps for which the network has enough positions, ascending."""
        gaps = self.gaps
        if gaps is None:
            trained = known_training_length(network, "GapCurve: gaps")
            gaps = [trained * n // 4 for n in (1, 2, 4, 8, 16, 64)]
        return [gap for gap in sorted({0, *gaps}) if gap + self.context + self.k <= length_limit(network)]

    def measure(self, network: Any, text: Text, runner: Runner) -> Result:
        gaps, blocks = self.fitting_gaps(network), self._blocks(text)
        sums = torch.zeros(1 + len(gaps), len(blocks), dtype=torch.float64, device=runner.device)
        for i, tokens in runner.blocks(blocks):
            with runner.autocast():
                sums[0, i] = network.losses(tokens[:, -self.k - 1 :], self.k).double().sum()
                for n, gap in enumerate(gaps, 1):
                    offset = gap * (torch.arange(self.context + self.k, device=runner.device) >= self.context)
                    sums[n, i] = network.losses(tokens, self.k, offset=offset).double().sum()
        sums = runner.sum_losses(sums)
        assert blocks.documents is not None
        losses, documents = (sums / self.k).numpy(), blocks.documents.tolist()
        labels = ["no context", *gaps]
        rows = [
            {"gap": label, "document": document, "loss": float(loss)}
            for label, of_label in zip(labels, losses, strict=True)
            for document, loss in zip(documents, of_label, strict=True)
        ]
        lengths = [self.k, *(gap + self.context + self.k for gap in gaps)]
        protocols = [f"no_context{self.k}", *[f"gap{self.k}"] * len(gaps)]
        table = [
            Row("ppl", protocol, length, None, i, float(sums[n, i]), self.k)
            for n, (protocol, length) in enumerate(zip(protocols, lengths, strict=True))
            for i in range(len(blocks))
        ]
        curve = [
            (gap, *_kept_fraction(losses[0], losses[1], at_gap)) for gap, at_gap in zip(gaps, losses[1:], strict=True)
        ]
        means = losses.mean(1)
        lines = [f"gap curve: {len(blocks)} documents, loss without context {means[0]:.3f}, with it {means[1]:.3f}"]
        for (gap, kept, low, high), mean in zip(curve[1:], means[2:], strict=True):
            fraction = f"keeps {kept:.0%} of its gain ({low:.0%} to {high:.0%})"
            lines.append(f"gap of {gap:,}: loss {mean:.3f}, the context {fraction if high > 0 else 'harms'}")
        about = {"strategy": network.name, "training_length": network.training_length, "split": text.split}
        about |= {"context": self.context, "k": self.k, "block_document": documents, "precision": runner.precision}
        scalars = {f"gap/kept/{gap}": kept for gap, kept, *_ in curve[1:]}
        figures = {self.name: _figure(curve[1:], network, len(blocks))} if len(curve) > 1 else {}
        return Result(self.name, {self.name: rows}, figures, table, about, scalars, "\n".join(lines))

    def _blocks(self, text: Text) -> TextBlocks:
        return text.document_blocks(self.context + self.k, self.blocks, per_document=1)


def _kept_fraction(none: NDArray[Any], near: NDArray[Any], far: NDArray[Any]) -> tuple[float, float, float]:
    """Fraction of the gain from a context that remains at a gap, and the ends of its 95% interval.

    Args:
        none: Loss of each document without the context.
        near: Loss of each document with the context and no gap.
        far: Loss of each document with the context and the gap.
    """
    from scipy import stats  # takes a second of processor time to import

    n, lost, gain = len(none), far - near, none - near
    kept = 1 - lost.sum() / gain.sum()
    if n < 2:
        return float(kept), -np.inf, np.inf
    without = 1 - (lost.sum() - lost) / (gain.sum() - gain)
    half = stats.t.ppf(0.975, n - 1) * np.sqrt((n - 1) / n * np.square(without - without.mean()).sum())
    return float(kept), float(kept - half), float(kept + half)


def _figure(curve: list[tuple[int, float, float, float]], network: Network, documents: int) -> Figure:
    figure, axes = panel(6.4, 4)
    gaps, kept, low, high = np.array(curve).T
    axes.errorbar(gaps, kept, (kept - low, high - kept), marker="o", markersize=4, capsize=2, label=network.name)
    axes.axhline(0, color="black", linewidth=0.8)
    axes.set_yscale("symlog", linthresh=1)  # beyond the training length the harm may be many times the gain
    title = f"{network.name}: fraction of the context's gain at a gap, {documents} documents"
    ylabel = "fraction of the gain, 95% intervals"
    label_axes(axes, network.training_length, gaps.astype(int), xlabel="gap (tokens)", ylabel=ylabel, title=title)
    return figure

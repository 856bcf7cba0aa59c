"""`GapCurve`: the gain from a context if a gap separates its positions from the positions of the targets."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np
import pandas as pd
import torch
from matplotlib.figure import Figure
from numpy.typing import NDArray

from kerple.base.errors import require
from kerple.data.evaluation_text import Text, TextBlocks
from kerple.measure.far_context import document_groups, units
from kerple.measure.measure import Measure, known_training_length, length_limit, require_positive
from kerple.measure.plotting import label_axes, panel
from kerple.measure.result import Result
from kerple.measure.runner import Runner
from kerple.model.network import Network, SupportsOffset

if TYPE_CHECKING:
    from kerple.measure.loss_metrics import TokenLoss

NO_CONTEXT = "no context"


@dataclass
class GapCurve(Measure):
    """Measures the loss of ``k`` targets after ``context`` tokens, with a gap in the positions between the two.

    The gain from the context is the loss without it minus the loss with it. The fraction of the gain that remains at a
    gap is (no context - gap) / (no context - no gap), where each term is a loss. *No context* reads only the ``k``
    inputs after the gap.

    The inputs are short at every gap. The measurement therefore tests the positional encoding at large distances, but
    not retrieval from a long text. Layers with a window use positions without the gap, see
    `kerple.model.network.SupportsOffset`.

    The result has ``gap.csv`` (gap, document, loss), a figure, and a line for each gap. The intervals of the fractions
    are 95% intervals over groups of documents, such as packages, or over documents, by the jackknife.

    Args:
        gaps: Gaps in tokens; None for 1/4, 1/2, 1, 2, 4 and 16 times the training length. Gaps are left out if the
            network has too few positions for them.
        context: Number of inputs before the gap.
        k: Number of targets, and of inputs after the gap. With more inputs than the training length in all, a loss
            without a gap is a loss beyond it too, and a line says so.
        blocks: Number of blocks of text. Each is the beginning of a different document.

    Raises:
        UserError: If an option is not positive.
    """

    gaps: Sequence[int] | None = None
    context: int = 256
    k: int = 64
    blocks: int = 12

    name: ClassVar[str] = "gap"
    needs: ClassVar[tuple[type, ...]] = (SupportsOffset,)

    def __post_init__(self) -> None:
        require_positive(self, "context", "k", "blocks")
        gaps = self.gaps
        require(gaps is None or min(gaps, default=0) >= 1, "GapCurve: gaps", gaps, "positive numbers of tokens")

    def check(self, network: Network, text: Any) -> None:
        super().check(network, text)
        self.fitting_gaps(network)  # raises an error if the default gaps need a training length that is not known
        self._blocks(text)

    def skip_reason(self, network: Network) -> str | None:
        inputs = self.context + self.k
        return None if self.fitting_gaps(network) else f"{network.name} has fewer than {inputs} positions (context + k)"

    def fitting_gaps(self, network: Network) -> list[int]:
        """Return 0 and the gaps for which the network has enough positions, in ascending order."""
        most = length_limit(network) - self.context - self.k
        return [gap for gap in self._all_gaps(network) if gap <= most]

    def _all_gaps(self, network: Network) -> list[int]:
        """Return 0 and the gaps, in ascending order."""
        gaps = self.gaps
        if gaps is None:
            training_length = known_training_length(network, "GapCurve: gaps")
            gaps = [training_length * n // 4 for n in (1, 2, 4, 8, 16, 64)]
        return sorted({0, *gaps})

    def measure(self, network: Any, text: Text, runner: Runner) -> Result:
        gaps, blocks = self.fitting_gaps(network), self._blocks(text)
        assert blocks.documents is not None
        documents = blocks.documents.tolist()
        sums = self._sums(network, blocks, gaps, runner)
        losses = {gap: (loss.nll / self.k).numpy() for gap, loss in sums.items()}
        rows = [
            {"gap": gap, "document": document, "loss": loss}
            for gap, by_document in losses.items()
            for document, loss in zip(documents, by_document.tolist(), strict=True)
        ]
        loss_rows = sums[NO_CONTEXT].rows(f"no_context{self.k}", self.k)
        loss_rows += [row for gap in gaps for row in sums[gap].rows(f"gap{self.k}", gap + self.context + self.k)]
        none, near = losses[NO_CONTEXT], losses[0]
        note = _note(none, near, [losses[gap] for gap in gaps[1:]])
        groups = document_groups(text, documents)
        # of each group, in the order of `_sums`
        without, at_0, *at_gaps = pd.DataFrame(losses).groupby(pd.Series(groups), sort=False).sum().to_numpy().T
        shown = {} if note else dict(zip(gaps[1:], at_gaps, strict=True))
        curve = [(gap, *_remaining_fraction(without, at_0, at_gap)) for gap, at_gap in shown.items()]
        means = f"loss without context {none.mean():.3f}, with it {near.mean():.3f}"
        lines = [f"gap curve: {units(groups, documents)}, {means}{note}"]
        inputs, trained = self.context + self.k, network.training_length
        if trained is not None and inputs > trained:
            lines.append(f"context and targets are {inputs} tokens, more than the training length of {trained}")
        lines += [_sentence(gap, losses[gap], *fraction) for gap, *fraction in curve]
        reason = f"skipped, {network.name} has only {length_limit(network)} positions"
        lines += [f"gap of {gap:,}: {reason}" for gap in self._all_gaps(network) if gap not in gaps]
        about = {"strategy": network.name, "training_length": network.training_length, "split": text.split}
        about |= {"context": self.context, "k": self.k, "block_document": documents, "precision": runner.precision}
        about["groups"] = groups
        scalars = {f"gap/kept/{gap}": fraction for gap, fraction, *_ in curve}
        figures = {self.name: _figure(curve, network, units(groups, documents))} if curve else {}
        return Result(self.name, {self.name: rows}, figures, loss_rows, about, scalars, "\n".join(lines))

    def _sums(self, network: Any, blocks: TextBlocks, gaps: list[int], runner: Runner) -> "dict[int | str, TokenLoss]":
        """Return the sums of losses by block, for no context and for each gap."""
        keys: list[int | str] = [NO_CONTEXT, *gaps]
        sums = {key: runner.losses(len(blocks)) for key in keys}
        for i, tokens in runner.blocks(blocks):
            with runner.autocast():
                sums[NO_CONTEXT].update(network.losses(tokens[:, -self.k - 1 :], self.k), i)
                for gap in gaps:
                    offset = gap * (torch.arange(self.context + self.k, device=runner.device) >= self.context)
                    sums[gap].update(network.losses(tokens, self.k, offset=offset), i)
        runner.synchronise(*sums.values())
        return sums

    def _blocks(self, text: Text) -> TextBlocks:
        """Return the first block of each of the first documents that are long enough."""
        return text.document_blocks(self.context + self.k, self.blocks, per_document=1)


def _note(none: NDArray[Any], near: NDArray[Any], far: list[NDArray[Any]]) -> str:
    """Return the reason why there is no curve, or an empty string. The arguments are those of `_remaining_fraction`."""
    if not none.mean() > near.mean():
        return "; it does not help without a gap"
    if far and all((losses == near).all() for losses in far):
        return "; no gap changes a loss, as if all layers had windows or no positions"
    return ""


def _sentence(gap: int, losses: NDArray[Any], fraction: float, low: float, high: float) -> str:
    """Return the effect of the context at a gap, from the losses and the remaining fraction with its interval."""
    interval = f" ({low:.0%} to {high:.0%})" if len(losses) > 1 else ""
    effect = f"keeps {fraction:.0%} of its gain{interval}" if high > 0 else "harms"
    return f"gap of {gap:,}: loss {losses.mean():.3f}, the context {effect}"


def _remaining_fraction(none: NDArray[Any], near: NDArray[Any], far: NDArray[Any]) -> tuple[float, float, float]:
    """Return the fraction of the gain from a context that remains at a gap, and the ends of its 95% interval.

    With one document or group, the interval is infinite.

    Args:
        none: Loss of each document without the context; of each group, the sum over its documents.
        near: The same with the context and no gap.
        far: The same with the context and the gap.
    """
    from scipy import stats  # takes a second of processor time to import

    n, lost, gain = len(none), far - near, none - near
    fraction = 1 - lost.sum() / gain.sum()
    if n < 2:
        return float(fraction), -np.inf, np.inf
    # element i is the fraction of all documents except document i
    without = 1 - (lost.sum() - lost) / (gain.sum() - gain)
    half = stats.t.ppf(0.975, n - 1) * np.sqrt((n - 1) / n * np.square(without - without.mean()).sum())
    return float(fraction), float(fraction - half), float(fraction + half)


def _figure(curve: list[tuple[int, float, float, float]], network: Network, over: str) -> Figure:
    """Draw the fraction of the gain against the gap.

    Args:
        curve: The gaps, each with the fraction that remains and the ends of its interval.
        network: The network, for labels.
        over: The `units` of the intervals, for the title.
    """
    figure, axes = panel(6.4, 4)
    gaps, fractions, low, high = np.array(curve).T
    errors = fractions - low, high - fractions
    axes.errorbar(gaps, fractions, errors, marker="o", markersize=4, capsize=2, label=network.name)
    axes.axhline(0, color="black", linewidth=0.8)
    axes.set_yscale("symlog", linthresh=1)  # beyond the training length, fractions may be far below -1
    title = f"{network.name}: fraction of the context's gain at a gap, {over}"
    labels = {"xlabel": "gap (tokens)", "ylabel": "fraction of the gain, 95% intervals", "title": title}
    label_axes(axes, network.training_length, gaps.astype(int), **labels)
    return figure

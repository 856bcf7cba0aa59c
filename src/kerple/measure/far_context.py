"""`FarContext`: the gain from distant text, measured by exchanging the distant text before the same targets.

Attention is not changed, so every network can be measured. Gains are averaged in each document first, because documents
are the sample of text.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import cycle, pairwise
from typing import Any, ClassVar

import numpy as np
import pandas as pd
import torch
from matplotlib.figure import Figure
from numpy.typing import NDArray
from torch import Tensor

from kerple.base.errors import UserError
from kerple.data.text import Text, TextBlocks
from kerple.measure.drawing import label_axes, panel
from kerple.measure.measure import Measure, known_training_length, length_limit, require_positive
from kerple.measure.result import Result
from kerple.measure.results import Row
from kerple.measure.runner import Runner
from kerple.model.network import Network

CONTEXTS = ("own", "none", "foreign")
EFFECTS = ("gain", "content", "disturbance")


def far_context_texts(own: Tensor, other: Tensor, length: int, short: int) -> dict[str, Tensor]:
    """The three texts that end in the same targets, by the names of `CONTEXTS`.

    Args:
        own: A block of N + 1 tokens, (N + 1,).
        other: A block of another document, (N + 1,).
        length: Inputs L of *own* and *foreign*, short < L <= N.
        short: Inputs L₁ of *none*.

    Returns:
        *own*: the last L inputs and the last target of the block, (L + 1,). *none*: the last L₁ inputs and the last
        target, (L₁ + 1,). *foreign*: the first L - L₁ inputs of the other block, followed by *none*, (L + 1,).
    """
    near = own[-short - 1 :]
    return {"own": own[-length - 1 :], "none": near, "foreign": torch.cat([other[: length - short], near])}


def counterparts(groups: Sequence[Any]) -> list[int]:
    """For each block, the number of its counterpart in the next group.

    The counterpart of block i of a group is block i of the next group, modulo its number of blocks. The first group
    follows the last one. Groups are in the order of their first block.

    Args:
        groups: The group of each block.

    Raises:
        UserError: If there is only one group.
    """
    members: dict[Any, list[int]] = {}
    for i, group in enumerate(groups):
        members.setdefault(group, []).append(i)
    if len(members) < 2:
        raise UserError("FarContext: got text of one document or group, expected at least two; use a longer text")
    first, *others = members.values()
    found: dict[int, int] = {}
    for blocks, next_blocks in pairwise([first, *others, first]):
        found |= zip(blocks, cycle(next_blocks), strict=False)
    return [found[i] for i in range(len(groups))]


def document_groups(text: Text, documents: list[int]) -> list[Any]:
    """The group of each document, such as its package; the documents themselves if there is only one group."""
    groups = documents if text.table is None else text.table["group"][documents].tolist()
    return documents if len(set(groups)) < 2 else groups


def mean_interval(values: NDArray[np.float64]) -> tuple[float, float, float]:
    """Mean of n numbers and its 95% interval by Student's t: (mean, low, high). With n = 1 the interval is infinite."""
    from scipy import stats  # takes a second of processor time to import

    half = stats.t.ppf(0.975, len(values) - 1) * stats.sem(values) if len(values) > 1 else np.inf
    return float(values.mean()), float(values.mean() - half), float(values.mean() + half)


def verdict(gain: tuple[float, float], content: tuple[float, float]) -> str:
    """The conclusion about distant text from the 95% intervals of gain and content, (low, high) each."""
    if gain[0] > 0 and content[0] > 0:
        return "distant text is used"
    if gain[1] < 0:
        return "distant text is harmful"
    return "no use of distant text is shown"


@dataclass
class FarContext(Measure):
    """Scores the last ``k`` targets of blocks inside documents after three contexts: own, none and foreign.

    Let L be the evaluation length and L₁ the training length. *Own* is the last L inputs of the block. *None* is its
    last L₁ inputs, at positions from 0. *Foreign* has L inputs, of which the first L - L₁ are of another document.

    In nats per target, *gain* = none - own, *content* = foreign - own, and *disturbance* = foreign - none. Distant text
    is used if both gain and content are above 0. Content is not sufficient, because it can be large if any long text
    harms the model.

    Foreign text comes from the corresponding block of the next group (a package, a family of RFCs), or of the next
    document if the text has no groups. The result has ``far_context.csv`` (length, document, blocks, targets and means
    of losses), a figure with 95% intervals over documents, and a sentence for each length.

    Args:
        lengths: Evaluation lengths in tokens, above the training length. The longest is the length of a block.
        k: Number of targets, less than the training length; None for half of it.
        blocks: Number of first blocks of the text; None for all.
        overlap: Largest fraction of a document's runs of 32 tokens that may also occur in the training text.
        blocks_per_group: Number of first blocks of each group of documents; None for all.
        blocks_per_document: Largest number of first blocks of a document; None for all.

    Raises:
        UserError: If a number is out of range.
    """

    lengths: Sequence[int]
    k: int | None = None
    blocks: int | None = None
    overlap: float = 0.5
    blocks_per_group: int | None = None
    blocks_per_document: int | None = None

    name: ClassVar[str] = "far_context"

    def __post_init__(self) -> None:
        self.lengths = sorted(set(self.lengths))
        require_positive(self, "k", "blocks", "blocks_per_group", "blocks_per_document")
        if not self.lengths or self.lengths[0] < 1:
            raise UserError(f"FarContext: lengths: got {list(self.lengths)}, expected positive numbers")

    def check(self, network: Network, text: Any) -> None:
        super().check(network, text)
        short = known_training_length(network)
        if self.lengths[0] <= short:
            expected = f"more than {short}, the training length"
            raise UserError(f"FarContext: lengths: got {self.lengths[0]}, expected {expected}")
        if self._targets(short) >= short:
            raise UserError(f"FarContext: k: got {self.k}, expected less than {short}, the training length")
        counterparts(document_groups(text, self._blocks(text)[1]))

    def measure(self, network: Network, text: Text, runner: Runner) -> Result:
        short, limit = known_training_length(network), length_limit(network)
        k, (blocks, documents) = self._targets(short), self._blocks(text)
        groups = document_groups(text, documents)
        others = counterparts(groups)
        lengths = [length for length in self.lengths if length <= limit]
        sums = torch.zeros(len(lengths), len(CONTEXTS), len(blocks), dtype=torch.float64, device=runner.device)
        for i, own in runner.part(blocks):
            with runner.autocast():
                for n, length in enumerate(lengths):
                    for r, tokens in enumerate(far_context_texts(own, blocks[others[i]], length, short).values()):
                        losses = network.losses(tokens.to(runner.device)[None], k)  # (1, k)
                        sums[n, r, i] = losses.double().sum()
        sums = runner.sum_losses(sums)
        rows = [
            {"length": length, "document": document} | _document_row(sums[n], documents, document, k)
            for n, length in enumerate(lengths)
            for document in dict.fromkeys(documents)
        ]
        table, lines = pd.DataFrame(rows), []
        intervals: dict[int, dict[str, tuple[float, float]]] = {}
        scalars: dict[str, float] = {}
        for length in lengths:
            effects = table[table["length"] == length]
            at_length = intervals[length] = {name: mean_interval(effects[name].to_numpy())[1:] for name in EFFECTS}
            values = ", ".join(f"{name} {low:+.4f} to {high:+.4f}" for name, (low, high) in at_length.items())
            sentence = verdict(at_length["gain"], at_length["content"])
            lines.append(f"far context at {length:,} tokens: {sentence} (95% intervals in nats per target: {values})")
            scalars |= {f"far_context/{name}/{length}": float(effects[name].mean()) for name in ("gain", "content")}
        loss_rows = [
            Row("ppl", f"far_{context}{k}", length, None, i, float(sums[n, r, i]), k)
            for n, length in enumerate(lengths)
            for r, context in enumerate(CONTEXTS)
            for i in range(len(blocks))
        ]
        about = {"strategy": network.name, "training_length": short, "split": text.split, "k": k}
        about |= {"block": self.lengths[-1], "block_document": documents, "overlapping": blocks.left_out}
        about |= {"documents": True, "precision": runner.precision, "too_short": blocks.too_short}
        about |= {"groups": [groups[documents.index(document)] for document in dict.fromkeys(documents)]}
        lines += [f"far context at {n:,}: skipped, only {limit} positions" for n in self.lengths if n not in lengths]
        title = f"{network.name}: effect of distant text, {len(set(documents))} documents"
        figures = {self.name: _figure(intervals, short, title)} if intervals else {}
        return Result(self.name, {self.name: rows}, figures, loss_rows, about, scalars, "\n".join(lines))

    def _targets(self, short: int) -> int:
        return self.k or max(1, short // 2)

    def _blocks(self, text: Text) -> tuple[TextBlocks, list[int]]:
        """The blocks, and the index of the document of each block."""
        limits = self.blocks_per_group, self.blocks_per_document
        blocks = text.document_blocks(self.lengths[-1], self.blocks, self.overlap, *limits)
        assert blocks.documents is not None
        return blocks, blocks.documents.tolist()


def _document_row(sums: Tensor, documents: list[int], document: int, k: int) -> dict[str, Any]:
    """Means over the targets of one document, from the sums (3, blocks) of the losses after each context."""
    chosen = torch.tensor([d == document for d in documents])
    own, none, foreign = (sums[:, chosen].mean(1) / k).tolist()
    counts = {"blocks": int(chosen.sum()), "targets": int(chosen.sum()) * k}
    losses = {"own": own, "none": none, "foreign": foreign}
    return counts | losses | {"gain": none - own, "content": foreign - own, "disturbance": foreign - none}


def _figure(intervals: dict[int, dict[str, tuple[float, float]]], trained: int, title: str) -> Figure:
    """Draw the 95% intervals of the mean effects against length."""
    figure, axes = panel(6.4, 4.2)
    for shift, name in zip((0.97, 1.0, 1.03), EFFECTS, strict=True):  # so that intervals do not overlap
        low, high = np.array([at_length[name] for at_length in intervals.values()]).T
        middle, lengths = (low + high) / 2, np.array(list(intervals)) * shift
        axes.errorbar(lengths, middle, (high - low) / 2, marker="o", markersize=4, capsize=2, label=name)
    axes.axhline(0, color="black", linewidth=0.8)
    ylabel = "nats per target, 95% intervals over documents"
    label_axes(axes, trained, [*intervals], xlabel="evaluation length (tokens)", ylabel=ylabel, title=title)
    return figure

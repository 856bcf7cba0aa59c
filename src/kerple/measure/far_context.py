"""`FarContext`: the gain from distant text, measured by removing or replacing this text in the context of a target.

Attention is not changed, so every network can be measured. Gains are first averaged over the blocks of each group of
documents, such as a package; without groups, over those of each document. Intervals are over groups or documents,
because blocks of one group depend on each other.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import cycle, pairwise
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np
import pandas as pd
import torch
from matplotlib.figure import Figure
from numpy.typing import NDArray
from torch import Tensor

from kerple.base.errors import require
from kerple.data.evaluation_text import Text, TextBlocks
from kerple.measure.measure import Measure, known_training_length, length_limit, ordered_lengths, require_positive
from kerple.measure.plotting import label_axes, panel
from kerple.measure.result import Result
from kerple.measure.runner import Runner
from kerple.model.network import Network

if TYPE_CHECKING:
    from kerple.measure.loss_metrics import TokenLoss

CONTEXTS = ("own", "none", "foreign")
EFFECTS = ("gain", "content", "disturbance")
Interval = tuple[float, float, float]
"""A mean, and the ends of its 95% interval."""


def far_context_texts(own: Tensor, other: Tensor, length: int, short: int) -> dict[str, Tensor]:
    """Return three texts that end in the same targets, by the names of `CONTEXTS`.

    Args:
        own: A block of N inputs and the last target, (N + 1,).
        other: A block of another document, (N + 1,).
        length: Number L of inputs of *own* and *foreign*, short < L <= N.
        short: Number L₁ of inputs of *none*.

    Returns:
        *own*: the last L inputs and the last target of the block, (L + 1,). *none*: the last L₁ inputs and the last
        target, (L₁ + 1,). *foreign*: the first L - L₁ inputs of the other block, followed by *none*, (L + 1,).
    """
    near = own[-short - 1 :]
    return {"own": own[-length - 1 :], "none": near, "foreign": torch.cat([other[: length - short], near])}


def counterparts(groups: Sequence[Any]) -> list[int]:
    """Return for each block the index of its counterpart, a block of the next group.

    The i-th block of a group has the i-th block of the next group as its counterpart. If the next group has fewer
    blocks, they are repeated. Groups are in the order of their first block, and the first group follows the last one.

    Args:
        groups: The group of each block.

    Raises:
        UserError: If there is only one group.
    """
    members: dict[Any, list[int]] = {}
    for i, group in enumerate(groups):
        members.setdefault(group, []).append(i)
    expected = "blocks of two documents or more; use a longer text, shorter lengths or more blocks"
    require(len(members) >= 2, "data", "blocks of only one document", expected)
    first, *others = members.values()
    counterpart: dict[int, int] = {}
    for blocks, next_blocks in pairwise([first, *others, first]):
        counterpart |= zip(blocks, cycle(next_blocks), strict=False)
    return [counterpart[i] for i in range(len(groups))]


def document_groups(text: Text, documents: list[int]) -> list[Any]:
    """Return the group of each of these documents, such as its package.

    If the text has no groups, or all these documents are of the same group, each document is a group.
    """
    groups = documents if text.table is None else text.table["group"][documents].tolist()
    return documents if len(set(groups)) < 2 else groups


def units(groups: list[Any], documents: list[int]) -> str:
    """Return the number and kind of the units of intervals, such as "3 documents".

    Args:
        groups: The groups that `document_groups` returned for ``documents``.
        documents: The documents.
    """
    return f"{len(set(groups))} {'documents' if groups is documents else 'groups of documents'}"


def mean_interval(values: NDArray[np.float64]) -> Interval:
    """Return the mean of the values with its interval by Student's t, which is infinite with one value."""
    from scipy import stats  # takes a second of processor time to import

    half = stats.t.ppf(0.975, len(values) - 1) * stats.sem(values) if len(values) > 1 else np.inf
    return float(values.mean()), float(values.mean() - half), float(values.mean() + half)


def verdict(gain: tuple[float, float], content: tuple[float, float]) -> str:
    """Return a conclusion about distant text from the 95% intervals (low, high) of `FarContext`'s gain and content."""
    if gain[0] > 0 and content[0] > 0:
        return "distant text is used"
    if gain[1] < 0:
        return "distant text is harmful"
    return "no use of distant text is shown"


@dataclass
class FarContext(Measure):
    """Scores the last ``k`` targets of each block after three contexts: own, none and foreign.

    Let L be the evaluation length and L₁ the training length. *Own* is the last L inputs of the block. *None* is its
    last L₁ inputs, without the text before them; positions start at 0. *Foreign* is *none* after L - L₁ inputs of
    another document.

    Effects are differences of losses in nats per target: *gain* = none - own, *content* = foreign - own, and
    *disturbance* = foreign - none. Distant text is used if the 95% intervals of both gain and content are above 0.
    Content above 0 is not sufficient: foreign text may raise the loss of a model even if *own* does not lower it.

    The foreign text comes from a block of the next group of documents, such as a package. With fewer than two groups,
    it comes from the next document.

    The result has ``far_context.csv`` (length, document, numbers of blocks and targets, mean losses and effects), a
    figure with 95% intervals over groups or documents, and a sentence for each length.

    Args:
        lengths: Evaluation lengths in tokens, above the training length. The longest is the length of a block. Lengths
            that the network cannot read are skipped.
        k: Number of targets, less than the training length; None for half of it.
        blocks: Number of blocks, from the beginning of the text; None for all. Each block lies inside one document.
        overlap: Largest fraction of a document's 32-grams (32 consecutive tokens) that may also occur in the training
            text. Documents with a larger fraction are left out.
        blocks_per_group: Number of blocks that are taken from the beginning of each group of documents; None for all.
        blocks_per_document: Largest number of blocks that are taken from the beginning of each document; None for all.

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
        self.lengths = ordered_lengths(self)
        require_positive(self, "k", "blocks", "blocks_per_group", "blocks_per_document")
        require(0 <= self.overlap <= 1, "FarContext: overlap", self.overlap, "a fraction from 0 to 1")

    def check(self, network: Network, text: Any) -> None:
        super().check(network, text)
        training_length = known_training_length(network)
        shortest, k = self.lengths[0], self._targets(training_length)
        expected = f"more than {training_length}, the training length"
        require(shortest > training_length, "FarContext: lengths", shortest, expected)
        require(k < training_length, "FarContext: k", k, f"less than {training_length}, the training length")
        counterparts(document_groups(text, self._blocks(text)[1]))

    def measure(self, network: Network, text: Text, runner: Runner) -> Result:
        training_length, limit = known_training_length(network), length_limit(network)
        k = self._targets(training_length)
        blocks, documents = self._blocks(text)
        groups = document_groups(text, documents)
        lengths = [length for length in self.lengths if length <= limit]
        losses = self._losses(network, blocks, counterparts(groups), lengths, runner)
        of_groups = _table(lengths, losses, groups, k)
        by_length = {length: of_groups[of_groups["length"] == length] for length in lengths}
        effects = {n: {name: mean_interval(rows[name].to_numpy()) for name in EFFECTS} for n, rows in by_length.items()}
        over = units(groups, documents)
        lines = [_sentence(length, at_length, over) for length, at_length in effects.items()]
        lines += [f"far context at {n:,}: skipped (limit {limit} tokens)" for n in self.lengths if n not in lengths]
        scalars = {f"far_context/{name}/{n}": effects[n][name][0] for n in lengths for name in ("gain", "content")}
        loss_rows = [row for (n, context), loss in losses.items() for row in loss.rows(f"far_{context}{k}", n)]
        about = {"strategy": network.name, "training_length": training_length, "split": text.split, "k": k}
        about |= {"block": self.lengths[-1], "block_document": documents, "overlapping": blocks.left_out}
        about |= {"documents": True, "precision": runner.precision, "too_short": blocks.too_short}
        about |= {"groups": [groups[documents.index(document)] for document in dict.fromkeys(documents)]}
        figures = {self.name: _figure(effects, training_length, network.name, over)} if effects else {}
        by_document = _table(lengths, losses, documents, k).rename(columns={"group": "document"})
        tables: Any = {self.name: by_document.to_dict("records")}
        return Result(self.name, tables, figures, loss_rows, about, scalars, "\n".join(lines))

    def _losses(
        self, network: Network, blocks: TextBlocks, others: list[int], lengths: list[int], runner: Runner
    ) -> dict[tuple[int, str], "TokenLoss"]:
        """Return the sums of losses by block, for each length and context.

        Args:
            network: The network.
            blocks: The blocks.
            others: Index of the counterpart of each block.
            lengths: Evaluation lengths in tokens.
            runner: Device, precision and processes.
        """
        training_length = known_training_length(network)
        losses = {(length, context): runner.losses(len(blocks)) for length in lengths for context in CONTEXTS}

        def score(tokens: Tensor) -> Tensor:
            with runner.autocast():
                return network.losses(tokens.to(runner.device)[None], self._targets(training_length))  # (1, k)

        for i, own in runner.part(blocks):
            none = score(own[-training_length - 1 :])  # this text is the same at every length
            for length in lengths:
                texts = far_context_texts(own, blocks[others[i]], length, training_length)
                for context in CONTEXTS:
                    losses[length, context].update(none if context == "none" else score(texts[context]), i)
        runner.synchronise(*losses.values())
        return losses

    def _targets(self, training_length: int) -> int:
        return self.k or max(1, training_length // 2)

    def _blocks(self, text: Text) -> tuple[TextBlocks, list[int]]:
        """Return the blocks, and the index of the document of each block."""
        limits = self.blocks_per_group, self.blocks_per_document
        blocks = text.document_blocks(self.lengths[-1], self.blocks, self.overlap, *limits)
        assert blocks.documents is not None
        return blocks, blocks.documents.tolist()


def _table(lengths: list[int], losses: dict[tuple[int, str], "TokenLoss"], groups: list[Any], k: int) -> pd.DataFrame:
    """Return the mean losses and the effects, with a row for each length and group of blocks.

    Args:
        lengths: Evaluation lengths in tokens.
        losses: Sums of losses by block, for each length and context.
        groups: Group or document of each block.
        k: Number of targets in a block.
    """
    rows = [
        (length, group, 1, k, *(float(losses[length, context].nll[i]) for context in CONTEXTS))
        for length in lengths
        for i, group in enumerate(groups)
    ]
    by_block = pd.DataFrame(rows, columns=["length", "group", "blocks", "targets", *CONTEXTS])
    table = by_block.groupby(["length", "group"], sort=False, as_index=False).sum()
    own, none, foreign = (table[context] / table["targets"] for context in CONTEXTS)
    effects = {"gain": none - own, "content": foreign - own, "disturbance": foreign - none}
    return table.assign(own=own, none=none, foreign=foreign, **effects)


def _sentence(length: int, effects: dict[str, Interval], over: str) -> str:
    """Return the conclusion at a length, with the intervals of the effects ``over`` some `units`."""
    values = ", ".join(f"{name} {low:+.4f} to {high:+.4f}" for name, (_, low, high) in effects.items())
    conclusion = verdict(effects["gain"][1:], effects["content"][1:])
    intervals = f"95% intervals over {over} in nats per target: {values}"
    return f"far context at {length:,} tokens: {conclusion} ({intervals})"


def _figure(effects: dict[int, dict[str, Interval]], training_length: int, name: str, over: str) -> Figure:
    """Draw the effects with their 95% intervals against length."""
    figure, axes = panel(6.4, 4.2)
    for shift, effect in zip((0.97, 1.0, 1.03), EFFECTS, strict=True):  # so that their bars are side by side
        mean, _, high = np.array([at_length[effect] for at_length in effects.values()]).T
        x = np.array(list(effects)) * shift
        axes.errorbar(x, mean, high - mean, marker="o", markersize=4, capsize=2, label=effect)
    axes.axhline(0, color="black", linewidth=0.8)
    labels = {"xlabel": "evaluation length (tokens)", "ylabel": "nats per target, 95% intervals"}
    label_axes(axes, training_length, [*effects], **labels, title=f"{name}: effect of distant text, {over}")
    return figure

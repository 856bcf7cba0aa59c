"""`Extrapolation`: perplexity at several evaluation lengths, in `test` and after each validation."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cache, partial
from itertools import product
from typing import TYPE_CHECKING, Any, ClassVar, Literal, get_args

from torch import Tensor

from kerple.base.errors import require
from kerple.data.evaluation_text import Text, TextBlocks, shuffled
from kerple.measure.extrapolation_figures import context_gain_figure, perplexity_figure, perplexity_table
from kerple.measure.measure import (
    Measure,
    known_training_length,
    length_limit,
    ordered_lengths,
    require_capabilities,
    require_positive,
    require_text,
    skipped_lengths,
    skipped_lines,
)
from kerple.measure.protocols import Protocol, ProtocolLosses, ProtocolName, full
from kerple.measure.result import Result
from kerple.measure.runner import Runner
from kerple.model.network import Network, SupportsWindows
from kerple.positions.visibility import EVERYTHING, Distances, Visibility

if TYPE_CHECKING:
    from kerple.measure.loss_metrics import ContextGain

OPTIONS = {"window": ("windowed", "keep_first"), "keep_first": ("keep_first",), "stride": ("sliding",), "k": ("last",)}
"""Options of protocols, and the protocols that use each option."""


@dataclass
class Extrapolation(Measure):
    """Measures perplexity on the same targets by several protocols and at several lengths.

    The text is read in blocks of ``block_length`` targets. For each length a block is cut into segments, so that every
    length has the same targets. The protocol ``last`` and the option ``skip`` score only some of these.

    The result has the sums of the losses, a figure, a table for the terminal, and the scalars
    ``ppl/<protocol>/<length>`` and ``bits_per_byte/<protocol>/<length>``. ``per_position`` has no scalars. Bits per
    byte need a text with a tokenizer. Lengths that the network cannot read are reported as skipped.

    If ``full`` and ``windowed`` are among the protocols, ``context_gain.csv`` has the difference of their losses by
    position, in segments of the longest length. This file is omitted with ``sampling: paper``, and if the longest
    length does not exceed the window or is too long for the network.

    After each validation of `fit`, ``val/ppl/full/<length>`` is measured on the first blocks of the validation split.

    Args:
        lengths: Evaluation lengths in tokens; each must divide the longest.
        protocols: Some of full, windowed, keep_first, sliding, last, per_position. ``full`` and ``per_position`` use
            full attention in each segment. ``per_position`` sums the losses of each position in the segment separately.
        block_length: Number of targets in a block, a multiple of the longest length; None for the longest length.
        blocks: Number of blocks, from the beginning of the text; None for all.
        window: Number of keys that a query sees in ``windowed`` and ``keep_first``; None for the training length.
        keep_first: Number of first tokens of a segment that a query of ``keep_first`` sees in addition to its window,
            except in layers whose own window is not longer; at most the shortest length.
        stride: Number of new targets in each step of ``sliding``; at most the shortest length.
        skip: Number of targets at the start of a block that ``sliding`` does not score. 0 scores all targets. Any other
            number must be at least the longest length minus ``stride``. At each length L, every scored target then has
            more than L - ``stride`` tokens of context.
        k: Number of targets that ``last`` scores at the end of each segment; at most the shortest length.
        sampling: ``blocks`` scores the same targets at every length. ``paper`` scores randomly chosen segments at each
            length, as the code of Chi et al. (2022) does. The text then differs between lengths, so ``paper`` is only
            for comparison with their tables.
        segments: Number of segments at each length with ``sampling: paper``.
        seed: Seed of the choice of segments with ``sampling: paper``.
        documents: Whether each block lies inside one document, so that no query sees a key of another document. The
            first block of a document begins with its first token, and documents shorter than a block are left out.
            Reports then treat documents as independent samples.
        overlap: With ``documents``, the largest fraction of a document's 32-grams (32 consecutive tokens) that may also
            occur in the training text. Documents with a larger fraction are left out, and reports give their number.
            The fractions are stored with the test split of `TokenShards`; in other text no document is left out.
        blocks_per_group: With ``documents``, the number of blocks that are taken from the beginning of each group of
            documents, such as the files of a Python package. Fewer blocks in a group are an error. None for all blocks.
        blocks_per_document: With ``documents``, the largest number of blocks that are taken from the beginning of each
            document; None for all.
        validation_blocks: Largest number of blocks that are scored after each validation; 0 for none.
        distances: Distances of the first tokens in ``keep_first`` from a query: ``true``, ``capped`` at the window
            (LM-Infinite), or ``cache`` for distances that count only visible keys (StreamingLLM).

    Raises:
        UserError: If an option is out of range or two contradict each other.
    """

    lengths: Sequence[int]
    protocols: Sequence[ProtocolName] = ("full", "windowed")
    block_length: int | None = None
    blocks: int | None = None
    window: int | None = None
    keep_first: int | None = None
    stride: int | None = None
    skip: int = 0
    k: int | None = None
    sampling: Literal["blocks", "paper"] = "blocks"
    segments: int = 320
    seed: int = 0
    documents: bool = False
    overlap: float = 0.5
    blocks_per_group: int | None = None
    blocks_per_document: int | None = None
    validation_blocks: int = 4
    distances: Distances = "true"

    name: ClassVar[str] = "extrapolation"

    def __post_init__(self) -> None:
        self.lengths = ordered_lengths(self, dividing=True)
        require_positive(self, "block_length", "blocks", "window", "segments")
        require_positive(self, "blocks_per_group", "blocks_per_document")
        per_part = self.blocks_per_group or self.blocks_per_document
        expected = "true, because blocks_per_group or blocks_per_document was given"
        require(self.documents or not per_part, "Extrapolation: documents", "false", expected)
        require(0 <= self.overlap <= 1, "Extrapolation: overlap", self.overlap, "a fraction from 0 to 1")
        expected = "0.5 (the default) without documents: true; add documents: true, or leave out overlap"
        require(self.documents or self.overlap == 0.5, "Extrapolation: overlap", self.overlap, expected)
        expected = f"a multiple of {self.lengths[-1]}, the longest of lengths"
        require(self.targets % self.lengths[-1] == 0, "Extrapolation: block_length", self.block_length, expected)
        plain = not (self.documents or self.blocks or self.block_length or "sliding" in self.protocols)
        expected = "blocks, because paper excludes documents, blocks, block_length and the protocol sliding"
        require(self.sampling != "paper" or plain, "Extrapolation: sampling", "paper", expected)
        for name, default in (("segments", 320), ("seed", 0)):
            value, expected = getattr(self, name), f"{default} (the default), because only sampling: paper uses it"
            require(self.sampling == "paper" or value == default, f"Extrapolation: {name}", value, expected)
        self._check_protocols()

    @property
    def targets(self) -> int:
        """Number of targets in a block."""
        return self.block_length or self.lengths[-1]

    def check(self, network: Network, text: Any) -> None:
        super().check(network, text)
        if any(p.visibility != EVERYTHING for p in self._protocols(known_training_length(network))):
            require_capabilities(self, network, [SupportsWindows], "leave windowed and keep_first out of protocols")
        self._blocks(text)

    def measure(self, network: Network, text: Text, runner: Runner) -> Result:
        training_length = known_training_length(network)
        protocols = self._protocols(training_length)
        gain = self._context_gain(network, runner)
        token_bytes = None if text.token_bytes is None else text.token_bytes.to(runner.device)
        measurements: list[ProtocolLosses] = []
        about: dict[str, Any] = {}
        for blocks, lengths in self._blocks(text):
            measurements += _measurements(network, blocks, protocols, lengths, runner, token_bytes, gain)
            if blocks.documents is not None:
                documents = blocks.documents.tolist()
                about |= {"block_document": documents, "overlapping": blocks.left_out}
                if text.table is not None:
                    about["groups"] = text.table["group"][list(dict.fromkeys(documents))].tolist()
        runner.synchronise(*(m.loss for m in measurements))
        skipped = [entry for p in protocols for entry in skipped_lengths(self.lengths, network, p.label)]
        about |= {"strategy": network.name, "training_length": training_length, "split": text.split}
        about |= {"block": self.targets, "sampling": self.sampling, "documents": self.documents, "skip": self.skip}
        about |= {"window": self.window or training_length, "seed": self.seed}
        about |= {"precision": runner.precision, "skipped": skipped}
        title = f"{network.name}: perplexity by evaluation length"
        gains = [] if gain is None else gain.compute()
        figures = {self.name: perplexity_figure(measurements, self.lengths, training_length, title)}
        if any(row["first"] >= row["window"] for row in gains):
            figures["context_gain"] = context_gain_figure(gains, f"{network.name}: context gain beyond the window")
        rows = [row for m in measurements for row in m.rows()]
        table = [perplexity_table(measurements, training_length)] if measurements else []
        report = "\n".join([*table, *skipped_lines(skipped)])
        return Result(self.name, {"context_gain": gains}, figures, rows, about, _scalars(measurements), report)

    @property
    def validates(self) -> bool:
        return self.validation_blocks > 0

    def validate(self, network: Network, text: Text, runner: Runner) -> dict[str, float]:
        blocks = text.blocks(self.targets, self.validation_blocks, fewer=True)
        measurements = _measurements(network, blocks, [Protocol("full")], self.lengths, runner)
        runner.synchronise(*(m.loss for m in measurements))
        return _scalars(measurements)

    def check_validation(self, text: Text) -> None:
        require_text(self, text)
        option, tokens = "block_length" if self.block_length else "lengths", len(text.stream)
        advice = f"decrease {option}, or set validation_blocks to 0"
        expected = f"less than {tokens}, the number of tokens in {text.name}; {advice}"
        require(self.targets < tokens, f"Extrapolation: {option}", f"{self.targets} targets", expected)

    def _check_protocols(self) -> None:
        """Raise a UserError if an option of a protocol is missing, out of range or without effect."""
        names, shortest, longest = self.protocols, self.lengths[0], self.lengths[-1]
        known = bool(names) and set(names) <= set(get_args(ProtocolName))
        require(known, "Extrapolation: protocols", list(names), f"one or more of {', '.join(get_args(ProtocolName))}")
        for option, users in OPTIONS.items():
            value, used = getattr(self, option), not set(users).isdisjoint(names)
            expected = f"null, because no protocol uses it; add {users[0]} to protocols, or leave out {option}"
            require(value is None or used, f"Extrapolation: {option}", value, expected)
            in_range = option == "window" or 1 <= (value or 0) <= shortest
            expected = f"1 to {shortest} (the shortest of lengths) for the protocol {users[0]}"
            require(in_range or not used, f"Extrapolation: {option}", value, expected)
        any_distances = self.distances == "true" or "keep_first" in names
        expected = "true, because keep_first is not among protocols"
        require(any_distances, "Extrapolation: distances", self.distances, expected)
        minimum = longest - (self.stride or 0)  # gives every target more than length - stride tokens of context
        expected = f"0, or {minimum} to {self.targets - 1}, or more with a larger block_length"
        expected = expected if "sliding" in names else "0 without the protocol sliding"
        valid = not self.skip or ("sliding" in names and minimum <= self.skip < self.targets)
        require(valid, "Extrapolation: skip", self.skip, expected)

    def _protocols(self, training_length: int) -> list[Protocol]:
        """Return the protocols with their options. The training length is the default window."""
        window = self.window or training_length
        options: dict[str, dict[str, Any]] = {
            "windowed": {"visibility": Visibility(window)},
            "keep_first": {"visibility": Visibility(window, self.keep_first or 0, self.distances)},
            "sliding": {"stride": self.stride, "skip": self.skip},
            "last": {"k": self.k},
        }
        return [Protocol(name, **options.get(name, {})) for name in dict.fromkeys(self.protocols)]

    def _blocks(self, text: Text) -> list[tuple[TextBlocks, Sequence[int]]]:
        """Return pairs of blocks and the lengths at which they are scored; one pair unless ``sampling`` is paper."""
        if self.sampling == "paper":
            segments = [text.blocks(length) for length in reversed(self.lengths)]  # so errors name the longest length
            samples = [blocks.subset(shuffled(len(blocks), self.segments, self.seed)) for blocks in segments]
            return [(blocks, [blocks.length]) for blocks in reversed(samples)]
        if self.documents:
            limits = self.blocks_per_group, self.blocks_per_document
            return [(text.document_blocks(self.targets, self.blocks, self.overlap, *limits), self.lengths)]
        return [(text.blocks(self.targets, self.blocks), self.lengths)]

    def _context_gain(self, network: Network, runner: Runner) -> "ContextGain | None":
        """Return a `ContextGain` to which losses can be added, or None if the context gain is not measured."""
        length, window = self.lengths[-1], self.window or known_training_length(network)
        has_both = self.sampling == "blocks" and {"full", "windowed"} <= set(self.protocols)
        if not (has_both and window < length <= length_limit(network)):
            return None
        from kerple.measure.loss_metrics import ContextGain  # imports torchmetrics, which takes seconds

        return ContextGain(length, window, runner.processes > 1).to(runner.device)


def _measurements(
    network: Network,
    blocks: TextBlocks,
    protocols: Sequence[Protocol],
    lengths: Sequence[int],
    runner: Runner,
    token_bytes: Tensor | None = None,
    gain: "ContextGain | None" = None,
) -> list[ProtocolLosses]:
    """Return the sums of losses over the blocks of this process, for the lengths that the network can read.

    Args:
        network: The model.
        blocks: The blocks.
        protocols: The protocols.
        lengths: The evaluation lengths.
        runner: Device, precision and processes.
        token_bytes: Number of bytes of text of each token id, (V,) int64; None for no bits per byte.
        gain: The context gain, to which the losses of ``full`` and ``windowed`` at ``gain.length`` are added; None for
            no context gain.
    """
    measurements = []
    for protocol, length in product(protocols, lengths):
        if length <= length_limit(network):
            groups = length if protocol.name == "per_position" else len(blocks)
            measurements.append(ProtocolLosses(protocol, length, runner.losses(groups)))
    for i, tokens in runner.blocks(blocks):  # (1, N+1)
        documents = blocks.document_options(i, runner.device).get("documents")  # (1, N+1)
        # several protocols use the same losses of full
        full_losses = cache(partial(full, network, tokens, documents=documents))
        with runner.autocast():
            for m in measurements:
                losses = m.protocol(network, tokens, m.length, full_losses, documents)  # (1, scored targets)
                if gain is not None and m.protocol.name == "windowed" and m.length == gain.length:
                    gain.update(full_losses(m.length), losses)
                if m.by_position:
                    m.loss.update(losses)
                else:
                    scored = tokens[:, 1 + m.protocol.scored_targets(m.length, blocks.length)]
                    m.loss.update(losses, i, None if token_bytes is None else token_bytes[scored])
    return measurements


def _scalars(measurements: Iterable[ProtocolLosses]) -> dict[str, float]:
    return {name: value for m in measurements for name, value in m.scalars().items()}

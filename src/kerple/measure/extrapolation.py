"""`Extrapolation`: perplexity at several evaluation lengths, in `test` and after each validation."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import product
from typing import TYPE_CHECKING, Any, ClassVar, Literal, get_args

from torch import Tensor

from kerple.base.errors import UserError
from kerple.data.text import Text, TextBlocks, shuffled
from kerple.measure.extrapolation_figures import context_gain_figure, perplexity_figure, perplexity_table
from kerple.measure.measure import Measure, known_training_length, length_limit, require_capabilities, require_positive
from kerple.measure.measurement import Measurement, add_block
from kerple.measure.protocols import Name, Protocol, ordered_lengths
from kerple.measure.result import Result
from kerple.measure.runner import Runner
from kerple.model.network import Network, Windows
from kerple.positions.visibility import EVERYTHING, Distances, Visibility

if TYPE_CHECKING:
    from kerple.measure.metrics import ContextGain

OPTIONS = {"window": ("windowed", "keep_first"), "keep_first": ("keep_first",), "stride": ("sliding",), "k": ("last",)}
"""Options of protocols, and the protocols that use each option."""


@dataclass
class Extrapolation(Measure):
    """Measures perplexity on the same targets by several protocols and at several lengths.

    Blocks of ``block_length`` targets are read. For each length a block is cut into segments, so that every target is
    scored exactly once at every length. The result has the sums of the losses, a figure, a table for the terminal, and
    the scalars ``ppl/<protocol>/<length>`` and ``bits_per_byte/<protocol>/<length>``. Bits per byte need a text with a
    tokenizer. Lengths that the strategy cannot represent are reported as skipped.

    If ``full`` comes before ``windowed`` among the protocols, ``context_gain.csv`` has the difference of their losses,
    by position in segments of the longest length.

    After each validation of `fit`, ``val/ppl/full/<length>`` is measured on the first blocks of the validation split.

    Args:
        lengths: Evaluation lengths in tokens; each must divide the longest.
        protocols: Some of full, windowed, keep_first, sliding, last, per_position.
        block_length: Number of targets in a block, a multiple of the longest length; None for the longest length.
        blocks: Number of blocks that the processes share, the first of the text; None for all.
        window: Number of keys that a query sees in windowed and keep_first; None for the training length.
        keep_first: Number of first tokens of a segment that a query also sees in keep_first; at most the shortest
            length.
        stride: Number of new targets in each step of sliding; at most the shortest length.
        skip: Number of targets at the start of a block that sliding uses only as context. With at least the longest
            length minus the stride, every scored target has a full context.
        k: Number of targets that last scores at the end of each segment; at most the shortest length.
        sampling: ``blocks`` scores the same targets at every length. ``paper`` scores ``segments`` shuffled segments at
            each length, as the paper's code does. The text then differs between lengths, so this is only for
            comparison with the paper's tables.
        segments: Number of segments at each length with ``sampling: paper``.
        seed: Seed of the shuffle with ``sampling: paper``.
        documents: Whether blocks are cut inside documents, from their first tokens on. Documents shorter than a block
            are left out. Reports treat documents as independent of each other.
        overlap: With ``documents``, the largest fraction of a document's runs of 32 tokens that may also occur in the
            training text. Documents with a larger fraction are left out, and reports give their number. The fractions
            are known only for shards.
        blocks_per_group: With ``documents``, the number of first blocks of each group of documents (a package, a family
            of RFCs); None for all.
        blocks_per_document: With ``documents``, the largest number of first blocks of a document; None for all.
        validation_blocks: Largest number of blocks that are scored after each validation; 0 for none.
        distances: Distances of the first tokens in keep_first: ``true``, ``capped`` at the window (LM-Infinite), or
            those in a ``cache`` of the kept tokens (StreamingLLM).

    Raises:
        UserError: If an option is out of range or two contradict each other.
    """

    lengths: Sequence[int]
    protocols: Sequence[Name] = ("full", "windowed")
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
        self.lengths = ordered_lengths(self.lengths)
        require_positive(self, "block_length", "blocks", "window", "blocks_per_group", "blocks_per_document")
        if not self.documents and (self.blocks_per_group or self.blocks_per_document):
            reason = "which blocks_per_group and blocks_per_document need"
            raise UserError(f"Extrapolation: documents: got false, expected true, {reason}")
        if self.targets % self.lengths[-1]:
            expected = f"a multiple of {self.lengths[-1]}, the longest of lengths"
            raise UserError(f"Extrapolation: block_length: got {self.block_length}, expected {expected}")
        if self.sampling == "paper" and (self.documents or self.blocks is not None or "sliding" in self.protocols):
            reason = "because documents, blocks or the protocol sliding was given"
            raise UserError(f"Extrapolation: sampling: got paper, expected blocks, {reason}")
        self._check_protocols()

    @property
    def targets(self) -> int:
        """Number of targets in a block."""
        return self.block_length or self.lengths[-1]

    def check(self, network: Network, text: Any) -> None:
        super().check(network, text)
        if any(p.visibility != EVERYTHING for p in self._protocols(known_training_length(network))):
            require_capabilities(self, network, [Windows])
        for length in reversed(self._block_lengths):
            self._blocks(text, length)

    def measure(self, network: Network, text: Text, runner: Runner) -> Result:
        trained = known_training_length(network)
        protocols, gain = self._protocols(trained), None
        if window := self._gain_window(network, self.window or trained):
            from kerple.measure.metrics import ContextGain

            gain = ContextGain(self.lengths[-1], window).to(runner.device)
        token_bytes = None if text.token_bytes is None else text.token_bytes.to(runner.device)
        measurements: list[Measurement] = []
        about: dict[str, Any] = {}
        for length in self._block_lengths:
            blocks, lengths = self._blocks(text, length), [length] if self.sampling == "paper" else self.lengths
            measurements += _measurements(network, blocks, protocols, lengths, runner, token_bytes, gain)
            if blocks.documents is not None:
                documents = blocks.documents.tolist()
                about |= {"block_document": documents, "overlapping": blocks.left_out}
                if text.table is not None:
                    about["groups"] = text.table["group"][list(dict.fromkeys(documents))].tolist()
        runner.synchronise(*(m.loss for m in measurements))
        about |= {"strategy": network.name, "training_length": trained, "split": text.split, "block": self.targets}
        about |= {"sampling": self.sampling, "documents": self.documents, "skip": self.skip}
        about |= {"precision": runner.precision, "skipped": [m.skipped for m in measurements if m.skip_reason]}
        title, gains = f"{network.name}: perplexity by evaluation length", [] if gain is None else gain.compute()
        figures = {self.name: perplexity_figure(measurements, trained, title)}
        if any(row["first"] >= row["window"] for row in gains):
            figures["context_gain"] = context_gain_figure(gains, f"{network.name}: context gain by distance")
        rows, report = [row for m in measurements for row in m.rows()], perplexity_table(measurements, trained)
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
        if len(text.stream) <= self.targets:
            expected = f"expected less than {len(text.stream)}, the number of tokens in {text.name}"
            raise UserError(f"Extrapolation: lengths: got {self.targets}, {expected}; set validation_blocks to 0")

    def _check_protocols(self) -> None:
        names, shortest, longest = self.protocols, self.lengths[0], self.lengths[-1]
        if not names or not set(names) <= set(get_args(Name)):
            expected = ", ".join(get_args(Name))
            raise UserError(f"Extrapolation: protocols: got {list(names)}, expected one or more of {expected}")
        for option, (protocol, *others) in OPTIONS.items():
            value, used = getattr(self, option), not {protocol, *others}.isdisjoint(names)
            if value is not None and not used:
                advice = f"add {protocol}, or leave {option} out"
                raise UserError(f"Extrapolation: {option}: got {value}, expected {protocol} among protocols; {advice}")
            if used and option != "window" and not 1 <= (value or 0) <= shortest:
                expected = f"a positive number for the protocol {protocol}, at most {shortest}, the shortest of lengths"
                raise UserError(f"Extrapolation: {option}: got {value}, expected {expected}")
        if self.distances != "true" and "keep_first" not in names:
            reason = "because keep_first is not among protocols"
            raise UserError(f"Extrapolation: distances: got {self.distances}, expected true, {reason}")
        minimum = longest - (self.stride or 0)
        if self.skip and ("sliding" not in names or not minimum <= self.skip < self.targets):
            expected = f"with the protocol sliding a number from {minimum} (the longest of lengths minus stride)"
            expected += f" to {self.targets - 1}; give a larger block_length for a longer range"
            raise UserError(f"Extrapolation: skip: got {self.skip}, expected 0, or {expected}")

    def _protocols(self, trained: int) -> list[Protocol]:
        window = self.window or trained
        options: dict[str, dict[str, Any]] = {
            "windowed": {"visibility": Visibility(window)},
            "sliding": {"stride": self.stride, "skip": self.skip},
            "last": {"k": self.k},
        }
        if self.keep_first:
            options["keep_first"] = {"visibility": Visibility(window, self.keep_first, self.distances)}
        return [Protocol(name, **options.get(name, {})) for name in dict.fromkeys(self.protocols)]

    @property
    def _block_lengths(self) -> Sequence[int]:
        return self.lengths if self.sampling == "paper" else [self.targets]

    def _blocks(self, text: Text, length: int) -> TextBlocks:
        if self.documents:
            limits = self.blocks_per_group, self.blocks_per_document
            return text.document_blocks(length, self.blocks, self.overlap, *limits)
        blocks = text.blocks(length, self.blocks)
        return blocks.chosen(shuffled(len(blocks), self.segments, self.seed)) if self.sampling == "paper" else blocks

    def _gain_window(self, network: Network, window: int) -> int | None:
        """The window if the context gain is measured, else None."""
        names = list(self.protocols)
        before_windowed = names[: names.index("windowed")] if "windowed" in names else []
        fits = window < self.lengths[-1] <= length_limit(network) and self.sampling == "blocks"
        return window if fits and "full" in before_windowed else None


def _measurements(
    network: Network,
    blocks: TextBlocks,
    protocols: Sequence[Protocol],
    lengths: Sequence[int],
    runner: Runner,
    token_bytes: Tensor | None = None,
    gain: "ContextGain | None" = None,
) -> list[Measurement]:
    """Sums over the blocks of this process; the last two arguments are those of `add_block`."""
    limit = length_limit(network)
    measurements = []
    for protocol, length in product(protocols, lengths):
        loss = runner.losses(length if protocol.name == "per_position" else len(blocks))
        reason = f"the strategy has only {limit} positions" if length > limit else None
        measurements.append(Measurement(protocol, length, loss, reason))
    for i, tokens in runner.blocks(blocks):
        with runner.autocast():
            add_block(network, tokens, i, measurements, token_bytes, gain)
    return measurements


def _scalars(measurements: Iterable[Measurement]) -> dict[str, float]:
    return {name: value for m in measurements for name, value in m.scalars().items()}

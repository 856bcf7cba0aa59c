"""`Measure` and `BlockMeasure`: base classes of measurements, whose options are the fields of a dataclass."""

import math
from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, cast

import torch

from kerple.base.errors import require
from kerple.data.evaluation_text import Text, TextBlocks
from kerple.measure.result import Result
from kerple.measure.runner import Runner
from kerple.model.network import HasLengthLimit, Network, SupportsDocuments


class Measure(ABC):
    """A measurement of a network on a text.

    A subclass is a dataclass of its options. It sets ``name`` and ``needs``, and overrides `measure`.
    """

    name: ClassVar[str]
    """Name of the measurement in file names and results."""
    needs: ClassVar[tuple[type, ...]] = ()
    """Classes of which the network must be an instance, such as the capabilities in `kerple.model.network`."""

    def run(self, network: Network, text: Any, runner: Runner | None = None) -> Result:
        """Check the network and the text, and measure the network. Every process must call this method.

        Args:
            network: The network, in evaluation mode.
            text: A `kerple.data.evaluation_text.Text` or token ids (N,). `TaskAccuracy` takes a
                `kerple.tasks.sampling.Examples`.
            runner: Device, precision and processes; None for this process on the CPU in fp32.

        Returns:
            The result. If the measurement does not apply to the network, the result contains only the reason.

        Raises:
            UserError: If `check` fails, or a loss is not finite.
        """
        text = Text(text) if isinstance(text, torch.Tensor) else text
        self.check(network, text)
        if reason := self.skip_reason(network):
            return Result(self.name, skipped=reason)
        with torch.inference_mode():
            result = self.measure(network, text, runner or Runner())
        if result.about and isinstance(text, Text):  # a report names runs that were tested on another text
            result.about = {**result.about, "text": text.digest}
        return result

    def check(self, network: Network, text: Any) -> None:
        """Raise a UserError if the measurement cannot be made with this network and text.

        The base class checks ``needs`` or, without them, the members of `Network`, and the type of the text. Subclasses
        also check the length of the text.
        """
        members = () if self.needs else ("name", "training_length", "losses")
        kind, missing = type(self).__name__, [name for name in members if not hasattr(network, name)]
        given = f"a network {type(network).__name__} without {', '.join(missing)}"
        require(not missing, kind, given, "the members of kerple.model.network.Network; add them")
        require_capabilities(self, network, self.needs)
        require_text(self, text)
        if text.mask_documents:
            require_capabilities(self, network, [SupportsDocuments], "set data.mask_documents to false")
            expected = "false for a model that adds BOS; or set model.bos to false"
            require(getattr(network, "bos", None) is None, "data.mask_documents", "true", expected)

    def skip_reason(self, network: Network) -> str | None:
        """Return the reason why the measurement does not apply to the network, or None if it applies."""
        return None

    @abstractmethod
    def measure(self, network: Any, text: Any, runner: Runner) -> Result:
        """Measure the network. `run` calls this method in inference mode. Every process returns the same result."""

    @property
    def validates(self) -> bool:
        """Whether `validate` is called after each run over the validation split."""
        return False

    def validate(self, network: Any, text: Any, runner: Runner) -> dict[str, float]:
        """Return numbers to log after a validation, by name; none by default."""
        return {}

    def check_validation(self, text: Any) -> None:  # noqa: B027 (most measurements have no validation)
        """Raise a UserError if `validate` cannot use the text. It is called before the first validation."""


@dataclass
class BlockMeasure(Measure):
    """A measurement on the first blocks of a text.

    Args:
        length: Number of targets in a block; None for the training length.
        blocks: Number of blocks; None for all.

    Raises:
        UserError: If an option is not positive.
    """

    length: int | None = None
    blocks: int | None = 16

    max_length: ClassVar[int | None] = None
    """Largest accepted ``length``; None for no limit. A measurement whose memory grows with ``length²`` has a limit."""

    def __post_init__(self) -> None:
        require_positive(self, "length", "blocks")

    def check(self, network: Network, text: Any) -> None:
        super().check(network, text)
        length, limit = self.targets(network), self.max_length
        expected = f"at most {limit}; set it to {limit} or less (the default is the training length)"
        require(limit is None or length <= limit, f"{type(self).__name__}: length", length, expected)
        self.text_blocks(network, text)

    def skip_reason(self, network: Network) -> str | None:
        length, limit = self.targets(network), length_limit(network)
        if length <= limit:
            return None
        return f"{network.name} has only {limit} positions, but a block has {length} inputs"

    def targets(self, network: Network) -> int:
        """Return the number of targets in a block: ``length``, or the training length if it is None."""
        return self.length or known_training_length(network, f"{type(self).__name__}: length")

    def text_blocks(self, network: Network, text: Text) -> TextBlocks:
        """Return the blocks of the text, which `Runner.blocks` divides among the processes."""
        return text.blocks(self.targets(network), self.blocks)


def require_capabilities(
    measure: Measure, network: Network, classes: Sequence[type], advice: str = "leave out this measure"
) -> None:
    """Raise a UserError, which ends with ``advice``, unless the network is an instance of all these classes."""
    missing = [each.__name__ for each in classes if not isinstance(network, each)]
    expected = f"one with {', '.join(missing)} as base classes (see kerple.model); {advice}"
    require(not missing, type(measure).__name__, f"a network {type(network).__name__}", expected)


def require_text(measure: Measure, text: Any) -> None:
    """Raise a UserError unless the text is a `Text`."""
    kind, expected = type(measure).__name__, "a kerple.data.evaluation_text.Text, such as a split of TokenShards"
    advice = f"change data, or leave out {kind}"
    require(isinstance(text, Text), f"{kind}: data", type(text).__name__, f"{expected}; {advice}")


def check_names(measures: Sequence[Measure]) -> None:
    """Raise a UserError if two measurements of a test write the same files."""
    names = [measure.name for measure in measures]
    for measure in measures:
        given = f"more than one {type(measure).__name__} with results named {measure.name}"
        require(names.count(measure.name) == 1, "trainer.callbacks", given, "one")


def require_positive(measure: Any, *names: str) -> None:
    """Raise a UserError unless each of these options is None or a positive number."""
    for name in names:
        number = getattr(measure, name)
        require(number is None or number >= 1, f"{type(measure).__name__}: {name}", number, "a positive number")


def ordered_lengths(measure: Any, dividing: bool = False) -> list[int]:
    """Return the option ``lengths`` of a measure in ascending order, without duplicates.

    Args:
        measure: The measure.
        dividing: Whether each length must divide the longest, so that a block can be cut into equal segments.

    Raises:
        UserError: If there are no lengths, a length is not positive or, with ``dividing``, does not divide the longest.
    """
    lengths = sorted(set(measure.lengths))
    valid = bool(lengths) and lengths[0] >= 1 and not (dividing and any(lengths[-1] % n for n in lengths))
    expected = "positive numbers that all divide the longest" if dividing else "positive numbers"
    require(valid, f"{type(measure).__name__}: lengths", list(measure.lengths), expected)
    return lengths


def known_training_length(network: Network, option: str = "model.length") -> int:
    """Return the training length of a network in tokens.

    Args:
        network: The network.
        option: Name of the option by which the user can set the length, for the message.

    Raises:
        UserError: If the training length is not known.
    """
    length = network.training_length
    advice = f"set {option}, or the attribute training_length of your own network"
    require(length is not None, option, "none", f"the training length of {network.name}, which is not known; {advice}")
    return cast(int, length)


def length_limit(network: Network) -> float:
    """Return the largest number of input tokens of a network; infinite if there is no limit."""
    limit = network.max_length if isinstance(network, HasLengthLimit) else None
    return math.inf if limit is None else limit


def skipped_lengths(lengths: Sequence[int], network: Network, protocol: str) -> list[dict[str, Any]]:
    """Return, for each length that the network cannot read, an entry (protocol, length, reason) for the results."""
    limit = length_limit(network)
    reason = f"{network.name} has only {limit} positions"
    return [{"protocol": protocol, "length": length, "reason": reason} for length in lengths if length > limit]


def skipped_lines(skipped: Iterable[Mapping[str, Any]]) -> list[str]:
    """Return a line of a report for each entry of `skipped_lengths`."""
    return [f"{each['protocol']} at {each['length']:,}: skipped, {each['reason']}" for each in skipped]

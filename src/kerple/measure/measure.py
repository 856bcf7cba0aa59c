"""`Measure`: a measurement of a network. The options of a measurement are the fields of its dataclass."""

import math
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch

from kerple.base.errors import UserError
from kerple.data.text import Text, TextBlocks
from kerple.measure.result import Result
from kerple.measure.runner import Runner
from kerple.model.network import Limited, Network


class Measure(ABC):
    """A measurement of a network on a text.

    A subclass is a dataclass of its options. It sets ``name`` and ``needs``, and overrides `measure`.
    """

    name: ClassVar[str]
    """Name of the files and the results."""
    needs: ClassVar[tuple[type, ...]] = ()
    """Capabilities of `kerple.model.network`, or classes, of which the network must be an instance."""

    def run(self, network: Network, text: Any, runner: Runner | None = None) -> Result:
        """Measure a network. Call it on every process.

        Args:
            network: The network, in evaluation mode.
            text: A `kerple.data.text.Text`, or token ids (N,); for a task its examples.
            runner: Device, precision and processes; None for this process on the CPU in fp32.

        Raises:
            UserError: As `check`.
        """
        text = Text(text) if isinstance(text, torch.Tensor) else text
        self.check(network, text)
        if reason := self.skip_reason(network):
            return Result(self.name, skipped=reason)
        with torch.inference_mode():
            return self.measure(network, text, runner or Runner())

    def check(self, network: Network, text: Any) -> None:
        """Raise a UserError if the network lacks a capability, or the text is too short or of the wrong kind."""
        require_capabilities(self, network, self.needs)
        if not isinstance(text, Text):
            raise UserError(f"{type(self).__name__}: got data {type(text).__name__}, expected a text; use TokenShards")

    def skip_reason(self, network: Network) -> str | None:
        """The reason why the measurement does not apply to the network, which is printed; None if it applies."""
        return None

    @abstractmethod
    def measure(self, network: Any, text: Any, runner: Runner) -> Result:
        """Make the measurement. It runs on every process without gradients, and returns the same result on each."""

    @property
    def validates(self) -> bool:
        """Whether the measurement takes part in the validations of a fit."""
        return False

    def validate(self, network: Any, text: Any, runner: Runner) -> dict[str, float]:
        """Scalars to log after a validation, by name; none by default."""
        return {}

    def check_validation(self, text: Any) -> None:  # noqa: B027 (most measurements have no validation)
        """Raise a UserError at the start of a fit if `validate` cannot use the text."""


@dataclass
class BlockMeasure(Measure):
    """A measurement on the first blocks of a text.

    Args:
        length: Number of targets in a block; None for the training length.
        blocks: Number of blocks; None for all.

    Raises:
        UserError: If a number is not positive.
    """

    length: int | None = None
    blocks: int | None = 16

    max_length: ClassVar[int | None] = None
    """Largest number of targets in a block, for measurements whose memory grows with its square."""

    def __post_init__(self) -> None:
        require_positive(self, "length", "blocks")

    def check(self, network: Network, text: Any) -> None:
        super().check(network, text)
        length, limit = self.targets(network), self.max_length
        if limit is not None and length > limit:
            raise UserError(
                f"{type(self).__name__}: length: got {length}, expected at most {limit}; use shorter inputs"
            )
        self.text_blocks(network, text)

    def skip_reason(self, network: Network) -> str | None:
        if (length := self.targets(network)) <= (limit := length_limit(network)):
            return None
        return f"{network.name} has only {limit} positions, and the segments have {length} tokens"

    def targets(self, network: Network) -> int:
        """Number of targets in a block: the option ``length``, or the training length."""
        return self.length or known_training_length(network, f"{type(self).__name__}: length")

    def text_blocks(self, network: Network, text: Text) -> TextBlocks:
        """The blocks, which the processes share."""
        return text.blocks(self.targets(network), self.blocks)


def require_capabilities(measure: Measure, network: Network, classes: Sequence[type]) -> None:
    """Raise a UserError unless the network is an instance of all these classes."""
    if missing := [each.__name__ for each in classes if not isinstance(network, each)]:
        raise UserError(
            f"{type(measure).__name__}: got a network {type(network).__name__}, expected one with "
            f"{', '.join(missing)} (kerple.model.network); leave out this measure or its protocol"
        )


def require_positive(measure: Any, *names: str) -> None:
    """Raise a UserError unless each of these options is None or a positive number."""
    for name in names:
        if (number := getattr(measure, name)) is not None and number < 1:
            raise UserError(f"{type(measure).__name__}: {name}: got {number}, expected a positive number")


def known_training_length(network: Network, option: str = "model.length") -> int:
    """Training length of a network in tokens.

    Args:
        network: The network.
        option: The option in the message, by which the user can give the length.

    Raises:
        UserError: If the training length is not known.
    """
    if network.training_length is None:
        raise UserError(
            f"{option}: got none, and the training length of {network.name} is not known; give a number, "
            "as training_length if the network is your own"
        )
    return network.training_length


def length_limit(network: Network) -> float:
    """Number of tokens in the longest input of a network; infinite if there is no limit."""
    limit = network.max_length if isinstance(network, Limited) else None
    return math.inf if limit is None else limit


def fitting_lengths(lengths: Sequence[int], network: Network, name: str) -> tuple[list[int], list[dict[str, Any]]]:
    """Divide lengths into those that a network can read and those that are skipped.

    Args:
        lengths: Lengths in tokens.
        network: The network.
        name: Name of the protocol in the results.

    Returns:
        The lengths that the network can read, and for each other length its entry in the results.
    """
    limit = length_limit(network)
    skipped = {"protocol": name, "reason": f"the strategy has only {limit} positions"}
    fitting = [length for length in lengths if length <= limit]
    return fitting, [skipped | {"length": length} for length in lengths if length > limit]

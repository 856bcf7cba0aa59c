"""`Network`: what a measurement needs of a model, and the capabilities that some measurements need in addition.

`Network` is a protocol: any object with its three members is one. A capability is a class to inherit from, so that a
measurement asks for it by type.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Protocol

from torch import Tensor, nn

from kerple.positions.visibility import EVERYTHING, Visibility


class Network(Protocol):
    """A causal language model that can be measured.

    Attributes:
        name: Name of the positional strategy, or of the model, in tables and figures.
        training_length: Training length in tokens, or None if it is not known.
    """

    @property
    def name(self) -> str: ...

    @property
    def training_length(self) -> int | None: ...

    def losses(self, tokens: Tensor, last: int | None = None) -> Tensor:
        """Losses of the targets of tokens (B, T + 1) int64, (B, T) fp32 or fp64 in nats; of the ``last`` ones only."""
        ...


class Limited(ABC):
    """A network with a largest input."""

    @property
    @abstractmethod
    def max_length(self) -> int | None:
        """Largest number of input tokens, or None if there is no limit."""


class Windows(ABC):
    """A network whose attention can be limited to some of the keys."""

    @abstractmethod
    def losses(self, tokens: Tensor, last: int | None = None, visibility: Visibility = EVERYTHING) -> Tensor:
        """As `Network.losses`, where each query sees the keys that ``visibility`` names."""


class Offset(ABC):
    """A network whose positions can be other numbers than 0, 1, 2, …"""

    @abstractmethod
    def losses(
        self, tokens: Tensor, last: int | None = None, visibility: Visibility = EVERYTHING, offset: int | Tensor = 0
    ) -> Tensor:
        """As `Windows.losses`, with ``offset`` added to every position.

        An offset for each input, (T,) int64, is not added in layers with a window, which would see distances that they
        never see.
        """


class Generation(ABC):
    """A network that can continue a text."""

    @abstractmethod
    def continued(self, tokens: Tensor, steps: int) -> list[int]:
        """The ids of at most ``steps`` tokens, generated greedily after the tokens (1, T) int64."""


class AttentionInside(ABC):
    """A network that shows its attention probabilities."""

    @abstractmethod
    def visit_attention(self, tokens: Tensor, visit: Callable[[int, Tensor], None]) -> None:
        """Run the tokens (B, T) int64; call ``visit`` with each layer's number and its probabilities (B, H, T, T)."""


class Embedding:
    """A network whose token embedding is a layer, so that gradients of the inputs can be taken.

    Attributes:
        embedding: The layer that embeds tokens. It is no property, which would hide a submodule of this name.
    """

    embedding: nn.Embedding

"""`Network`: the protocol of models that can be measured, and optional capabilities for some measurements.

Any object with the three members of `Network` can be measured. Capabilities are base classes, so that a measurement can
test for them with `isinstance`.
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

    name: str
    training_length: int | None

    def losses(self, tokens: Tensor, last: int | None = None) -> Tensor:
        """Return the losses (B, T) of the targets of tokens (B, T + 1) int64, in nats, fp32 or fp64.

        With ``last``, only the losses of the last targets, (B, last).
        """
        ...


class Limited(ABC):
    """Network with a largest input length."""

    @property
    @abstractmethod
    def max_length(self) -> int | None:
        """Largest number of input tokens, or None if there is no limit."""


class Windows(ABC):
    """Network whose attention can be limited to some keys."""

    @abstractmethod
    def losses(self, tokens: Tensor, last: int | None = None, visibility: Visibility = EVERYTHING) -> Tensor:
        """`Network.losses`, if each query sees only the keys of ``visibility``."""


class Offset(ABC):
    """Network whose positions can be shifted."""

    @abstractmethod
    def losses(
        self, tokens: Tensor, last: int | None = None, visibility: Visibility = EVERYTHING, offset: int | Tensor = 0
    ) -> Tensor:
        """`Windows.losses`, with ``offset`` added to every position.

        An offset for each input token, (T,) int64, is ignored in layers with a window. There it would cause distances
        that do not occur in training.
        """


class Generation(ABC):
    """Network that can generate text."""

    @abstractmethod
    def continued(self, tokens: Tensor, steps: int) -> list[int]:
        """Return the ids of at most ``steps`` tokens, generated greedily after the tokens (1, T) int64."""


class AttentionInside(ABC):
    """Network that returns its attention probabilities."""

    @abstractmethod
    def visit_attention(self, tokens: Tensor, visit: Callable[[int, Tensor], None]) -> None:
        """Process the tokens (B, T) int64; call ``visit`` with each layer's index and probabilities (B, H, T, T)."""


class Embedding:
    """Network with a layer for token embeddings, whose gradients can be computed.

    Attributes:
        embedding: Layer of the token embeddings. It is not a property, which would hide a submodule of this name.
    """

    embedding: nn.Embedding

"""`Batch`, the batches of data modules, `Network`, the protocol of models that can be measured, and their capabilities.

Any object with the three members of `Network` can be measured. Some measurements need a capability. It is a base class,
so that a measurement can test for it with `isinstance`. B is the batch size and T the number of tokens.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Protocol

from torch import Tensor, nn

from kerple.positions.visibility import EVERYTHING, Visibility

Batch = dict[str, Tensor]
"""Tensors by name. Only ``tokens`` is always present.

- ``tokens`` (B, T + 1) int64: inputs are all tokens except the last, and targets are all tokens except the first.
- ``documents`` (B, T + 1) int64: the document of each token, see `kerple.model.Transformer.forward`; without it, each
  sequence is one document.
- ``scored`` (B, T) bool: which targets contribute to the loss; without it all targets do.
- ``index`` (B,) int64: in evaluation, the index of each block of text or problem of a task; -1 for padding rows.
"""


class Network(Protocol):
    """A causal language model that can be measured.

    Attributes:
        name: Name of the positional strategy, or of the model, in tables and figures.
        training_length: Training length in tokens, or None if it is not known.
    """

    name: str
    training_length: int | None

    def losses(self, tokens: Tensor, last: int | None = None) -> Tensor:
        """Return the losses (B, T) of the targets, in nats, fp32 or fp64.

        Args:
            tokens: Tokens (B, T + 1) int64: the first T are inputs, and the last T are their targets.
            last: Number of last targets whose losses are returned, (B, last); None for all.
        """


class HasLengthLimit(ABC):
    """Network with a largest input length."""

    @property
    @abstractmethod
    def max_length(self) -> int | None:
        """Largest number of input tokens, or None if there is no limit."""


class SupportsWindows(ABC):
    """Network whose queries can be limited to some keys, for example to a window."""

    @abstractmethod
    def losses(self, tokens: Tensor, last: int | None = None, visibility: Visibility = EVERYTHING) -> Tensor:
        """Return the losses of `Network.losses` if each query sees only the keys of ``visibility``."""


class SupportsOffset(SupportsWindows):
    """Network whose positions can be shifted."""

    @abstractmethod
    def losses(
        self, tokens: Tensor, last: int | None = None, visibility: Visibility = EVERYTHING, offset: int | Tensor = 0
    ) -> Tensor:
        """Return the losses of `SupportsWindows.losses` with ``offset`` added to every position.

        ``offset`` may also be a tensor (T,) int64 with one number per input token. Layers whose strategy has a window
        ignore such a tensor: a window counts keys, so gaps would give these keys distances unseen in training.
        """


class SupportsDocuments(SupportsOffset):
    """Network that can read several documents in one sequence."""

    @abstractmethod
    def losses(
        self,
        tokens: Tensor,
        last: int | None = None,
        visibility: Visibility = EVERYTHING,
        offset: int | Tensor = 0,
        documents: Tensor | None = None,
    ) -> Tensor:
        """Return the losses of `SupportsOffset.losses` if each query sees only keys of its document.

        ``documents`` (B, T + 1) int64 has the document of each token; consecutive equal numbers are a document.
        """


class SupportsGeneration(ABC):
    """Network that can generate text."""

    @abstractmethod
    def continued(self, tokens: Tensor, steps: int) -> list[int]:
        """Return the ids of at most ``steps`` tokens after ``tokens`` (1, T) int64, the most likely token each time."""


class SupportsAttentionProbabilities(ABC):
    """Network that returns its attention probabilities."""

    @abstractmethod
    def visit_attention(self, tokens: Tensor, visit: Callable[[int, Tensor], None]) -> None:
        """Call ``visit(layer, probabilities)`` for each layer in a forward pass of the tokens (B, T) int64.

        ``probabilities`` (B, H, T, T) have the dimensions batch, heads, queries and keys.
        """


class HasEmbedding:
    """Network with a layer of token embeddings, for gradients with respect to the output of this layer.

    Attributes:
        embedding: Layer of the token embeddings. It is an annotation and not a property, because a property would hide
            a submodule of the same name.
    """

    embedding: nn.Embedding


def __getattr__(name: str) -> type:
    if name == "AttentionInside":  # the name in earlier versions, which analyses of users import
        raise ImportError("kerple.model.network: AttentionInside is now SupportsAttentionProbabilities")
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")

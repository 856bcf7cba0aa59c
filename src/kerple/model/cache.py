"""Cache of keys and values for generation.

T is the number of tokens in the cache. The other letters in shapes are those of `kerple.positions.base`.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from kerple.base.errors import require
from kerple.positions.visibility import EVERYTHING, Visibility


@dataclass
class LayerCache:
    """Cache of one layer.

    Args:
        window: Number of last tokens that the cache keeps; None for all.
        keys: Keys (B, G, T, δ') after `Position.transform_qk`; None before the first call.
        values: Values (B, G, T, δ); None before the first call.
        state: `Position.token_state` of the tokens in the cache, (B, H, T, c); None if the strategy has no state.
        first_tokens: Cache of the first tokens of the input, for queries whose window does not contain them. None if
            such queries do not see the first tokens, or if ``window`` is None.
    """

    window: int | None = None
    keys: Tensor | None = None
    values: Tensor | None = None
    state: Tensor | None = None
    first_tokens: "LayerCache | None" = None

    def append(self, k: Tensor, v: Tensor, state: Tensor | None) -> tuple[Tensor, Tensor, Tensor | None]:
        """Append keys, values and state of t new tokens to those of T tokens in the cache, and return all T + t.

        Afterwards the cache keeps only those of the last ``window`` tokens.
        """
        if self.keys is not None and self.values is not None:
            k, v = torch.cat([self.keys, k], 2), torch.cat([self.values, v], 2)
            state = state if state is None or self.state is None else torch.cat([self.state, state], 2)
        last = slice(0 if self.window is None else max(0, k.shape[2] - self.window), None)
        self.keys, self.values = k[:, :, last], v[:, :, last]
        self.state = None if state is None else state[:, :, last]
        return k, v, state


@dataclass
class Cache:
    """Cache of a network. `Transformer.new_cache` creates it, and each forward pass with it adds new tokens.

    Args:
        visibility: Keys that a query sees in calls with this cache.
        layers: Cache of each layer.
        tokens: All earlier tokens (B, T); None before the first call.
        documents: Document of each earlier token, (B, T); None before the first call, or without documents.
    """

    visibility: Visibility = EVERYTHING
    layers: list[LayerCache] = field(default_factory=list)
    tokens: Tensor | None = None
    documents: Tensor | None = None

    @contextmanager
    def restored_after_errors(self) -> Iterator[None]:
        """Context of a forward pass, after whose failure the cache is as before. Otherwise it has tokens without keys.

        No tensor is copied, because new tokens replace tensors and never change them.
        """
        layers = [replace(x, first_tokens=x.first_tokens and replace(x.first_tokens)) for x in self.layers]
        before = replace(self, layers=layers)
        try:
            yield
        except BaseException:  # also Ctrl-C
            vars(self).update(vars(before))
            raise

    @property
    def length(self) -> int:
        """Number of earlier tokens."""
        return 0 if self.tokens is None else self.tokens.shape[1]

    def all_documents(self, documents: Tensor | None) -> Tensor | None:
        """Return the documents of all tokens, (B, T + t), given those of new tokens, (B, t) or None."""
        valid = self.tokens is None or (documents is None) == (self.documents is None)
        given = "none" if documents is None else "documents"
        require(valid, "documents", given, "documents in all calls with a cache, or in none")
        return documents if documents is None or self.documents is None else torch.cat([self.documents, documents], 1)

    def append(self, tokens: Tensor, all_documents: Tensor | None) -> Tensor:
        """Append new tokens (B, t), store the result of `all_documents`, and return all tokens, (B, T + t)."""
        self.tokens = tokens if self.tokens is None else torch.cat([self.tokens, tokens], 1)
        self.documents = all_documents
        return self.tokens

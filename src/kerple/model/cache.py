"""Cache of keys and values, with which each further token costs one row of attention."""

from dataclasses import dataclass, field

import torch
from torch import Tensor

from kerple.positions.visibility import EVERYTHING, Visibility


@dataclass
class LayerCache:
    """Cache of one layer.

    Args:
        window: Number of last rows that are kept, because later queries may see them; None for all.
        keys: Projected keys (B, G, T, ·), None before the first call.
        values: Values (B, G, T, δ), None before the first call.
        state: `Position.token_state` of these tokens, (B, H, T, c), or None.
        first: The first tokens as queries beyond their window see them, or None where these are among the rows.
    """

    window: int | None = None
    keys: Tensor | None = None
    values: Tensor | None = None
    state: Tensor | None = None
    first: "LayerCache | None" = None

    def append(self, k: Tensor, v: Tensor, state: Tensor | None) -> tuple[Tensor, Tensor, Tensor | None]:
        """Append new rows, (B, ·, t, ·) each; return the rows kept before followed by them, (B, ·, T + t, ·)."""
        if self.keys is not None and self.values is not None:
            k, v = torch.cat([self.keys, k], 2), torch.cat([self.values, v], 2)
            state = state if state is None or self.state is None else torch.cat([self.state, state], 2)
        last = slice(0 if self.window is None else max(0, k.shape[2] - self.window), None)
        self.keys, self.values = k[:, :, last], v[:, :, last]
        self.state = None if state is None else state[:, :, last]
        return k, v, state


@dataclass
class Cache:
    """Cache of a network, which `Transformer.new_cache` makes and each call extends.

    Args:
        visibility: The keys that a query sees in the calls with this cache.
        layers: The cache of each layer.
        tokens: The tokens so far (B, T), None before the first call.
    """

    visibility: Visibility = EVERYTHING
    layers: list[LayerCache] = field(default_factory=list)
    tokens: Tensor | None = None

    @property
    def length(self) -> int:
        """Number of tokens read."""
        return 0 if self.tokens is None else self.tokens.shape[1]

    def append(self, tokens: Tensor) -> Tensor:
        """Append new tokens (B, t), and return all tokens, (B, T + t)."""
        self.tokens = tokens if self.tokens is None else torch.cat([self.tokens, tokens], 1)
        return self.tokens

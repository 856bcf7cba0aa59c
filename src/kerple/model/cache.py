"""What a transformer remembers of the tokens it has read, so that the next one costs one row of attention."""

from dataclasses import dataclass, field

import torch
from torch import Tensor


@dataclass
class LayerCache:
    """Projected keys and values (B, G, T, ·) of one layer, and what its strategy remembers (B, H, T, c) or None.

    Args:
        window: How many of the last rows later queries may see, and so are kept; None for all.
    """

    window: int | None = None
    keys: Tensor | None = None
    values: Tensor | None = None
    memory: Tensor | None = None

    def append(self, k: Tensor, v: Tensor, memory: Tensor | None) -> tuple[Tensor, Tensor, Tensor | None]:
        """Add the new rows, (B, ·, t, ·) each, and return the kept rows and them, (B, ·, T + t, ·)."""
        if self.keys is not None and self.values is not None:
            k, v = torch.cat([self.keys, k], 2), torch.cat([self.values, v], 2)
            memory = memory if memory is None or self.memory is None else torch.cat([self.memory, memory], 2)
        kept = slice(0 if self.window is None else max(0, k.shape[2] - self.window), None)
        self.keys, self.values = k[:, :, kept], v[:, :, kept]
        self.memory = None if memory is None else memory[:, :, kept]
        return k, v, memory


@dataclass
class Cache:
    """The tokens so far (B, T) and one `LayerCache` a layer; made by `Transformer.new_cache`, grown by each call.

    Args:
        window: What every call with this cache may see at most; None for all.
        layers: In order.
        tokens: None before the first call.
    """

    window: int | None = None
    layers: list[LayerCache] = field(default_factory=list)
    tokens: Tensor | None = None

    @property
    def length(self) -> int:
        """Number of tokens read."""
        return 0 if self.tokens is None else self.tokens.shape[1]

    def read(self, tokens: Tensor) -> Tensor:
        """Remember new tokens (B, t), and return all of them, (B, T + t)."""
        self.tokens = tokens if self.tokens is None else torch.cat([self.tokens, tokens], 1)
        return self.tokens

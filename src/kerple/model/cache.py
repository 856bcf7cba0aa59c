"""What a transformer remembers of the tokens it has read, so that the next one costs one row of attention."""

from dataclasses import dataclass, field

import torch
from torch import Tensor


@dataclass
class LayerCache:
    """Keys, rotated if the strategy rotates, and values (B, H, T, δ) of one layer; its content (B, H, T, c) or None."""

    keys: Tensor | None = None
    values: Tensor | None = None
    content: Tensor | None = None

    def append(self, k: Tensor, v: Tensor, content: Tensor | None) -> tuple[Tensor, Tensor, Tensor | None]:
        """Add the new rows, (B, H, t, ·) each, and return all rows, (B, H, T + t, ·)."""
        if self.keys is not None and self.values is not None:
            k, v = torch.cat([self.keys, k], 2), torch.cat([self.values, v], 2)
            content = content if content is None else torch.cat([self.content, content], 2)
        self.keys, self.values, self.content = k, v, content
        return k, v, content


@dataclass
class Cache:
    """One `LayerCache` a layer; made by `Transformer.new_cache` and grown by each call that is given it."""

    layers: list[LayerCache] = field(default_factory=list)

    @property
    def length(self) -> int:
        """Number of tokens remembered."""
        keys = self.layers[0].keys
        return 0 if keys is None else keys.shape[2]

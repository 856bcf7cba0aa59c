"""`TokenLayout`: positions and documents of the tokens of a forward pass in transformers, including cached tokens.

B is the batch size, T the number of new tokens, and Tk the number of all tokens, including those in the cache.
"""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers.cache_utils import Cache, DynamicLayer

from kerple.base.errors import require
from kerple.positions import TokenPositions


class LayoutLayer(DynamicLayer):
    """Layer of a cache that holds the positions (keys) and the mask (values) of all tokens, each (B, 1, Tk, 1) int64.

    transformers reorders, repeats and crops it with the other layers.
    """


@dataclass(frozen=True)
class TokenLayout:
    """Positions and documents of the tokens of a forward pass.

    Args:
        positions: Positions of all tokens.
        ids: Positions of the new tokens, (B, T) int64.
        visible: Which new tokens are not padding, (B, T) bool.
    """

    positions: TokenPositions
    ids: Tensor
    visible: Tensor

    def store(self, cache: Cache) -> None:
        """Add the positions and the mask of the new tokens to a cache."""
        if (layer := _layout_layer(cache)) is None:
            cache.layers.append(layer := LayoutLayer())
        layer.update(self.ids[:, None, :, None], self.visible[:, None, :, None].long())


def _layout_layer(cache: Cache | None) -> LayoutLayer | None:
    return next((layer for layer in getattr(cache, "layers", ()) if isinstance(layer, LayoutLayer)), None)


def read_layout(inputs: Tensor, mask: Tensor | None, ids: Tensor | None, cache: Any) -> TokenLayout:
    """Return the layout of the tokens of a forward pass.

    The first visible token after padding begins a document, and so does a token whose position is not larger than the
    position before it. Without ``ids``, positions count from the first visible token, and continue those in the cache.

    Args:
        inputs: Ids or embeddings of the new tokens, (B, T) or (B, T, D).
        mask: transformers' ``attention_mask``, (B, >= Tk), 0 for padding; None for no padding.
        ids: transformers' ``position_ids``, (B or 1, T); None for consecutive positions.
        cache: The cache of transformers, or None.

    Raises:
        UserError: If the mask has another shape, hides a token between visible tokens, or differs from the mask with
            which the cache was filled. If the cache has tokens whose positions are not known.
    """
    (batch, new), device = inputs.shape[:2], inputs.device
    past, cached = _layout_layer(cache), 0 if cache is None else int(cache.get_seq_length())
    given = f"{cached} tokens without positions"
    require(cached == (past.get_seq_length() if past else 0), "cache", given, "one that this model has filled")
    rows = torch.arange(cached + new, device=device)
    visible = torch.ones(batch, len(rows), dtype=torch.bool, device=device)
    if mask is not None:
        valid = mask.ndim == 2 and mask.shape[0] == batch and mask.shape[1] >= len(rows)
        require(valid, "attention_mask", f"shape {tuple(mask.shape)}", f"(B, Tk) = {batch, len(rows)}")
        visible = mask[:, : len(rows)].to(device).bool()
    padded = mask is not None and not bool(visible.all())
    count = visible.cumsum(-1)  # number of visible tokens up to each token, (B, Tk)
    if past is not None and past.keys is not None and past.values is not None and cached:
        previous, seen = (x[:, 0, :, 0].to(device) for x in (past.keys, past.values))
        unchanged = torch.equal(seen.bool(), visible[:, :cached])
        require(unchanged, "attention_mask", "another mask for tokens in the cache", "the mask of earlier calls")
        following = previous[:, -1:] + 1 + rows[:new] if ids is None else ids.expand(batch, -1)
        all_ids = torch.cat([previous, following], 1)
    elif ids is None:
        all_ids = (rows - (count == 0).sum(-1, keepdim=True)).clamp(min=0)
    else:
        all_ids = ids.expand(batch, -1)
    step = all_ids.diff(prepend=all_ids[:, :1])
    starts = (count == 0) | (visible & ((count == 1) | (step <= 0)))  # the first tokens of documents
    first_key = (starts * rows).cummax(-1).values
    if not (padded or cached) and ids is None:
        positions = TokenPositions(rows, rows)
    else:
        hole = bool((visible[:, 1:] & ~visible[:, :-1] & (count[:, :-1] > 0)).any())
        require(not hole, "attention_mask", "padding between visible tokens", "padding on the left or on the right")
        contiguous = bool(((step == 1) | starts | ~visible).all())
        documents = first_key if bool(starts[:, 1:].any()) else None
        equal = bool((all_ids == all_ids[:1]).all())
        positions = TokenPositions(rows, all_ids[0] if equal else all_ids, contiguous, first_key=documents)
    return TokenLayout(positions, all_ids[:, cached:], visible[:, cached:])

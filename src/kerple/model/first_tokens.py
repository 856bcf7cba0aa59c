"""`FirstTokens`: scores of the first tokens of an input for queries whose window does not contain them."""

import math
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from kerple.attention.spec import repeat_for_query_heads
from kerple.base.errors import UserError
from kerple.model.cache import LayerCache
from kerple.positions import Position, QueryKeyBlock, TokenPositions
from kerple.positions.base import HOOKS
from kerple.positions.products import precise, product
from kerple.positions.visibility import Visibility

# hooks that allow changed distances of the first tokens
DISTANCE_HOOKS = ("bias", "score_scale", "transform_qk", "sink_logit", "transform_output")


@dataclass(frozen=True)
class FirstTokens:
    """First tokens as keys of queries whose window does not contain them.

    Args:
        queries: Positions of the queries for scores of the first tokens.
        keys: Positions of the first tokens that are not in the cache.
        hidden: Which first tokens are in the window of each query or in its future, (Tq, F) bool.
        bias: `Position.bias` at their distances, (H, Tq, F) fp32, or None.
        weight: `Position.score_scale` at their distances, (H, Tq, F) fp32, or None.
    """

    queries: TokenPositions
    keys: TokenPositions
    hidden: Tensor
    bias: Tensor | None
    weight: Tensor | None

    @classmethod
    def of(cls, position: Position, positions: TokenPositions, cached: int | None) -> "FirstTokens":
        """Compute the attributes for a forward pass; the arguments are those of `prepare_context`."""
        visibility = positions.visibility
        window, first, distances = visibility.window, visibility.first, visibility.distances
        assert window is not None
        queries, keys = positions[cached:], positions[:first]
        hidden = queries.rows[:, None] - keys.rows < window  # (Tq, F)
        if distances != "true":
            query_rows, key_rows = queries.rows.clamp(max=first + window - 1), keys.rows
            if distances == "capped":
                query_rows, key_rows = torch.full_like(query_rows, window), torch.zeros_like(key_rows)
            queries = replace(queries, ids=query_rows, contiguous=False)
            keys = replace(keys, ids=key_rows, contiguous=False)
        pairs = QueryKeyBlock(queries, replace(keys, contiguous=False), ~hidden)
        bias = pairs.evaluate(position.bias) if position.uses("bias") else None
        weight = pairs.evaluate(position.score_scale) if position.uses("score_scale") else None
        return cls(queries, keys[cached:], hidden, bias, weight)

    def scores_and_values(
        self, position: Position, q: Tensor, k: Tensor, v: Tensor, state: Tensor | None, cache: LayerCache | None
    ) -> tuple[Tensor, Tensor]:
        """Return `AttentionSpec.more_keys`.

        Args:
            position: The strategy.
            q: Queries (B, H, Tq, δ) before `Position.transform_qk`.
            k: Keys (B, G, Tq, δ) before `Position.transform_qk`.
            v: Values (B, G, Tq, δ).
            state: `Position.token_state` of these tokens, (B, H, Tq, c), or None.
            cache: The layer's cache, to which new first tokens are added, or None.
        """
        far_q, _ = position.transform_qk(q, k, state, self.queries)
        first = LayerCache() if cache is None or cache.first is None else cache.first
        if new := len(self.keys.rows):
            state = None if state is None else state[:, :, :new]
            _, k = position.transform_qk(q[:, :, :new], k[:, :, :new], state, self.keys)
            first.append(k, v[:, :, :new], None)
        assert first.keys is not None
        assert first.values is not None
        k, values = repeat_for_query_heads(far_q, first.keys, first.values)
        scores = product(precise(far_q) * v.shape[-1] ** -0.5, k.mT)  # (B, H, Tq, F)
        scores = scores if self.weight is None else scores * self.weight
        scores = scores if self.bias is None else scores + self.bias
        return scores.masked_fill(self.hidden, -math.inf), values


def is_separable(position: Position, visibility: Visibility) -> bool:
    """Whether the scores of the first tokens can be computed separately from those of the window."""
    pairwise = not (position.uses("modify_scores") or position.uses("add_to_output"))
    return pairwise and position.neighbor_window is None and visibility.window is not None and visibility.first > 0


def new_layer_cache(position: Position, visibility: Visibility) -> LayerCache:
    """Create the cache of a layer, which keeps the tokens that its queries may see."""
    visibility = visibility.narrow(position.window)
    if is_separable(position, visibility):
        return LayerCache(visibility.window, first=LayerCache())
    return LayerCache(None if visibility.first else visibility.window)


def check_distances(position: Position, visibility: Visibility) -> None:
    """Raise a UserError if the scores of a strategy need true distances, and ``visibility`` changes distances."""
    others = (hook for hook in HOOKS if hook not in DISTANCE_HOOKS and position.uses(hook))
    other_distances = position.neighbor_window is not None or not position.prefix_consistent
    if visibility.distances != "true" and (other_distances or any(others)):
        raise UserError(
            f"distances: got {visibility.distances!r}, expected true for {type(position).__name__}, which needs it"
        )

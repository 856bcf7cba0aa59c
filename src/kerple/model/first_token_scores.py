"""`FirstTokens`: scores of the first tokens of an input for queries whose window does not contain them.

A `Visibility` may have a window and F first tokens. `FirstTokens` is used if the strategy allows it (`is_separable`),
and either there is a cache or `Visibility.distances` is not ``true``. The scores of the first tokens are then computed
separately from the scores of the tokens in the window. The other letters in shapes are those of
`kerple.positions.base`.
"""

import math
from dataclasses import replace

import torch
from torch import Tensor

from kerple.attention.spec import repeat_for_query_heads
from kerple.base.errors import require
from kerple.model.cache import LayerCache
from kerple.positions import Position, QueryKeyBlock, TokenPositions
from kerple.positions.base import HOOKS
from kerple.positions.fp32_matmul import precise, product
from kerple.positions.visibility import Visibility

# hooks that accept changed distances, or use no distance to a key; all other hooks need the true distances
DISTANCE_HOOKS = ("bias", "score_scale", "transform_qk", "sink_logit", "transform_output")
# hooks whose effect on the first tokens is not computed separately from that on the keys in the window
JOINT_HOOKS = ("key_bias", "query_bias", "value_bias", "modify_scores", "add_to_output")


class FirstTokens:
    """Positions, mask, bias and score scale of first tokens, for queries whose window does not contain these tokens.

    Args:
        position: The strategy.
        positions: Positions of all tokens, including tokens in the cache, with their visibility.
        cached: Number of tokens in the cache, which are not queries; None without a cache.

    Attributes:
        queries: Positions of the queries. Their differences from the positions of first tokens are the distances that
            `Visibility.distances` defines. These may differ from the true distances.
        keys: Positions of those first tokens that are not yet in the cache.
        hidden: Which first tokens are masked here for each query, (Tq, F) bool: those after the query, and those in its
            window, which the attention within the window includes.
        bias: `Position.bias` for each query and first token, (H, Tq, F) fp32; None if the strategy has none.
        score_scale: `Position.score_scale` for each query and first token, (H, Tq, F) fp32; None if the strategy has
            none.
    """

    def __init__(self, position: Position, positions: TokenPositions, cached: int | None) -> None:
        visibility = positions.visibility
        window, first_keys, distances = visibility.window, visibility.first_keys, visibility.distances
        assert window is not None
        queries, keys = positions[cached:], positions[:first_keys]
        self.hidden = queries.rows[:, None] - keys.rows < window  # (Tq, F)
        if distances != "true":
            # for "cache", the visible keys have the positions 0, 1, …; a query sees at most first_keys + window keys
            query_ids, key_ids = queries.rows.clamp(max=first_keys + window - 1), keys.rows
            if distances == "capped":  # every first token has the distance ``window``
                query_ids, key_ids = torch.full_like(query_ids, window), torch.zeros_like(key_ids)
            queries = replace(queries, ids=query_ids, contiguous=False)
            keys = replace(keys, ids=key_ids, contiguous=False)
        pairs = QueryKeyBlock(queries, replace(keys, contiguous=False), ~self.hidden)
        self.bias = pairs.evaluate(position.bias) if position.uses("bias") else None
        self.score_scale = pairs.evaluate(position.score_scale) if position.uses("score_scale") else None
        self.queries, self.keys = queries, keys[cached:]

    def scores_and_values(
        self, position: Position, q: Tensor, k: Tensor, v: Tensor, state: Tensor | None, cache: LayerCache | None
    ) -> tuple[Tensor, Tensor]:
        """Return scores (B, H, Tq, F) and values (B, H, F, δ) of the first tokens, for `AttentionSpec.more_keys`.

        Args:
            position: The strategy.
            q: Queries (B, H, Tq, δ) before `Position.transform_qk`.
            k: Keys (B, G, Tq, δ) of the same tokens, before `Position.transform_qk`.
            v: Values (B, G, Tq, δ) of the same tokens.
            state: `Position.token_state` of the same tokens, (B, H, Tq, c), or None.
            cache: The layer's cache, or None. First tokens that are not yet in the cache are added to
                ``cache.first_tokens``.
        """
        far_q, _ = position.transform_qk(q, k, state, self.queries)
        first_tokens = LayerCache() if cache is None or cache.first_tokens is None else cache.first_tokens
        if new := len(self.keys.rows):
            state = None if state is None else state[:, :, :new]
            _, k = position.transform_qk(q[:, :, :new], k[:, :, :new], state, self.keys)
            first_tokens.append(k, v[:, :, :new], None)
        assert first_tokens.keys is not None
        assert first_tokens.values is not None
        k, values = repeat_for_query_heads(far_q, first_tokens.keys, first_tokens.values)
        scores = product(precise(far_q) * v.shape[-1] ** -0.5, k.mT)  # (B, H, Tq, F)
        scores = scores if self.score_scale is None else scores * self.score_scale
        scores = scores if self.bias is None else scores + self.bias
        return scores.masked_fill(self.hidden, -math.inf), values


def is_separable(position: Position, visibility: Visibility) -> bool:
    """Whether queries see first tokens in addition to a window, with scores that can be computed separately."""
    joint = any(map(position.uses, JOINT_HOOKS)) or position.neighbor_window is not None
    return visibility.window is not None and visibility.first_keys > 0 and not joint


def new_layer_cache(position: Position, visibility: Visibility) -> LayerCache:
    """Create the cache of a layer. It keeps the tokens that later queries may see.

    If first tokens are visible, but their scores cannot be computed separately (`is_separable`), it keeps all tokens.
    """
    visibility = visibility.narrow(position.window)
    if is_separable(position, visibility):
        return LayerCache(visibility.window, first_tokens=LayerCache())
    return LayerCache(None if visibility.first_keys else visibility.window)


def check_distances(position: Position, visibility: Visibility) -> None:
    """Check that a strategy supports the distances of the first tokens in ``visibility``.

    Raises:
        UserError: If ``visibility.distances`` is not ``true``, but the strategy needs the true distances.
    """
    needs_true = position.neighbor_window is not None or not position.prefix_consistent
    needs_true = needs_true or any(hook not in DISTANCE_HOOKS and position.uses(hook) for hook in HOOKS)
    distances, name = visibility.distances, type(position).__name__
    expected = f"true for {name}, whose scores need true distances; or another model.position"
    require(distances == "true" or not needs_true, "distances", distances, expected)

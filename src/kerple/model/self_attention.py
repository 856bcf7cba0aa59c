"""Causal multi-head attention that calls the hooks of a positional strategy.

B is the batch size, T the number of tokens, D the width of the network, and δ the head dimension. H is the number of
query heads, and G the number of heads of keys and values. Tq and Tk are the numbers of queries and keys, and c the
width of a strategy's state.
"""

import copy
from dataclasses import replace

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from kerple.attention import AttentionOption, AttentionSpec, attend
from kerple.attention.reference import attention_probabilities
from kerple.attention.spec import repeat_for_query_heads
from kerple.base.bf16 import Linear
from kerple.base.errors import UserError, require
from kerple.model.architecture import Architecture
from kerple.model.cache import LayerCache
from kerple.model.first_token_scores import FirstTokens, check_distances, is_separable
from kerple.positions import Position, Shape, TokenPositions
from kerple.positions.visibility import EVERYTHING, Visibility


class PositionContext:
    """Contribution of a strategy to one forward pass. It is computed once for all layers that share the strategy.

    Args:
        position: The strategy.
        positions: Positions of all tokens, including tokens in the cache.
        tokens: All tokens (B, T), including tokens in the cache.
        visibility: Keys that a query sees. A narrower window of the strategy takes precedence.
        attention: Option for the implementation of attention, see `kerple.attention.backend_selection`.
        cached: Number of tokens in the cache, which are not queries; None without a cache.

    Attributes:
        positions: Positions of all tokens that the strategy uses, with their visibility.
        queries: Positions of the queries, which are the last tokens.
        spec: Modifications of attention that are equal in all layers. The tables of `Position.bias` and
            `Position.score_scale` at distances 0 to T - 1 are None if positions are not contiguous: both are then
            evaluated for each pair of query and key.
        first_tokens: Data for the scores of the first tokens, for queries whose window does not contain these tokens.
            None if the scores are not computed separately (`kerple.model.first_token_scores`).

    Raises:
        UserError: If the strategy does not support the option ``visibility.distances``.
    """

    def __init__(
        self,
        position: Position,
        positions: TokenPositions,
        tokens: Tensor,
        visibility: Visibility = EVERYTHING,
        attention: AttentionOption = "auto",
        cached: int | None = None,
    ) -> None:
        visibility = visibility.narrow(position.window)
        check_distances(position, visibility)
        self.positions = replace(position.remap_positions(positions, tokens), visibility=visibility)
        self.queries = self.positions[cached:]
        self.attention: AttentionOption = attention
        window, first_keys = visibility.window, visibility.first_keys
        self.spec = AttentionSpec(window=window, first_keys=first_keys, neighbor_window=position.neighbor_window)
        if self.positions.contiguous:
            distance = self.positions.rows.float()
            self.spec = replace(self.spec, table=position.bias(distance), score_scale=position.score_scale(distance))
        separate = is_separable(position, visibility) and (cached is not None or visibility.distances != "true")
        given = f"documents with first_keys {first_keys}"
        expected = "0, or without a cache first tokens at their true distances"
        require(positions.first_key is None or not separate, "documents", given, expected)
        self.first_tokens = FirstTokens(position, self.positions, cached) if separate else None


class SelfAttention(nn.Module):
    """Attention with H query heads and G heads of keys and values; query head h uses key head h // (H / G).

    Args:
        shape: Width D, number of heads H and head dimension δ.
        architecture: Options of the network; ``kv_heads`` is G.

    Raises:
        UserError: If G does not divide H.
    """

    attend = staticmethod(attend)
    """The attention function. `kerple.probe.capture` replaces it in the layers of a model."""

    def __init__(self, shape: Shape, architecture: Architecture) -> None:
        super().__init__()
        heads, kv_heads, head_dim = shape.heads, architecture.kv_heads, shape.head_dim
        kv_heads = heads if kv_heads is None else kv_heads
        valid = kv_heads >= 1 and heads % kv_heads == 0
        require(valid, "model.kv_heads", kv_heads, f"a divisor of model.heads, which is {heads}")
        bias, qkv_bias, eps = architecture.bias, architecture.qkv_bias, architecture.eps
        self.heads, self.head_dim = heads, head_dim
        self.widths = [heads * head_dim, kv_heads * head_dim, kv_heads * head_dim]
        self.qkv = Linear(shape.dim, sum(self.widths), bias if qkv_bias is None else qkv_bias)
        self.out = Linear(heads * head_dim, shape.dim, bias)
        sizes = self.widths[:2] if architecture.qk_norm == "all" else [head_dim, head_dim]
        self.q_norm, self.k_norm = (nn.RMSNorm(n, eps) if architecture.qk_norm else nn.Identity() for n in sizes)

    def forward(
        self, x: Tensor, position: Position, context: PositionContext, cache: LayerCache | None = None
    ) -> Tensor:
        """Apply the layer, (B, T, D) -> (B, T, D)."""
        q, k, v, spec = self.prepare(x, position, context, cache)
        out = position.transform_output(self.attend(q, k, v, spec, context.attention), x)  # (B, H, T, δ)
        return self.out(out.transpose(1, 2).flatten(2))

    def probabilities(self, x: Tensor, position: Position, context: PositionContext) -> Tensor:
        """Return the attention probabilities (B, H, T, T) of T queries and T keys, for a context without a cache.

        They are computed in fp32 (fp64 in an fp64 network), and are 0 for keys that a query does not see.
        """
        dtype = torch.promote_types(torch.float32, self.qkv.weight.dtype)
        with torch.autocast(x.device.type, enabled=False):
            q, k, v, spec = copy.deepcopy(self).to(dtype).prepare(x.to(dtype), position, context)
            p = attention_probabilities(q, repeat_for_query_heads(q, k, v)[0], spec)
        first, keys = p.split([p.shape[-1] - x.shape[1], x.shape[1]], -1)
        # first tokens at other distances, which the window hides, are separate keys
        return keys + F.pad(first, (0, keys.shape[-1] - first.shape[-1]))

    def split(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Split the output of ``qkv``, (B, T, (H + 2·G)·δ), into queries (B, H, T, δ), keys and values (B, G, T, δ)."""
        q, k, v = (part.unflatten(-1, (-1, self.head_dim)).transpose(1, 2) for part in x.split(self.widths, -1))
        return q, k, v

    def prepare(
        self, x: Tensor, position: Position, context: PositionContext, cache: LayerCache | None = None
    ) -> tuple[Tensor, Tensor, Tensor, AttentionSpec]:
        """Return queries, keys, values and modifications for `kerple.attention.attend`; update the cache."""
        q, k, v = self.split(self.qkv(x))
        q, k = _normalise(self.q_norm, q), _normalise(self.k_norm, k)
        state = position.token_state(x, context.queries, None if cache is None else cache.state)
        first = context.first_tokens
        more_keys = None if first is None else first.scores_and_values(position, q, k, v, state, cache)
        q, k = position.transform_qk(q, k, state, context.queries)
        if cache is not None:
            k, v, state = cache.append(k, v, state)
        spec = spec_of(position, context, q, v, state)
        return q, k, v, spec if more_keys is None else replace(spec, first_keys=0, more_keys=more_keys)


def _normalise(norm: nn.Module, x: Tensor) -> Tensor:
    """Normalise queries or keys (B, heads, T, δ): each head separately or, with a wider norm, all heads together."""
    if not isinstance(norm, nn.RMSNorm):
        return x
    precise = x.to(norm.weight.dtype)  # autocast does not convert the input of RMSNorm
    if norm.normalized_shape[0] == x.shape[-1]:
        return norm(precise).to(x.dtype)
    return norm(precise.transpose(1, 2).flatten(2)).to(x.dtype).unflatten(-1, (x.shape[1], -1)).transpose(1, 2)


def spec_of(position: Position, context: PositionContext, q: Tensor, v: Tensor, state: Tensor | None) -> AttentionSpec:
    """Return the modifications of attention in one layer by a strategy.

    Args:
        position: The strategy.
        context: Contribution of the strategy to this forward pass.
        q: Queries (B, H, Tq, δ') after `Position.transform_qk`, which may change the head dimension.
        v: Values (B, G, Tk, δ) of all keys, including keys in the cache.
        state: `Position.token_state` of the keys, (B, H, Tk, c), or None.

    Raises:
        UserError: If `Position.bias` or `Position.score_scale` does not return a row for each head.
    """
    for hook, table in (("bias", context.spec.table), ("score_scale", context.spec.score_scale)):
        if table is not None and len(table) != q.shape[1]:
            name = f"{type(position).__module__}.{type(position).__name__}.{hook}"
            expected = f"({q.shape[1]}, {table.shape[-1]}), one row per head"
            raise UserError(f"{name}: got shape {tuple(table.shape)}, expected {expected}")
    keys = context.positions[-v.shape[2] :]
    first_key = context.queries.first_key
    if first_key is not None and len(keys.rows) < len(context.positions.rows):  # the first keys have left the cache
        first_key = (first_key - keys.rows[0]).clamp(min=0)
    pairwise = not keys.contiguous and (position.uses("bias") or position.uses("score_scale"))
    modifies = pairwise or position.uses("modify_scores")
    # for keys with gaps, `Position.apply_to_scores` adds all biases, after the factor of the scores
    biases_apart = keys.contiguous or not modifies
    return replace(
        context.spec,
        scale=v.shape[-1] ** -0.5,  # the scale for δ, although `Position.transform_qk` may change the head dimension
        first_key=first_key,
        sink=position.sink_logit(q, context.queries),
        modify_scores=position.apply_to_scores if modifies else None,
        add_to_output=position.add_to_output if position.uses("add_to_output") else None,
        keys=keys,
        key_bias=position.key_bias(state) if biases_apart else None,
        query_bias=position.query_bias(q, state, context.queries) if biases_apart else None,
        value_bias=position.value_bias(),
        state=state,
    )

"""Causal multi-head attention, which calls the hooks of any positional strategy."""

from dataclasses import dataclass, field, replace
from typing import Any

from torch import Tensor, nn

from kerple.attention import AttentionOption, attend
from kerple.base.errors import UserError
from kerple.model.architecture import Architecture
from kerple.model.cache import LayerCache
from kerple.positions import AttentionWeights, Position, QueryKeyBlock, Shape, TokenPositions


@dataclass(frozen=True)
class PositionContext:
    """What a strategy contributes to one forward pass. It is computed once and used by all layers of the strategy.

    Args:
        at: Positions of all tokens, including those in the cache; the queries are the last of them.
        table: `Position.bias` at all distances, (H, T) fp32, or None.
        weight: `Position.weight` at all distances, (H, T) fp32, or None.
        window: Number of keys that a query sees, its own included; None for all.
        way: Implementation of attention, see `kerple.attention.backend`.
        masks: Masks of FlexAttention, see `kerple.attention.attend`; one dict for all strategies of a forward pass.
    """

    at: TokenPositions
    table: Tensor | None
    weight: Tensor | None
    window: int | None
    way: AttentionOption = "auto"
    masks: dict[Any, Any] = field(default_factory=dict)


class SelfAttention(nn.Module):
    """Attention with H heads of queries and G heads of keys and values; query head h uses key head h // (H / G).

    Args:
        shape: Width D and number of heads H.
        architecture: Options of the network; kv_heads is G.

    Raises:
        UserError: If G does not divide H.
    """

    def __init__(self, shape: Shape, architecture: Architecture) -> None:
        super().__init__()
        heads, kv_heads, head_dim = shape.heads, architecture.kv_heads, shape.head_dim
        kv_heads = heads if kv_heads is None else kv_heads
        if kv_heads < 1 or heads % kv_heads:
            raise UserError(f"kv_heads: got {kv_heads}, expected a divisor of the {heads} heads")
        bias, qkv_bias, eps = architecture.bias, architecture.qkv_bias, architecture.eps
        self.heads, self.kv_heads = heads, kv_heads
        self.widths = [shape.dim, kv_heads * head_dim, kv_heads * head_dim]
        self.qkv = nn.Linear(shape.dim, sum(self.widths), bias if qkv_bias is None else qkv_bias)
        self.out = nn.Linear(shape.dim, shape.dim, bias)
        self.q_norm, self.k_norm = (
            nn.RMSNorm(head_dim, eps) if architecture.qk_norm else nn.Identity() for _ in range(2)
        )

    def forward(
        self, x: Tensor, position: Position, context: PositionContext, cache: LayerCache | None = None
    ) -> Tensor:
        """(B, T, D) -> (B, T, D)."""
        q, k, v, added = self.prepare(x, position, context, cache)
        mixed = attend(q, k, v, way=context.way, masks=context.masks, **added)  # (B, H, T, δ)
        return self.out(mixed.transpose(1, 2).flatten(2))

    def split(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Split the output of ``qkv``, (B, T, D + 2·G·δ), into queries (B, H, T, δ), keys and values (B, G, T, δ)."""
        q, k, v = (
            part.unflatten(-1, (heads, -1)).transpose(1, 2)
            for part, heads in zip(x.split(self.widths, -1), (self.heads, self.kv_heads, self.kv_heads), strict=True)
        )
        return q, k, v

    def prepare(
        self, x: Tensor, position: Position, context: PositionContext, cache: LayerCache | None = None
    ) -> tuple[Tensor, Tensor, Tensor, dict[str, Any]]:
        """Arguments for `kerple.attention.attend`: q, k, v after the strategy's hooks, and its keyword arguments."""
        q, k, v = self.split(self.qkv(x))
        q, k = self.q_norm(q), self.k_norm(k)
        at, scale = context.at[-x.shape[1] :], q.shape[-1] ** -0.5
        state = position.token_state(x, at, None if cache is None else cache.state)
        q, k = position.transform_qk(q, k, state, at)
        sink = position.sink_logit(q, at)
        if cache is not None:
            k, v, state = cache.append(k, v, state)
        hooks = Hooks(position, context.at[-k.shape[2] :], state)
        added = {
            "scale": scale,
            "table": context.table,
            "weight": context.weight,
            "window": context.window,
            "sink": sink,
        }
        added["mix"] = hooks.mix if hooks.mixes else None
        added["values"] = hooks.values if position.uses("add_to_output") else None
        return q, k, v, added


@dataclass(frozen=True)
class Hooks:
    """A strategy's `mix` and `values` with the arguments that `attend` passes: slices of queries and keys.

    Args:
        position: The strategy.
        at: Positions of the keys.
        state: What the strategy remembers of the keys, (B, H, Tk, c), or None.
    """

    position: Position
    at: TokenPositions
    state: Tensor | None

    @property
    def mixes(self) -> bool:
        """Whether attention needs explicit scores: for the strategy's `mix`, or because positions have gaps."""
        apart = not self.at.contiguous and (self.position.uses("bias") or self.position.uses("weight"))
        return apart or self.position.uses("modify_scores")

    def block(self, rows: slice, columns: slice, seen: Tensor) -> QueryKeyBlock:
        """The block of the queries ``rows`` and keys ``columns``; ``seen`` (Tq, Tk) bool: the keys a query sees."""
        state = None if self.state is None else self.state[:, :, columns]
        return QueryKeyBlock(self.at[rows], self.at[columns], seen, state)

    def mix(
        self, s: Tensor, q: Tensor, k: Tensor, rows: slice, columns: slice, seen: Tensor
    ) -> Tensor | tuple[Tensor, Tensor] | AttentionWeights:
        """New scores of a block, as `Position.modify_scores` returns them."""
        position, block = self.position, self.block(rows, columns, seen)
        if not self.at.contiguous:  # else attention has applied their tables
            if position.uses("weight"):
                s = s * block.evaluate(position.weight)
            if position.uses("bias"):
                s = s + block.evaluate(position.bias)
        return position.modify_scores(s.masked_fill_(~seen, 0), q, k, block) if position.uses("modify_scores") else s

    def values(self, p: Tensor, v: Tensor, rows: slice, columns: slice, seen: Tensor) -> Tensor:
        """What is added to a block's output, as `Position.add_to_output` returns it."""
        return self.position.add_to_output(p, v, self.block(rows, columns, seen))


def prepare_context(
    position: Position, at: TokenPositions, tokens: Tensor, window: int | None, way: AttentionOption = "auto"
) -> PositionContext:
    """Compute what a strategy contributes to a forward pass.

    Args:
        position: The strategy.
        at: Positions of all tokens.
        tokens: All tokens (B, T), including those in the cache.
        window: Number of keys that a query sees; None for all.
        way: Implementation of attention.

    Raises:
        UserError: If positions differ between sequences and the strategy does not support that.
    """
    at = position.remap_positions(at, tokens)
    if at.positions.ndim == 2 and not position.per_sequence:
        raise UserError(
            f"position: {type(position).__name__} has one position for all sequences of a batch, got "
            f"{tuple(at.positions.shape)}; expected ({at.positions.shape[1]},)"
        )
    windows = [w for w in (position.window, window) if w is not None]
    at = replace(at, window=min(windows, default=None))
    if not at.contiguous:
        return PositionContext(at, None, None, at.window, way)
    distance = at.rows.float()
    return PositionContext(at, position.bias(distance), position.weight(distance), at.window, way)

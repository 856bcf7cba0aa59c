"""Causal multi-head attention, which calls the hooks of any positional strategy."""

from dataclasses import dataclass, field, replace
from typing import Any

from torch import Tensor, nn

from kerple.attention import Asked, attend
from kerple.base.errors import UserError
from kerple.model.cache import LayerCache
from kerple.positions import At, Pairs, Position, Shape, Shares


@dataclass(frozen=True)
class Told:
    """What a strategy contributes to one forward pass. It is computed once and used by all layers of the strategy.

    Args:
        at: Positions of all tokens, including those in the cache; the queries are the last of them.
        table: `Position.bias` at all distances, (H, T) fp32, or None.
        weight: `Position.weight` at all distances, (H, T) fp32, or None.
        window: Number of keys that a query sees, its own included; None for all.
        way: Implementation of attention, see `kerple.attention.choice`.
        masks: Masks of FlexAttention, see `kerple.attention.attend`; one dict for all strategies of a forward pass.
    """

    at: At
    table: Tensor | None
    weight: Tensor | None
    window: int | None
    way: Asked = "auto"
    masks: dict[Any, Any] = field(default_factory=dict)


class SelfAttention(nn.Module):
    """Attention with H heads of queries and G heads of keys and values; query head h uses key head h // (H / G).

    Args:
        shape: Width D and number of heads H.
        kv_heads: Number of key heads G, a divisor of H.
        bias: Whether the two linear layers have biases.
        qkv_bias: Whether the first of them has a bias; None for the value of ``bias``.
        qk_eps: Epsilon of RMSNorms over each head's queries and keys; None for no such norms.

    Raises:
        UserError: If G does not divide H.
    """

    def __init__(
        self, shape: Shape, kv_heads: int, bias: bool, qkv_bias: bool | None = None, qk_eps: float | None = None
    ) -> None:
        super().__init__()
        if kv_heads < 1 or shape.heads % kv_heads:
            raise UserError(f"kv_heads: got {kv_heads}, expected a divisor of the {shape.heads} heads")
        self.heads, self.kv_heads = shape.heads, kv_heads
        self.widths = [shape.dim, kv_heads * shape.head_dim, kv_heads * shape.head_dim]
        self.qkv = nn.Linear(shape.dim, sum(self.widths), bias if qkv_bias is None else qkv_bias)
        self.out = nn.Linear(shape.dim, shape.dim, bias)
        self.q_norm, self.k_norm = (
            nn.Identity() if qk_eps is None else nn.RMSNorm(shape.head_dim, qk_eps) for _ in range(2)
        )

    def forward(self, x: Tensor, position: Position, told: Told, cache: LayerCache | None = None) -> Tensor:
        """(B, T, D) -> (B, T, D)."""
        q, k, v, added = self.prepare(x, position, told, cache)
        mixed = attend(q, k, v, way=told.way, masks=told.masks, **added)  # (B, H, T, δ)
        return self.out(mixed.transpose(1, 2).flatten(2))

    def split(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Split the output of ``qkv``, (B, T, D + 2·G·δ), into queries (B, H, T, δ), keys and values (B, G, T, δ)."""
        q, k, v = (
            part.unflatten(-1, (heads, -1)).transpose(1, 2)
            for part, heads in zip(x.split(self.widths, -1), (self.heads, self.kv_heads, self.kv_heads), strict=True)
        )
        return q, k, v

    def prepare(
        self, x: Tensor, position: Position, told: Told, cache: LayerCache | None = None
    ) -> tuple[Tensor, Tensor, Tensor, dict[str, Any]]:
        """Arguments for `kerple.attention.attend`: q, k, v after the strategy's hooks, and its keyword arguments."""
        q, k, v = self.split(self.qkv(x))
        q, k = self.q_norm(q), self.k_norm(k)
        at, scale = told.at[-x.shape[1] :], q.shape[-1] ** -0.5
        memory = position.remember(x, at, None if cache is None else cache.memory)
        q, k = position.project(q, k, memory, at)
        sink = position.sink(q, at)
        if cache is not None:
            k, v, memory = cache.append(k, v, memory)
        hooks = Hooks(position, told.at[-k.shape[2] :], memory)
        added = {"scale": scale, "table": told.table, "weight": told.weight, "window": told.window, "sink": sink}
        added["mix"] = hooks.mix if hooks.mixes else None
        added["values"] = hooks.values if position.uses("values") else None
        return q, k, v, added


@dataclass(frozen=True)
class Hooks:
    """A strategy's `mix` and `values` with the arguments that `attend` passes: slices of queries and keys.

    Args:
        position: The strategy.
        at: Positions of the keys.
        memory: What the strategy remembers of the keys, (B, H, Tk, c), or None.
    """

    position: Position
    at: At
    memory: Tensor | None

    @property
    def mixes(self) -> bool:
        """Whether attention needs explicit scores: for the strategy's `mix`, or because positions have gaps."""
        apart = not self.at.contiguous and (self.position.uses("bias") or self.position.uses("weight"))
        return apart or self.position.uses("mix")

    def pairs(self, rows: slice, columns: slice, seen: Tensor) -> Pairs:
        """The block of the queries ``rows`` and keys ``columns``; ``seen`` (Tq, Tk) bool: the keys a query sees."""
        memory = None if self.memory is None else self.memory[:, :, columns]
        return Pairs(self.at[rows], self.at[columns], seen, memory)

    def mix(
        self, s: Tensor, q: Tensor, k: Tensor, rows: slice, columns: slice, seen: Tensor
    ) -> Tensor | tuple[Tensor, Tensor] | Shares:
        """New scores of a block, as `Position.mix` returns them."""
        position, pairs = self.position, self.pairs(rows, columns, seen)
        if not self.at.contiguous:  # else attention has applied their tables
            if position.uses("weight"):
                s = s * pairs.read(position.weight)
            if position.uses("bias"):
                s = s + pairs.read(position.bias)
        return position.mix(s.masked_fill_(~seen, 0), q, k, pairs) if position.uses("mix") else s

    def values(self, p: Tensor, v: Tensor, rows: slice, columns: slice, seen: Tensor) -> Tensor:
        """What is added to a block's output, as `Position.values` returns it."""
        return self.position.values(p, v, self.pairs(rows, columns, seen))


def tell(position: Position, at: At, tokens: Tensor, window: int | None, way: Asked = "auto") -> Told:
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
    at = position.relocate(at, tokens)
    if at.positions.ndim == 2 and not position.per_sequence:
        raise UserError(
            f"position: {type(position).__name__} has one position for all sequences of a batch, got "
            f"{tuple(at.positions.shape)}; expected ({at.positions.shape[1]},)"
        )
    windows = [w for w in (position.window, window) if w is not None]
    at = replace(at, window=min(windows, default=None))
    if not at.contiguous:
        return Told(at, None, None, at.window, way)
    distance = at.rows.float()
    return Told(at, position.bias(distance), position.weight(distance), at.window, way)

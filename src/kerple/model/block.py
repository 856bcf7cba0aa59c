"""One pre-LayerNorm block: attention with whatever the positional strategy asks for, then a GELU network."""

from dataclasses import dataclass
from functools import partial

from torch import Tensor, nn

from kerple.attention import Asked, attend
from kerple.model.cache import LayerCache
from kerple.positions import Position, Shape


@dataclass(frozen=True)
class Places:
    """Where the tokens of one forward stand, made once and read by every layer.

    Args:
        positions: (Tk,) int64 of every key; the queries are the last rows.
        table: `Position.bias` (H, Tk) fp32, or None.
        weight: `Position.weight` (H, Tk) fp32, or None.
        window: How many keys a query sees, itself included; None for all.
        way: Of attention, for `kerple.attention.attend`.
    """

    positions: Tensor
    table: Tensor | None
    weight: Tensor | None
    window: int | None
    way: Asked = "auto"


class SelfAttention(nn.Module):
    """Causal multi-head attention, blind to which strategy it is given."""

    def __init__(self, shape: Shape, bias: bool) -> None:
        super().__init__()
        self.heads = shape.heads
        self.qkv = nn.Linear(shape.dim, 3 * shape.dim, bias)
        self.out = nn.Linear(shape.dim, shape.dim, bias)

    def forward(self, x: Tensor, position: Position, places: Places, cache: LayerCache | None = None) -> Tensor:
        """(B, T, D) -> (B, T, D)."""
        q, k, v = self.qkv(x).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)  # each (B, H, T, δ)
        q, k = position.rotate(q, k, places.positions[-x.shape[1] :])
        content = position.content(x)
        if cache is not None:
            k, v, content = cache.append(k, v, content)
        scores = partial(_scores, position, places.positions, content) if position.uses("scores") else None
        values = partial(_values, position, places.positions) if position.uses("values") else None
        mixed = attend(
            q, k, v, table=places.table, weight=places.weight, window=places.window, scores=scores, values=values,
            way=places.way,
        )  # (B, H, T, δ)  # fmt: skip
        return self.out(mixed.transpose(1, 2).flatten(2))


def _scores(
    position: Position,
    positions: Tensor,
    content: Tensor | None,
    q: Tensor,
    k: Tensor,
    rows: slice,
    columns: slice,
) -> Tensor:
    seen = None if content is None else content[:, :, columns]
    return position.scores(q, k, positions[rows], positions[columns], seen)


def _values(position: Position, positions: Tensor, attention: Tensor, rows: slice, columns: slice) -> Tensor:
    return position.values(attention, positions[rows], positions[columns])


class Block(nn.Module):
    """x + attention(norm(x)), then x + mlp(norm(x)); the residual stream keeps its precision."""

    def __init__(
        self, shape: Shape, hidden: int, bias: bool, eps: float, activation: nn.Module, dropout: float
    ) -> None:
        super().__init__()
        self.attention_norm = nn.LayerNorm(shape.dim, eps, bias=bias)
        self.attention = SelfAttention(shape, bias)
        self.mlp_norm = nn.LayerNorm(shape.dim, eps, bias=bias)
        self.mlp = nn.Sequential(
            nn.Linear(shape.dim, hidden, bias),
            activation,
            nn.Linear(hidden, shape.dim, bias),
        )
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: Tensor, position: Position, places: Places, cache: LayerCache | None = None) -> Tensor:
        """(B, T, D) -> (B, T, D)."""
        x = x + self.dropout(self.attention(self.attention_norm(x), position, places, cache))
        return x + self.dropout(self.mlp(self.mlp_norm(x)))

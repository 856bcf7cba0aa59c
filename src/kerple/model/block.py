"""One pre-LayerNorm block: attention with whatever the positional strategy asks for, then a GELU network."""

from torch import Tensor, nn

from kerple.model.attention import SelfAttention, Told
from kerple.model.cache import LayerCache
from kerple.positions import Position, Shape


class Block(nn.Module):
    """x + attention(norm(x)), then x + mlp(norm(x)); the residual stream keeps its precision."""

    def __init__(
        self, shape: Shape, kv_heads: int, hidden: int, bias: bool, eps: float, activation: nn.Module, dropout: float
    ) -> None:
        super().__init__()
        self.attention_norm = nn.LayerNorm(shape.dim, eps, bias=bias)
        self.attention = SelfAttention(shape, kv_heads, bias)
        self.mlp_norm = nn.LayerNorm(shape.dim, eps, bias=bias)
        self.mlp = nn.Sequential(
            nn.Linear(shape.dim, hidden, bias),
            activation,
            nn.Linear(hidden, shape.dim, bias),
        )
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: Tensor, position: Position, told: Told, cache: LayerCache | None = None) -> Tensor:
        """(B, T, D) -> (B, T, D)."""
        x = x + self.dropout(self.attention(self.attention_norm(x), position, told, cache))
        return x + self.dropout(self.mlp(self.mlp_norm(x)))

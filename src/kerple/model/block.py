"""One block of the transformer: attention and a feed-forward network, each with a residual connection."""

from typing import cast

from torch import Tensor, nn

from kerple.base.bf16 import Linear
from kerple.model.architecture import ACTIVATIONS, Architecture
from kerple.model.cache import LayerCache
from kerple.model.self_attention import PositionContext, SelfAttention
from kerple.positions import Position, Shape


class GatedMLP(nn.Module):
    """down(activation(gate(x)) · up(x)), which is SwiGLU if the activation is SiLU (Shazeer 2020, arXiv 2002.05202)."""

    def __init__(self, dim: int, hidden: int, bias: bool, activation: nn.Module) -> None:
        super().__init__()
        self.gate = Linear(dim, hidden, bias)
        self.up = Linear(dim, hidden, bias)
        self.activation = activation
        self.down = Linear(hidden, dim, bias)

    def forward(self, x: Tensor) -> Tensor:
        """Apply the feed-forward network, (B, T, D) -> (B, T, D)."""
        return self.down(self.activation(self.gate(x)) * self.up(x))


class Block(nn.Module):
    """Block x ← x + attention(norm(x)), then x ← x + mlp(norm(x)). `Architecture` has options for other norms.

    With ``parallel`` the block is x + attention(norm(x)) + mlp(norm(x)) (Black et al. 2022, arXiv 2204.06745).
    """

    def __init__(self, shape: Shape, architecture: Architecture) -> None:
        super().__init__()
        dim = shape.dim
        bias = architecture.bias
        activation = ACTIVATIONS[architecture.activation]()
        hidden = 4 * dim if architecture.hidden is None else architecture.hidden
        self.attention_norm = architecture.make_block_norm(dim, "pre")
        self.attention = SelfAttention(shape, architecture)
        self.mlp_norm = architecture.make_block_norm(dim, "pre")
        self.mlp: GatedMLP | nn.Sequential
        if architecture.gated:
            self.mlp = GatedMLP(dim, hidden, bias, activation)
        else:
            self.mlp = nn.Sequential(Linear(dim, hidden, bias), activation, Linear(hidden, dim, bias))
        self.attention_out_norm = architecture.make_block_norm(dim, "post")
        self.mlp_out_norm = architecture.make_block_norm(dim, "post")
        self.parallel = architecture.parallel
        self.dropout = nn.Dropout(architecture.dropout)

    @property
    def residual_layers(self) -> tuple[nn.Linear, nn.Linear]:
        """Linear layers whose outputs are added to the residual stream."""
        down = self.mlp.down if isinstance(self.mlp, GatedMLP) else self.mlp[-1]
        return self.attention.out, cast(nn.Linear, down)

    def forward(self, x: Tensor, position: Position, context: PositionContext, cache: LayerCache | None) -> Tensor:
        """Apply the block, (B, T, D) -> (B, T, D)."""
        attention_out = self.attention_out_norm(self.attention(self.attention_norm(x), position, context, cache))
        residual = x + self.dropout(attention_out)
        mlp_out = self.mlp_out_norm(self.mlp(self.mlp_norm(x if self.parallel else residual)))
        return residual + self.dropout(mlp_out)

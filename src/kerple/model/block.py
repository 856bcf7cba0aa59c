"""One block of the transformer: attention and a feed-forward network, each with a residual connection."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal, cast

from torch import Tensor, nn

from kerple.base.errors import UserError
from kerple.model.cache import LayerCache
from kerple.model.self_attention import PositionContext, SelfAttention
from kerple.positions import Position, Shape

ACTIVATIONS: dict[str, Callable[[], nn.Module]] = {
    "gelu": nn.GELU,
    "gelu_tanh": lambda: nn.GELU("tanh"),
    "relu": nn.ReLU,
    "silu": nn.SiLU,
}
NORMS = ("layer", "rms")


@dataclass(frozen=True)
class Design:
    """The design of a block, the same in every layer. `Transformer` explains the options.

    Raises:
        UserError: If one is unknown or out of range.
    """

    kv_heads: int
    hidden: int
    bias: bool = True
    qkv_bias: bool | None = None
    norm: Literal["layer", "rms"] = "layer"
    eps: float = 1e-5
    activation: Literal["gelu", "gelu_tanh", "relu", "silu"] = "gelu"
    gated: bool = False
    parallel: bool = False
    dropout: float = 0.0
    qk_norm: bool = False

    def __post_init__(self) -> None:
        if self.hidden < 1:
            raise UserError(f"hidden: got {self.hidden}, expected a positive width")
        if not 0 <= self.dropout < 1:
            raise UserError(f"dropout: got {self.dropout}, expected a probability in [0, 1)")
        if self.activation not in ACTIVATIONS:
            raise UserError(f"activation: got {self.activation!r}, expected one of {', '.join(ACTIVATIONS)}")
        if self.norm not in NORMS:
            raise UserError(f"norm: got {self.norm!r}, expected one of {', '.join(NORMS)}")

    def make_norm(self, dim: int) -> nn.Module:
        """LayerNorm, or RMSNorm (Zhang & Sennrich 2019, arXiv 1910.07467), over the last ``dim`` numbers."""
        return nn.RMSNorm(dim, self.eps) if self.norm == "rms" else nn.LayerNorm(dim, self.eps, bias=self.bias)


class Gated(nn.Module):
    """down(activation(gate(x)) · up(x)): SwiGLU, if the activation is SiLU (Shazeer 2020, arXiv 2002.05202)."""

    def __init__(self, dim: int, design: Design) -> None:
        super().__init__()
        self.gate = nn.Linear(dim, design.hidden, design.bias)
        self.up = nn.Linear(dim, design.hidden, design.bias)
        self.activation = ACTIVATIONS[design.activation]()
        self.down = nn.Linear(design.hidden, dim, design.bias)

    def forward(self, x: Tensor) -> Tensor:
        """(B, T, D) -> (B, T, D)."""
        return self.down(self.activation(self.gate(x)) * self.up(x))


class Block(nn.Module):
    """x + attention(norm(x)), followed by x + mlp(norm(x)).

    With ``parallel``, both have the same input x and are added to it together (Black et al. 2022, arXiv 2204.06745).
    """

    def __init__(self, shape: Shape, design: Design) -> None:
        super().__init__()
        self.attention_norm = design.make_norm(shape.dim)
        qk_eps = design.eps if design.qk_norm else None
        self.attention = SelfAttention(shape, design.kv_heads, design.bias, design.qkv_bias, qk_eps)
        self.mlp_norm = design.make_norm(shape.dim)
        self.mlp: Gated | nn.Sequential
        if design.gated:
            self.mlp = Gated(shape.dim, design)
        else:
            self.mlp = nn.Sequential(
                nn.Linear(shape.dim, design.hidden, design.bias),
                ACTIVATIONS[design.activation](),
                nn.Linear(design.hidden, shape.dim, design.bias),
            )
        self.parallel = design.parallel
        self.dropout = nn.Dropout(design.dropout)

    @property
    def into_residual(self) -> tuple[nn.Linear, nn.Linear]:
        """The layers that write into the residual stream."""
        down = self.mlp.down if isinstance(self.mlp, Gated) else self.mlp[-1]
        return self.attention.out, cast(nn.Linear, down)

    def forward(
        self, x: Tensor, position: Position, context: PositionContext, cache: LayerCache | None = None
    ) -> Tensor:
        """(B, T, D) -> (B, T, D)."""
        attended = self.dropout(self.attention(self.attention_norm(x), position, context, cache))
        if self.parallel:
            return x + attended + self.dropout(self.mlp(self.mlp_norm(x)))
        x = x + attended
        return x + self.dropout(self.mlp(self.mlp_norm(x)))

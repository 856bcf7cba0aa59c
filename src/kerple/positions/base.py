"""`Position`, the base class of all positional strategies, and `Shape`, from which they are built.

B batch, T length, H query heads, G key heads (a divisor of H), δ head dimension, D = H·δ width; d = m - n >= 0 is the
distance from query m back to key n. A strategy overrides the hooks it uses and nothing else; the model asks
`uses(hook)` and stays blind to the rest.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeVar

from torch import Tensor

from kerple.base.errors import UserError
from kerple.positions.constrained import Constrained
from kerple.positions.token_positions import AttentionWeights, QueryKeyBlock, TokenPositions

F = TypeVar("F", bound=Callable)


@dataclass(frozen=True)
class Shape:
    """What the model hands to every strategy.

    Args:
        dim: Width D of the residual stream.
        heads: Query heads H; must divide ``dim``.
        length: Training length in tokens.
        layer: Which layer the strategy is for, 0 for the first, and for one that all layers share.
        layers: How many layers there are.
        max_positions: Positions in training are below this; None for the training length. It sizes a learned table.

    Raises:
        UserError: If a number is not positive, the heads do not divide the width or there is no such layer.
    """

    dim: int
    heads: int
    length: int
    layer: int = 0
    layers: int = 1
    max_positions: int | None = None

    def __post_init__(self) -> None:
        for name in ("dim", "heads", "length", "layers"):
            if getattr(self, name) < 1:
                raise UserError(f"{name}: got {getattr(self, name)}, expected a positive number")
        if self.dim % self.heads:
            raise UserError(f"heads: got {self.heads}, which does not divide dim {self.dim}; choose a divisor of dim")
        if not 0 <= self.layer < self.layers:
            raise UserError(f"layer: got {self.layer}, expected 0 to {self.layers - 1}")

    @property
    def positions(self) -> int:
        """Number of positions that training may use."""
        return self.length if self.max_positions is None else self.max_positions

    @property
    def head_dim(self) -> int:
        """Dimension δ of one head."""
        return self.dim // self.heads


def hook(function: F) -> F:
    """Mark what a strategy may override: `HOOKS` lists it, and a `Wrapper` forwards it."""
    function.is_hook = True  # type: ignore[attr-defined]
    return function


class Position(Constrained, ABC):
    """A positional strategy: how a transformer learns where its tokens stand.

    A subclass takes ``Shape`` as its one positional argument and its own options after it. Every hook is optional.
    Positions are int64, biases and angles fp32, whatever the precision of the weights or of autocast: a strategy's own
    parameters stay in fp32 too (`Constrained`), and it multiplies matrices by `products.product`. Its docstring has a
    line ``Parameters: `formula```, which the tests hold it to; the formula may use D, H, δ, L (training length) and
    the strategy's options.

    `bias`, `transform_qk`, `sink_logit` and `token_state` cost next to nothing. With `weight`, `modify_scores` or
    `add_to_output`, attention computes its scores explicitly, in blocks of queries.
    """

    shift_invariant: bool | None = False
    """Whether the logits stay the same when every position is shifted by one `offset`; None: that depends."""

    prefix_consistent: bool = True
    """Whether the logits of a prefix are the prefix of the logits; not where the input's length changes angles."""

    per_layer: bool = False
    """Whether the model builds one instance per layer, or one for all; the model's option of this name goes first."""

    differs: bool = False
    """Whether the strategies of its layers are different ones, so that one for all layers is refused."""

    window: int | None = None
    """Keys that a query sees in this strategy's layers, its own included, unless the caller's window is smaller."""

    max_length: int | None = None
    """First position that cannot be represented; None where there is no such bound."""

    @abstractmethod  # keeps the class abstract: jsonargparse would accept a concrete base as a strategy
    def __init__(self) -> None:
        super().__init__()

    def uses(self, hook: str) -> bool:
        """Whether this strategy overrides ``hook``; may differ between training and evaluation, so ask each time."""
        return getattr(type(self), hook) is not getattr(Position, hook)

    def require(self, ok: bool, option: str, value: object, expected: str) -> None:
        """Raise a UserError in the strategy's name unless ``ok``, which says whether an option's value is allowed."""
        if not ok:
            raise UserError(f"{type(self).__name__}: {option}: got {value}, expected {expected}")

    # once a forward

    @hook
    def remap_positions(self, at: TokenPositions, tokens: Tensor) -> TokenPositions:
        """Where the tokens (B, T) int64 stand instead, a causal function of them; those in a cache are among them."""
        return at

    @hook
    def embed(self, x: Tensor, at: TokenPositions) -> Tensor:
        """Token embeddings x (B, T, D) with their positions worked in; (B, T, D). Asked of the first layer's alone."""
        return x

    # functions of distance and head, or of one token

    @hook
    def bias(self, distance: Tensor) -> Tensor | None:
        """What is added to a scaled score at these distances (N,) fp32; (H, N) fp32."""
        return None

    @hook
    def weight(self, distance: Tensor) -> Tensor | None:
        """What a scaled score is multiplied by at these distances (N,) fp32, before the bias is added; (H, N) fp32."""
        return None

    @hook
    def transform_qk(self, q: Tensor, k: Tensor, state: Tensor | None, at: TokenPositions) -> tuple[Tensor, Tensor]:
        """Queries (B, H, T, δ) and keys (B, G, T, δ) with their own positions worked in, in their dtype.

        Their last dimension may change, for both alike; the scale of the scores stays 1/√δ. ``state`` is what
        `token_state` made of these tokens.
        """
        return q, k

    @hook
    def sink_logit(self, q: Tensor, at: TokenPositions) -> Tensor | None:
        """A logit beside those of the keys that has no value, for projected q; (H,) or (B, H, T) fp32, finite."""
        return None

    # what earlier tokens were, and functions of pairs of tokens

    @hook
    def token_state(self, x: Tensor, at: TokenPositions, past: Tensor | None) -> Tensor | None:
        """Numbers per token that other hooks need, kept with the cached keys.

        Args:
            x: (B, T, D), the new tokens as the queries are made of them, after the block's norm.
            at: Where they stand.
            past: What is remembered of the tokens before them, (B, H, ·, c), or None.

        Returns:
            (B, H, T, c) of the new tokens, fp32 or better, or None.
        """
        return None

    @hook
    def modify_scores(
        self, s: Tensor, q: Tensor, k: Tensor, block: QueryKeyBlock
    ) -> Tensor | tuple[Tensor, Tensor] | AttentionWeights:
        """New scores of a block of queries, from those that weight and bias have been worked into.

        Args:
            s: (B, H, Tq, Tk) fp32, scaled, 0 where `QueryKeyBlock.seen` is false.
            q: (B, H, Tq, δ'), projected.
            k: (B, H, Tk, δ'), projected, each repeated for the query heads it serves.
            block: Where they stand, which keys are seen, what is remembered of them.

        Returns:
            (B, H, Tq, Tk) fp32, finite; what is not seen does not count. Or that and a sink (B, H, Tq) fp32.
            Or `AttentionWeights`: probabilities that need no softmax.
        """
        raise AssertionError(f"{type(self).__name__} has no modify_scores; ask uses('modify_scores') first")

    @hook
    def add_to_output(self, p: Tensor, v: Tensor, block: QueryKeyBlock) -> Tensor:
        """What is added to the output: (B, H, Tq, δ) fp32 of probabilities (B, H, Tq, Tk) and values (B, H, Tk, δ)."""
        raise AssertionError(f"{type(self).__name__} has no add_to_output; ask uses('add_to_output') first")


HOOKS = tuple(name for name, value in vars(Position).items() if getattr(value, "is_hook", False))
"""Names of everything a strategy may override beside `clamp_`."""


def is_distance_bias(position: Position) -> bool:
    """Whether a strategy is a bias by distance, the same in all layers, and nothing else."""
    hooks = [hook for hook in HOOKS if position.uses(hook)]
    return hooks == ["bias"] and position.window is None and not position.differs


FLAGS = tuple(Position.__annotations__)
"""Names of what a strategy declares of itself."""

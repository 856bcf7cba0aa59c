"""`Position`, the base class of all positional strategies, and `Shape`, their argument.

Letters in shapes: B is the batch size and T the number of tokens. H is the number of query heads, and G the number of
key heads, a divisor of H. δ is the head dimension, and D the width of the model, usually H·δ. d = m - n >= 0 is the
distance from query m back to key n. A strategy overrides the hooks that it needs. The default hooks change nothing.
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
    """Sizes of a model, the first argument of every strategy.

    Args:
        dim: Width D of the residual stream.
        heads: Number of query heads H; must divide ``dim``.
        length: Training length in tokens.
        layer: Index of the strategy's layer; 0 if all layers share the strategy.
        layers: Number of layers.
        max_positions: Upper bound of the positions in training, which sizes learned tables; None for the training
            length.
        head_width: Head dimension δ; None for D / H.

    Raises:
        UserError: If a number is not positive, the heads do not divide the width or there is no such layer.
    """

    dim: int
    heads: int
    length: int
    layer: int = 0
    layers: int = 1
    max_positions: int | None = None
    head_width: int | None = None

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
        """Number of possible positions in training."""
        return self.length if self.max_positions is None else self.max_positions

    @property
    def head_dim(self) -> int:
        """Head dimension δ."""
        return self.head_width or self.dim // self.heads


def hook(function: F) -> F:
    """Mark a method that a strategy may override: `HOOKS` lists it, and a `Wrapper` forwards it."""
    function.is_hook = True  # type: ignore[attr-defined]
    return function


class Position(Constrained, ABC):
    """Positional strategy, which gives a transformer information about the positions of its tokens.

    A subclass takes ``Shape`` as its only positional argument, followed by its options. Every hook is optional.
    Positions are int64. Biases, angles and parameters of strategies stay in fp32 for any precision of the weights or
    autocast (`Constrained`). Strategies multiply matrices with `products.product`. The docstring of a strategy has a
    line ``Parameters: `formula```, which the tests compare with the number of parameters. The formula may use D, H, δ,
    L (training length) and the options of the strategy.

    `bias`, `transform_qk`, `sink_logit`, `transform_output` and `token_state` keep fused attention. With `score_scale`,
    `modify_scores` or `add_to_output`, attention computes explicit scores in blocks of queries.
    """

    shift_invariant: bool | None = False
    """Whether the logits stay the same if an offset is added to all positions; None if only for some offsets."""

    prefix_consistent: bool = True
    """Whether the logits of a prefix are the prefix of the logits; False if they depend on the input's length."""

    per_layer: bool = False
    """Whether the model builds one instance per layer instead of one for all layers.

    The model's option of the same name overrides it."""

    varies_by_layer: bool = False
    """Whether layers differ in their strategy. One instance for all layers is then an error."""

    window: int | None = None
    """Number of keys that a query sees in layers with this strategy, including its own key; None for all.

    A smaller window of the caller takes precedence."""

    neighbor_window: int | None = None
    """Number of last keys whose scores use the first halves of queries and keys from `transform_qk`. Scores of earlier
    keys use the second halves. None if queries and keys have no halves."""

    test_only: bool = False
    """Whether the strategy only tests weights that were trained with another strategy. `fit` refuses it."""

    max_length: int | None = None
    """The smallest position that the strategy cannot represent; None if there is no limit."""

    @abstractmethod  # keeps the class abstract: jsonargparse would accept a concrete base as a strategy
    def __init__(self) -> None:
        super().__init__()

    def uses(self, hook: str) -> bool:
        """Whether this strategy overrides ``hook``. The result may differ between training and evaluation."""
        return getattr(type(self), hook) is not getattr(Position, hook)

    def require(self, ok: bool, option: str, value: object, expected: str) -> None:
        """Raise a UserError for an option of this strategy unless ``ok``."""
        if not ok:
            raise UserError(f"{type(self).__name__}: {option}: got {value}, expected {expected}")

    # called once per forward pass

    @hook
    def remap_positions(self, positions: TokenPositions, tokens: Tensor) -> TokenPositions:
        """Return new positions for the tokens (B, T) int64, including the tokens in a cache.

        The position of a token must not depend on later tokens.
        """
        return positions

    @hook
    def embed(self, x: Tensor, positions: TokenPositions) -> Tensor:
        """Add positions to the token embeddings, (B, T, D) -> (B, T, D). Called for the strategy of the first layer."""
        return x

    # functions of distance and head, or of one token

    @hook
    def bias(self, distance: Tensor) -> Tensor | None:
        """Return the attention bias at these distances, (N,) fp32 -> (H, N) fp32, added to the scaled scores."""
        return None

    @hook
    def score_scale(self, distance: Tensor) -> Tensor | None:
        """Return the factor of the scaled scores at these distances, (N,) fp32 -> (H, N) fp32.

        The bias is added after the multiplication. The factor may be a function of parameters, but not a parameter.
        """
        return None

    @hook
    def transform_qk(
        self, q: Tensor, k: Tensor, state: Tensor | None, positions: TokenPositions
    ) -> tuple[Tensor, Tensor]:
        """Apply positions to queries (B, H, T, δ) and keys (B, G, T, δ); the result has their dtype.

        The last dimension may change if it stays equal for both. The scale of the scores stays 1/√δ. ``state`` is the
        result of `token_state` for these tokens.
        """
        return q, k

    @hook
    def sink_logit(self, q: Tensor, positions: TokenPositions) -> Tensor | None:
        """Return an additional logit for the softmax, without a value vector: (H,) or (B, H, T) fp32, finite.

        ``q`` are the queries after `transform_qk`.
        """
        return None

    @hook
    def transform_output(self, out: Tensor, x: Tensor) -> Tensor:
        """Change the output of attention (B, H, T, δ) before the heads are joined; the result has its shape and dtype.

        ``x`` (B, T, D) are the tokens after the block's norm, from which queries and keys are projected.
        """
        return out

    # functions of earlier tokens, and of pairs of tokens

    @hook
    def token_state(self, x: Tensor, positions: TokenPositions, past: Tensor | None) -> Tensor | None:
        """Compute a state for each token that other hooks need. The cache stores it with the keys.

        Args:
            x: (B, T, D), the new tokens after the block's norm, from which queries and keys are projected.
            positions: Positions of the new tokens.
            past: The state of earlier tokens, (B, H, ·, c), or None.

        Returns:
            The state of the new tokens, (B, H, T, c) fp32 or better, or None.
        """
        return None

    @hook
    def modify_scores(
        self, s: Tensor, q: Tensor, k: Tensor, block: QueryKeyBlock
    ) -> Tensor | tuple[Tensor, Tensor] | AttentionWeights:
        """Compute new scores of a block of queries from the scores after `score_scale` and `bias`.

        Args:
            s: Scaled scores, (B, H, Tq, Tk) fp32, 0 where `QueryKeyBlock.seen` is false.
            q: Queries after `transform_qk`, (B, H, Tq, δ').
            k: Keys after `transform_qk`, (B, H, Tk, δ'), repeated for all query heads.
            block: Positions of queries and keys, which keys are seen, and the state of the keys.

        Returns:
            One of three results. Scores (B, H, Tq, Tk) fp32, finite; scores of unseen keys are ignored. A tuple of
            scores and a sink (B, H, Tq) fp32. `AttentionWeights`, which are probabilities without a softmax.
        """
        raise AssertionError(f"{type(self).__name__} does not override modify_scores")

    @hook
    def add_to_output(self, p: Tensor, v: Tensor, block: QueryKeyBlock) -> Tensor:
        """Return a term (B, H, Tq, δ) fp32 that is added to the output.

        ``p`` are the probabilities (B, H, Tq, Tk), and ``v`` the values (B, H, Tk, δ).
        """
        raise AssertionError(f"{type(self).__name__} does not override add_to_output")


HOOKS = tuple(name for name, value in vars(Position).items() if getattr(value, "is_hook", False))
"""Names of all hooks."""


def is_distance_bias(position: Position) -> bool:
    """Whether a strategy is only an attention bias by distance, equal in all layers."""
    hooks = [hook for hook in HOOKS if position.uses(hook)]
    return hooks == ["bias"] and position.window is None and not position.varies_by_layer


FLAGS = tuple(Position.__annotations__)
"""Names of the attributes that describe a strategy."""

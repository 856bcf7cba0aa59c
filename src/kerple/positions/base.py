"""`Position`, the base class of all positional strategies, and `Shape`, from which they are built.

Shapes are written with these letters: B is the batch size, T the number of tokens, H the number of query heads, G that
of key heads (a divisor of H), δ the dimension of a head, and D the width of the model, usually H·δ. d = m - n >= 0 is
the distance from query m back to key n. A strategy overrides the hooks that it needs; the others change nothing.
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
    """The sizes of a model, from which every strategy is built.

    Args:
        dim: Width D of the residual stream.
        heads: Number of query heads H; must divide ``dim``.
        length: Training length in tokens.
        layer: Number of the layer that the strategy is for, from 0; 0 also for a strategy that all layers share.
        layers: Number of layers.
        max_positions: Positions in training are below this number; None for the training length. It sizes a learned
            table.
        head_width: Dimension δ of one head; None for D / H.

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
        """Number of positions that training may use."""
        return self.length if self.max_positions is None else self.max_positions

    @property
    def head_dim(self) -> int:
        """Dimension δ of one head."""
        return self.head_width or self.dim // self.heads


def hook(function: F) -> F:
    """Mark a method that a strategy may override: `HOOKS` lists it, and a `Wrapper` forwards it."""
    function.is_hook = True  # type: ignore[attr-defined]
    return function


class Position(Constrained, ABC):
    """A positional strategy: how a transformer learns where its tokens stand.

    A subclass takes ``Shape`` as its one positional argument and its own options after it. Every hook is optional.
    Positions are int64, biases and angles fp32, whatever the precision of the weights or of autocast: a strategy's own
    parameters stay in fp32 too (`Constrained`), and it multiplies matrices by `products.product`. Its docstring has a
    line ``Parameters: `formula```, which the tests hold it to; the formula may use D, H, δ, L (training length) and
    the strategy's options.

    `bias`, `transform_qk`, `sink_logit`, `transform_output` and `token_state` cost next to nothing. With `score_scale`,
    `modify_scores` or `add_to_output`, attention computes its scores explicitly, in blocks of queries.
    """

    shift_invariant: bool | None = False
    """Whether the logits stay the same when every position is shifted by one offset; None if that depends."""

    prefix_consistent: bool = True
    """Whether the logits of a prefix are the prefix of the logits; False where the length of the input changes them."""

    per_layer: bool = False
    """Whether the model builds one instance per layer or one for all; the model's option of this name overrides it."""

    varies_by_layer: bool = False
    """Whether layers differ in their strategy, so that one instance for all layers is refused."""

    window: int | None = None
    """Number of keys that a query sees in this strategy's layers, its own included; None for all.

    A smaller window of the caller takes precedence."""

    neighbor_window: int | None = None
    """Number of last keys that meet the first halves of queries and keys of `transform_qk`; all earlier keys meet the
    second halves. None if queries and keys are whole."""

    test_only: bool = False
    """Whether it serves only tests of weights that were trained with another strategy, so that `fit` refuses it."""

    max_length: int | None = None
    """The first position that the strategy cannot represent; None where there is no such bound."""

    @abstractmethod  # keeps the class abstract: jsonargparse would accept a concrete base as a strategy
    def __init__(self) -> None:
        super().__init__()

    def uses(self, hook: str) -> bool:
        """Whether this strategy overrides ``hook``; a subclass may answer differently in training and evaluation."""
        return getattr(type(self), hook) is not getattr(Position, hook)

    def require(self, ok: bool, option: str, value: object, expected: str) -> None:
        """Raise a UserError in the strategy's name unless ``ok``, which says whether an option's value is allowed."""
        if not ok:
            raise UserError(f"{type(self).__name__}: {option}: got {value}, expected {expected}")

    # called once in a forward pass

    @hook
    def remap_positions(self, positions: TokenPositions, tokens: Tensor) -> TokenPositions:
        """Return other positions for the tokens (B, T) int64, which include those in a cache.

        The position of a token may depend on the tokens up to it, not on later ones.
        """
        return positions

    @hook
    def embed(self, x: Tensor, positions: TokenPositions) -> Tensor:
        """Work positions into the token embeddings x, (B, T, D) -> (B, T, D); called for the first layer's strategy."""
        return x

    # functions of distance and head, or of one token

    @hook
    def bias(self, distance: Tensor) -> Tensor | None:
        """Return what is added to a scaled score at these distances, (N,) fp32 -> (H, N) fp32."""
        return None

    @hook
    def score_scale(self, distance: Tensor) -> Tensor | None:
        """Return the factor of a scaled score at these distances, before the bias is added, (N,) -> (H, N) fp32.

        It is no parameter, but may be computed from some.
        """
        return None

    @hook
    def transform_qk(
        self, q: Tensor, k: Tensor, state: Tensor | None, positions: TokenPositions
    ) -> tuple[Tensor, Tensor]:
        """Work positions into queries (B, H, T, δ) and keys (B, G, T, δ); the result has their dtype.

        Their last dimension may change, for both alike; the scale of the scores stays 1/√δ. ``state`` is what
        `token_state` returned for these tokens.
        """
        return q, k

    @hook
    def sink_logit(self, q: Tensor, positions: TokenPositions) -> Tensor | None:
        """Return one more logit for the softmax, without a value vector: (H,) or (B, H, T) fp32, finite.

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
        """Compute numbers for each token that other hooks need; the cache keeps them beside the keys.

        Args:
            x: (B, T, D), the new tokens after the block's norm, from which queries and keys are projected.
            positions: Positions of the new tokens.
            past: The state of the tokens before them, (B, H, ·, c), or None.

        Returns:
            The state of the new tokens, (B, H, T, c) fp32 or better, or None.
        """
        return None

    @hook
    def modify_scores(
        self, s: Tensor, q: Tensor, k: Tensor, block: QueryKeyBlock
    ) -> Tensor | tuple[Tensor, Tensor] | AttentionWeights:
        """Compute new scores of a block of queries, from scores to which score scale and bias were applied already.

        Args:
            s: Scaled scores, (B, H, Tq, Tk) fp32, 0 where `QueryKeyBlock.seen` is false.
            q: Queries after `transform_qk`, (B, H, Tq, δ').
            k: Keys after `transform_qk`, (B, H, Tk, δ'), each repeated for the query heads that it serves.
            block: Positions of queries and keys, which keys are seen, and the state of the keys.

        Returns:
            Scores (B, H, Tq, Tk) fp32, finite; those of keys that are not seen do not count. Or these and a sink
            (B, H, Tq) fp32. Or `AttentionWeights`, which are probabilities without a softmax.
        """
        raise AssertionError(f"{type(self).__name__} does not override modify_scores")

    @hook
    def add_to_output(self, p: Tensor, v: Tensor, block: QueryKeyBlock) -> Tensor:
        """Return what is added to the output, (B, H, Tq, δ) fp32.

        ``p`` are the probabilities (B, H, Tq, Tk), and ``v`` the values (B, H, Tk, δ).
        """
        raise AssertionError(f"{type(self).__name__} does not override add_to_output")


HOOKS = tuple(name for name, value in vars(Position).items() if getattr(value, "is_hook", False))
"""Names of all hooks."""


def is_distance_bias(position: Position) -> bool:
    """Whether a strategy is a bias by distance, the same in all layers, and nothing else."""
    hooks = [hook for hook in HOOKS if position.uses(hook)]
    return hooks == ["bias"] and position.window is None and not position.varies_by_layer


FLAGS = tuple(Position.__annotations__)
"""Names of the attributes by which a strategy describes itself."""

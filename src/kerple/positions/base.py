"""`Position`, the base class of all positional strategies, and `Shape`, their argument.

A *hook* is a method that the model calls in a forward pass. A strategy overrides the hooks that it needs.

Letters in shapes: B is the batch size and T the number of tokens. H is the number of query heads, and G the number of
key heads, a divisor of H. δ is the head dimension, and D the width of the model, usually H·δ. Tq is the number of
queries, Tk the number of keys, N a number of distances, and c the width of a strategy's state. δ' is the last dimension
of queries and keys after `transform_qk`. d = m - n >= 0 is the distance from query m back to key n. Inner parentheses
mark an optional dimension: ((B,) T) is (T,), or (B, T) if positions differ between sequences.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from inspect import isfunction
from typing import get_args

from torch import Tensor

from kerple.base.errors import require
from kerple.positions.constrained_parameters import Constrained
from kerple.positions.token_positions import (
    ModifiedScores,
    QueriesAndKeys,
    QueryKeyBlock,
    TokenPositions,
    add_key_bias,
    add_query_bias,
)


@dataclass(frozen=True)
class Shape:
    """Sizes of a model, the first argument of every strategy.

    Args:
        dim: Width D of the residual stream.
        heads: Number of query heads H; must divide ``dim``.
        length: Training length in tokens.
        layer: Index of the strategy's layer; 0 if all layers share the strategy.
        layers: Number of layers.
        max_positions: Number of possible positions in training, from which strategies compute the sizes of learned
            tables. It is larger than ``length`` if positions have gaps (`RandomizedPositions`); None for ``length``.
        head_width: Head dimension δ; None for D / H.

    Raises:
        UserError: If ``dim``, ``heads``, ``length`` or ``layers`` is not positive, ``heads`` does not divide ``dim``,
            or ``layer`` is not in 0..layers-1.
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
            require(getattr(self, name) >= 1, name, getattr(self, name), "a positive number")
        require(self.dim % self.heads == 0, "heads", self.heads, f"a divisor of dim, which is {self.dim}")
        require(0 <= self.layer < self.layers, "layer", self.layer, f"0 to {self.layers - 1}")

    @property
    def positions(self) -> int:
        """Number of possible positions in training: ``max_positions``, or ``length``."""
        return self.length if self.max_positions is None else self.max_positions

    @property
    def head_dim(self) -> int:
        """Head dimension δ."""
        return self.head_width or self.dim // self.heads


class Position(Constrained, ABC):
    """Positional strategy, which gives a transformer information about the positions of its tokens.

    The first argument of a subclass is a `Shape`; its other arguments are the options of the strategy. Positions are
    int64. Biases, angles and parameters are fp32 or fp64, even if other weights or autocast are bf16 (`Constrained`).
    Strategies multiply matrices by calling `kerple.positions.fp32_matmul.product`. The docstring of a strategy has
    a line ``Parameters: `formula```, which the tests compare with the number of parameters. The formula may use D,
    H, δ, L (training length) and the options of the strategy.

    Fused attention stores no scores. It supports all hooks except `modify_scores`, `add_to_output`, and, for positions
    with gaps, `bias` and `score_scale`; on a GPU also except `key_bias` and `score_scale`. With these hooks the scores
    of one block of queries at a time are stored as a tensor (*explicit scores*), which is slower. With `query_bias` and
    `value_bias` this is done for near keys.
    """

    shift_invariant: bool | None = False
    """Whether the logits stay the same if an offset is added to all positions; None if only for some offsets."""

    prefix_consistent: bool = True
    """Whether the logits at a token stay the same when more tokens follow.

    False if they depend on the length of the input. Generation then uses no cache."""

    per_layer: bool = False
    """Whether each layer has its own instance of the strategy, instead of one instance for all layers.

    The model's option ``per_layer`` takes precedence."""

    varies_by_layer: bool = False
    """Whether layers have different strategies, as in `LayerPattern`.

    A model whose option ``per_layer`` is false then raises a UserError."""

    window: int | None = None
    """Number of keys that a query sees in layers with this strategy, including its own key; None for all.

    A smaller window of the forward pass takes precedence (`Visibility.narrow`)."""

    neighbor_window: int | None = None
    """Number of last keys, including the query's own, whose scores use only the first δ'/2 dimensions of queries and
    keys. Scores of earlier keys use only the other δ'/2 dimensions. None if the dimensions are not divided."""

    test_only: bool = False
    """Whether the strategy is only for tests of weights that were trained with another strategy. `fit` refuses it."""

    max_length: int | None = None
    """Number of positions that the strategy can represent, 0 to max_length - 1; None if there is no limit."""

    @abstractmethod  # keeps the class abstract: jsonargparse would accept a concrete base as a strategy
    def __init__(self) -> None:
        super().__init__()

    def uses(self, hook: str) -> bool:
        """Whether this strategy overrides the hook of this name."""
        return getattr(type(self), hook) is not getattr(Position, hook)

    def require(self, valid: bool, option: str, value: object, expected: str) -> None:
        """Call `kerple.base.errors.require` for an option of this strategy; the error names the strategy."""
        require(valid, f"{type(self).__name__}: {option}", value, expected)

    def require_name(self, option: str, value: object, names: object) -> None:
        """Raise a UserError unless the value of an option is in ``names``, a `Literal`."""
        self.require(value in get_args(names), option, value, f"one of {', '.join(get_args(names))}")

    def apply_to_scores(self, s: Tensor, q: Tensor, k: Tensor, block: QueryKeyBlock) -> ModifiedScores:
        """Apply `modify_scores` to the scores of a block; for positions with gaps, apply first all biases and
        `score_scale`.

        Arguments and result are those of `modify_scores`, but ``s`` may be overwritten.
        """
        if not block.keys.contiguous:  # for contiguous keys, attention has applied these hooks
            if self.uses("score_scale"):
                s = s * block.evaluate(self.score_scale)
            if self.uses("bias"):
                s = s + block.evaluate(self.bias)
            s = self.add_token_biases(s, q, block)
        return self.modify_scores(s.masked_fill_(~block.seen, 0), q, k, block) if self.uses("modify_scores") else s

    def add_token_biases(self, s: Tensor, q: Tensor, block: QueryKeyBlock) -> Tensor:
        """Add `key_bias` and `query_bias` to the scores of a block; the arguments are those of `modify_scores`."""
        if (key_bias := self.key_bias(block.state)) is not None:
            s = add_key_bias(s, key_bias)
        if (query_bias := self.query_bias(q, block.state, block.queries)) is not None:
            s = add_query_bias(s, *query_bias, block)
        return s

    # called once per forward pass

    def remap_positions(self, positions: TokenPositions, tokens: Tensor) -> TokenPositions:
        """Return the positions that the strategy uses, instead of ``positions``.

        The tokens (B, T) int64 include those in a cache. The position of a token must not depend on later tokens. It
        may depend on their number if ``prefix_consistent`` is False.
        """
        return positions

    def embed(self, x: Tensor, positions: TokenPositions) -> Tensor:
        """Add positions to token embeddings, (B, T, D) -> (B, T, D).

        The model calls it only for the strategy of the first layer.
        """
        return x

    # functions of distance and head, or of one token

    def bias(self, distance: Tensor) -> Tensor | None:
        """Return the attention bias at these distances, (N,) fp32 -> (H, N) fp32, added to the scaled scores."""
        return None

    def score_scale(self, distance: Tensor) -> Tensor | None:
        """Return the factor of the scaled scores at these distances, (N,) fp32 -> (H, N) fp32.

        The bias is added after the multiplication.
        """
        return None

    def transform_qk(self, q: Tensor, k: Tensor, state: Tensor | None, positions: TokenPositions) -> QueriesAndKeys:
        """Return queries (B, H, T, δ) and keys (B, G, T, δ) changed by their positions, in the same dtype.

        The results may have a larger last dimension, equal for queries and keys. The scale of the scores stays 1/√δ.
        ``state`` is the result of `token_state` for these tokens.
        """
        return q, k

    def sink_logit(self, q: Tensor, positions: TokenPositions) -> Tensor | None:
        """Return a finite logit that joins the softmax without a value vector, (H,) or (B, H, T) fp32.

        ``q`` are the queries after `transform_qk`.
        """
        return None

    def transform_output(self, out: Tensor, x: Tensor) -> Tensor:
        """Return the changed output of attention (B, H, T, δ) before the heads are joined, in its shape and dtype.

        ``x`` (B, T, D) are the hidden states after the block's norm, from which queries and keys are projected.
        """
        return out

    # functions of earlier tokens, and of pairs of tokens

    def token_state(self, x: Tensor, positions: TokenPositions, past: Tensor | None) -> Tensor | None:
        """Return a state for each token, which later hooks of the layer receive. The cache stores it with the keys.

        Args:
            x: Hidden states (B, T, D) of the new tokens after the block's norm, from which queries and keys are
                projected.
            positions: Positions of the new tokens.
            past: States of the tokens in the cache, (B, H, tokens, c); None if there are none.

        Returns:
            The states of the new tokens, (B, H, T, c) fp32 or fp64, or None.
        """
        return None

    def key_bias(self, state: Tensor | None) -> Tensor | None:
        """Return a bias of each key, (B, H, Tk) fp32 or fp64, from the `token_state` of the keys.

        The bias of a key minus that of the query's own key is added to the scaled score. A constant that is added to
        all biases therefore has no effect. Use fp64 if the differences of biases are much smaller than the biases.
        """
        return None

    def query_bias(self, q: Tensor, state: Tensor | None, positions: TokenPositions) -> tuple[Tensor, Tensor] | None:
        """Return factors of an attention bias that depends on the query and on distance.

        ``features[b, h, m] · curves[:, min(d, extent)]`` is added to the scaled score of query m.

        Args:
            q: Queries after `transform_qk`, (B, H, Tq, δ').
            state: `token_state` of the keys, (B, H, Tk, c), or None. The queries belong to the last Tq keys.
            positions: Positions of the queries.

        Returns:
            The features (B, H, Tq, r) and the curves (r, extent + 1), fp32 or fp64, or None.
        """
        return None

    def value_bias(self) -> Tensor | None:
        """Return vectors that are added to the values, (extent + 1, δ) fp32: the last from distance extent on."""
        return None

    def modify_scores(self, s: Tensor, q: Tensor, k: Tensor, block: QueryKeyBlock) -> ModifiedScores:
        """Return the changed scores of a block of queries. Called after all biases and `score_scale` were applied.

        Args:
            s: Scaled scores, (B, H, Tq, Tk) fp32, 0 where `QueryKeyBlock.seen` is false.
            q: Queries after `transform_qk`, (B, H, Tq, δ').
            k: Keys after `transform_qk`, (B, H, Tk, δ'), repeated for all query heads.
            block: Positions of queries and keys, which keys are seen, and the states of the keys.

        Returns:
            Scores (B, H, Tq, Tk) fp32, finite (those of unseen keys are ignored); or a tuple of scores and a sink
            (B, H, Tq) fp32, an additional logit; or `AttentionWeights`, which are used instead of a softmax of scores.
        """
        raise AssertionError(f"{type(self).__name__} does not override modify_scores")

    def add_to_output(self, p: Tensor, v: Tensor, block: QueryKeyBlock) -> Tensor:
        """Return a term (B, H, Tq, δ) fp32 that is added to the output of attention.

        ``p`` are the probabilities (B, H, Tq, Tk), and ``v`` the values (B, H, Tk, δ), both fp32 or fp64.
        """
        raise AssertionError(f"{type(self).__name__} does not override add_to_output")


_OTHER_METHODS = ("__init__", "uses", "require", "require_name", "apply_to_scores", "add_token_biases")
HOOKS = tuple(name for name, value in vars(Position).items() if isfunction(value) and name not in _OTHER_METHODS)
"""Names of all hooks."""


StrategyBuilder = Callable[[Shape], Position]
"""Function that builds a strategy from a shape, such as the class of the strategy."""


def is_distance_bias(position: Position) -> bool:
    """Whether a strategy is only an attention bias by distance, equal in all layers and without a window."""
    hooks = [hook for hook in HOOKS if position.uses(hook)]
    return hooks == ["bias"] and position.window is None and not position.varies_by_layer


def joint_shift_invariance(positions: Iterable[Position]) -> bool | None:
    """Return `Position.shift_invariant` of strategies that are applied together.

    It is False if it is False for any of them, and else None if it is None for any.
    """
    flags = {position.shift_invariant for position in positions}
    return False if False in flags else None if None in flags else True


FLAGS = tuple(Position.__annotations__)
"""Names of the attributes of `Position` that describe a strategy."""

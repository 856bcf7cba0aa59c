"""`TokenPositions`, the positions of tokens, and `QueryKeyBlock`, a block of queries and keys.

The *row* of a token is its index in the input. Causal masks, windows and counts of keys depend on rows. The *position*
is the number that a strategy uses. It may be shifted by an offset, or random. The *place* is a number that a task
assigns to a token, such as the significance of a digit.

Letters in shapes: B is the batch size, T the number of tokens, H the number of query heads, Tq the number of queries,
Tk the number of keys, and N a number of distances.
"""

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any, TypeVar

import torch
import torch.nn.functional as F
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor
from torch.autograd.graph import saved_tensors_hooks

from kerple.positions.fp32_matmul import precise, product
from kerple.positions.visibility import Visibility

Result = TypeVar("Result")
QueriesAndKeys = tuple[Tensor, Tensor]
"""Result of `Position.transform_qk`."""


@dataclass(frozen=True)
class TokenPositions:
    """Rows and positions of tokens.

    Args:
        rows: Rows (T,) int64, 0 for the first token of the input.
        ids: Positions (T,) int64, or (B, T) if they differ between sequences.
        contiguous: Whether each position is the row plus a constant (unrelated to `torch.Tensor.is_contiguous`). If
            not, functions of distance are computed once per pair of query and key, instead of once per distance.
        places: Places (B, T) int64, 0 for tokens without a place; None if no task assigns places.
        visibility: Keys that each token sees as a query. It may differ between layers.
        first_key: Row of the first key that each token sees as a query, the first token of its document; (B, T) int64.
            None if the input is one document.
    """

    rows: Tensor
    ids: Tensor
    contiguous: bool = True
    places: Tensor | None = None
    visibility: Visibility = field(default_factory=Visibility)  # torch 2.11 cannot trace a default that is an object
    first_key: Tensor | None = None
    _results: dict[Callable, Any] = field(init=False, repr=False, compare=False, default_factory=dict)

    @classmethod
    def arange(cls, length: int, offset: int = 0, device: torch.device | None = None) -> "TokenPositions":
        """Return the rows 0 to length - 1 with the positions ``offset`` to ``offset + length - 1``."""
        rows = torch.arange(length, device=device)
        return cls(rows, rows + offset)

    def compute_once(self, function: Callable[["TokenPositions"], Result]) -> Result:
        """Return ``function(self)``; later layers of the forward pass with the same strategy get the stored result."""
        if torch.compiler.is_compiling():  # every layer runs the same graph, which cannot use results of another layer
            return function(self)
        if function not in self._results:
            # Activation checkpointing computes a layer again, which then finds the stored result. These hooks, which
            # do nothing, keep its tensors out of those that checkpointing expects to be computed again.
            with saved_tensors_hooks(lambda x: x, lambda x: x):
                self._results[function] = function(self)
        return self._results[function]

    def __getitem__(self, tokens: slice) -> "TokenPositions":
        places = None if self.places is None else self.places[..., tokens]
        rows, ids = self.rows[tokens], self.ids[..., tokens]
        first_key = None if self.first_key is None else self.first_key[:, tokens]
        return TokenPositions(rows, ids, self.contiguous, places, self.visibility, first_key)

    @property
    def visible(self) -> Tensor:
        """Number of keys that each token sees as a query, including itself.

        The shape is (T,), or (B, 1, T) with documents, which broadcasts over heads.
        """
        window, first_keys = self.visibility.window, self.visibility.first_keys
        visible = self.document_rows + 1
        visible = visible if visible.ndim == 1 else visible[:, None]
        return visible if window is None else visible.clamp(max=window + first_keys)

    @property
    def document_rows(self) -> Tensor:
        """Rows counted from the first token of each document, (B, T) int64; ``rows`` (T,) if there is one document."""
        return self.rows if self.first_key is None else self.rows - self.first_key

    @property
    def largest(self) -> Tensor:
        """Largest position of the input, ((B,) 1) int64, or of the document of each token, (B, T)."""
        if self.first_key is None:
            return self.ids.amax(-1, keepdim=True)
        first = (self.first_key - self.rows[0]).clamp(min=0)  # index of the first of these tokens in the same document
        ids = self.ids.expand_as(first)
        return torch.zeros_like(ids).scatter_reduce(-1, first, ids, "amax").gather(-1, first)

    def divided(self, documents: Tensor, restart: bool) -> "TokenPositions":
        """Return the positions of an input that contains several documents.

        Args:
            documents: Document of each token, (B, T) int64. Consecutive equal numbers are a document.
            restart: Whether the first token of each document has the position of the input's first token.
        """
        starts = F.pad(documents[:, 1:] != documents[:, :-1], (1, 0))
        first_key = (starts * self.rows).cummax(-1).values
        return replace(self, first_key=first_key, ids=self.ids - first_key if restart else self.ids)


@dataclass(frozen=True)
class QueryKeyBlock:
    """Block of queries and keys. The queries belong to the last Tq of the Tk tokens.

    Args:
        queries: Positions of the queries.
        keys: Positions of the keys.
        seen: Which keys each query sees, (Tq, Tk) bool, or (B, 1, Tq, Tk) if an input has several documents. Unseen
            keys must not influence any result: results must not depend on the size of the block, which determines the
            number of unseen keys.
        state: `Position.token_state` of the keys, (B, H, Tk, width), or None.
    """

    queries: TokenPositions
    keys: TokenPositions
    seen: Tensor
    state: Tensor | None = None

    @property
    def distance(self) -> Tensor:
        """Distance from each query back to each key, (Tq, Tk) or (B, Tq, Tk) int64; 0 for later keys."""
        return (self.queries.ids[..., :, None] - self.keys.ids[..., None, :]).clamp(min=0)

    def clipped_distance(self, maximum: int) -> Tensor:
        """Return `distance`, at most ``maximum``, in a shape that expands to all heads: (Tq, Tk) or (B, 1, Tq, Tk)."""
        distance = self.distance.clamp(max=maximum)
        return distance if distance.ndim == 2 else distance[:, None]

    def evaluate(self, function: Callable[[Tensor], Tensor | None]) -> Tensor:
        """Return the values of a function of distance, (N,) fp32 -> (H, N), for all pairs.

        The result is (H, Tq, Tk), or (B, H, Tq, Tk) if positions differ between sequences.
        """
        queries, keys = self.seen.shape[-2:]
        distance = torch.arange(keys, device=self.seen.device) if self.keys.contiguous else self.distance
        values = function(distance.flatten().float())  # (H, N)
        assert values is not None
        if self.keys.contiguous:
            return table_block(values, queries, keys)
        return heads_after_batch(values.unflatten(-1, distance.shape))


@dataclass(frozen=True)
class AttentionWeights:
    """Probabilities that `Position.modify_scores` may return instead of scores; no softmax follows.

    Args:
        p: Probabilities (B, H, Tq, Tk) fp32, 0 for unseen keys.
    """

    p: Tensor


ModifiedScores = Tensor | tuple[Tensor, Tensor] | AttentionWeights
"""Result of `Position.modify_scores`: scores, scores and a sink, or probabilities."""


def readable(positions: Tensor, wait: bool = False) -> bool:
    """Whether the values of a tensor of positions can be read, to compare them with a limit.

    Reading from a GPU would wait until the GPU has finished its earlier work. Without ``wait``, the result is therefore
    False for tensors on a GPU. During compilation, and in a simulation with fake tensors, tensors have no values.
    """
    has_values = not torch.compiler.is_compiling() and not isinstance(positions, FakeTensor)
    return has_values and (wait or positions.device.type == "cpu")


def table_block(table: Tensor, queries: int, keys: int) -> Tensor:
    """Return the entries of a table by distance, (H, >= keys), for a block of pairs; (H, queries, keys).

    The queries belong to the last ``queries`` of the rows. Keys after a query get the entry of distance 0. With the
    queries in reverse order, the distance is constant along anti-diagonals. The block is then a view with strides
    (1, 1) of one vector (a Hankel matrix). `kerple.attention.cpu` makes such views for fused attention.
    """
    line = torch.cat([table[:, :keys].flip(-1), table[:, :1].expand(-1, queries - 1)], -1)  # largest distance first
    return line.unfold(-1, keys, 1).flip(-2)


def add_key_bias(s: Tensor, key_bias: Tensor) -> Tensor:
    """Add the bias of each key, minus that of the query's own key, to scores (B, H, Tq, Tk).

    Args:
        s: Scores of queries that belong to the last Tq keys.
        key_bias: Bias of each key, (B, H, Tk) fp32 or fp64.
    """
    queries = s.shape[2]
    # biases of keys near the first query become small, and so do their fp32 errors
    relative = (key_bias - key_bias[..., -queries, None].detach()).to(s.dtype)
    # a + (-b): autograd sums the gradient of b over keys, then negates the sum; a - b would negate all (Tq, Tk)
    bias = relative[..., None, :] + -relative[..., -queries:, None]
    own = key_bias[..., -queries:]  # far from the first query, these may be large, so they are subtracted before a cast
    bias[..., -queries:] = own[..., None, :] + -own[..., None]
    return s + bias


def add_query_bias(s: Tensor, features: Tensor, curves: Tensor, block: QueryKeyBlock) -> Tensor:
    """Add the biases ``features[b, h, m] · curves[:, min(d, extent)]`` of query m to scores (B, H, Tq, Tk).

    Args:
        s: Scores.
        features: Features of each query, (B, H, Tq, r).
        curves: A curve for each feature, (r, extent + 1). The last entry is used for all distances from extent on.
        block: Positions of the queries and keys.
    """
    extent, (queries, keys) = curves.shape[-1] - 1, s.shape[2:]
    if not block.keys.contiguous:
        return s + product(features, curves).gather(-1, block.clipped_distance(extent).expand_as(s))
    # keys before the last ``near`` ones are at distance ``extent`` or more from every query
    near = min(keys, extent + queries - 1)
    if near == 0:  # one query, and the same bias at all distances
        return s + product(features, curves)
    beyond, within, future = curves[:, extent:], curves[:, : min(near, extent)], curves[:, :1].expand(-1, queries)
    line = torch.cat([beyond.expand(-1, near - within.shape[1]), within.flip(-1), future], -1)
    bias = shift_rows(product(features, line))[..., :near]
    if near == keys:
        return s + bias
    return torch.cat([s[..., :-near] + product(features, beyond), s[..., -near:] + bias], -1)


def value_bias_term(p: Tensor, vectors: Tensor, block: QueryKeyBlock) -> Tensor:
    """Return the sum over the keys of p · vectors[min(d, extent)], (B, H, Tq, δ) fp32 or fp64.

    Args:
        p: Probabilities (B, H, Tq, Tk), 0 for later keys.
        vectors: A vector for each distance, (extent + 1, δ). The last is used for all distances from extent on.
        block: Positions of the queries and keys.
    """
    extent, (queries, keys), p = len(vectors) - 1, p.shape[2:], precise(p)
    if not block.keys.contiguous:
        sums = p.new_zeros(*p.shape[:3], extent + 1)  # total probability of each vector
        return product(sums.scatter_add(-1, block.clipped_distance(extent).expand_as(p), p), vectors)
    row, distance = torch.arange(keys - queries, keys, device=p.device), torch.arange(extent, device=p.device)
    column = row[:, None] - distance  # (Tq, extent)
    within = p.gather(-1, column.clamp(min=0).expand(*p.shape[:2], -1, -1)) * (column >= 0)
    beyond = p.sum(-1, keepdim=True) - within.sum(-1, keepdim=True)
    return product(torch.cat([within, beyond], -1), vectors)


def shift_rows(x: Tensor) -> Tensor:
    """Shift row i of x (..., n, columns) to the left by n - 1 - i entries; (..., n, columns - 1).

    Entry (i, j) of the result is ``x[..., i, n - 1 - i + j]``. Entries with n - 1 - i + j >= columns are undefined. Row
    i + 1 of the result begins ``columns - 1`` entries after row i in the flattened x. The result is therefore a view if
    x is contiguous in memory.
    """
    rows, columns = x.shape[-2:]
    return x.flatten(-2).narrow(-1, rows - 1, rows * (columns - 1)).unflatten(-1, (rows, columns - 1))


def heads_after_batch(x: Tensor) -> Tensor:
    """Return (H, Tq, Tk) unchanged, and (H, B, Tq, Tk) as (B, H, Tq, Tk)."""
    return x if x.ndim == 3 else x.movedim(0, 1)

"""`TokenPositions`, the positions of some tokens, and `QueryKeyBlock`, a block of queries and keys.

A *row* is where a token stands in the input: causality, windows and counts of keys belong to rows. A *position* is
what a strategy is told of it: shifted by an offset, drawn at random, given by a task.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor

Result = TypeVar("Result")


@dataclass(frozen=True)
class TokenPositions:
    """Where some tokens stand.

    Args:
        rows: (T,) int64, 0 for the first token of the input.
        positions: (T,) int64, or (B, T) where they differ between sequences.
        contiguous: Whether positions are rows plus a constant: then tables of biases are streamed, else gathered.
        places: (B, T) int64, what the task says of each token, or None where it says nothing.
        window: Keys that a query sees in this layer, or None for all before it.
    """

    rows: Tensor
    positions: Tensor
    contiguous: bool = True
    places: Tensor | None = None
    window: int | None = None
    _results: dict[Callable, Any] = field(init=False, repr=False, compare=False, default_factory=dict)

    @classmethod
    def line(cls, length: int, offset: int = 0, device: torch.device | None = None) -> "TokenPositions":
        """Rows 0 to length - 1 at positions that are larger by ``offset``."""
        rows = torch.arange(length, device=device)
        return cls(rows, rows + offset)

    def once(self, function: Callable[["TokenPositions"], Result]) -> Result:
        """``function(self)``, which all layers of a forward share; it must depend on nothing else that may change."""
        if torch.compiler.is_compiling():
            return function(self)
        if function not in self._results:
            self._results[function] = function(self)
        return self._results[function]

    def __getitem__(self, part: slice) -> "TokenPositions":
        places = None if self.places is None else self.places[..., part]
        return TokenPositions(self.rows[part], self.positions[..., part], self.contiguous, places, self.window)

    @property
    def visible(self) -> Tensor:
        """How many keys each token sees as a query, itself included; (T,) int64."""
        return self.rows + 1 if self.window is None else (self.rows + 1).clamp(max=self.window)


@dataclass(frozen=True)
class QueryKeyBlock:
    """A block of queries and the keys it may meet; the queries are the last Tq of the Tk keys.

    Args:
        queries: Where the queries stand.
        keys: Where the keys stand.
        seen: (Tq, Tk) bool, causal and within the window. What is not seen must not count: no result may depend on
            the size of a block.
        state: (B, H, Tk, c), what `Position.token_state` said of the keys, or None.
    """

    queries: TokenPositions
    keys: TokenPositions
    seen: Tensor
    state: Tensor | None = None

    @property
    def distance(self) -> Tensor:
        """(Tq, Tk) int64, or (B, Tq, Tk); 0 where the key comes later."""
        return (self.queries.positions[..., :, None] - self.keys.positions[..., None, :]).clamp(min=0)

    def evaluate(self, function: Callable[[Tensor], Tensor | None]) -> Tensor:
        """A function of distance, (N,) fp32 -> (H, N), at every pair; (H, Tq, Tk) or (B, H, Tq, Tk), differentiable."""
        queries, keys = self.seen.shape
        if self.keys.contiguous:
            table = function(torch.arange(keys, dtype=torch.float32, device=self.seen.device))
            assert table is not None
            return table_block(table, queries, keys)
        distance = self.distance
        found = function(distance.flatten().float())  # (H, pairs)
        assert found is not None
        return heads_after_batch(found.unflatten(-1, distance.shape))


@dataclass(frozen=True)
class AttentionWeights:
    """What `Position.modify_scores` may give in place of scores: the probabilities themselves, without a softmax.

    Args:
        p: (B, H, Tq, Tk) fp32, 0 where a key is not seen.
    """

    p: Tensor


def readable(positions: Tensor, wait: bool = False) -> bool:
    """Whether positions can be compared with a limit here, to refuse those beyond it.

    Asking a GPU stalls it, which ``wait`` has to allow; while a model is compiled, or its state is counted with
    tensors that have no values, there is nothing to ask.
    """
    valued = not torch.compiler.is_compiling() and not isinstance(positions, FakeTensor)
    return valued and (wait or positions.device.type == "cpu")


def table_block(table: Tensor, queries: int, keys: int) -> Tensor:
    """Entries d = m - n of a table (H, >= keys) for the last queries of as many keys; (H, queries, keys).

    With the order of the queries reversed the distance is constant along anti-diagonals, so the block is a view with
    strides (1, 1) of one vector, a Hankel matrix, and the gradient a plain sum. In the future stands the entry of 0.
    `kerple.attention.hankel` reads a table in the same way for attention that never writes the block down.
    """
    line = torch.cat([table[:, :keys].flip(-1), table[:, :1].expand(-1, queries - 1)], -1)  # the largest first
    return line.unfold(-1, keys, 1).flip(-2)


def heads_after_batch(x: Tensor) -> Tensor:
    """(H, Tq, Tk) as it is, (H, B, Tq, Tk) as (B, H, Tq, Tk)."""
    return x if x.ndim == 3 else x.movedim(0, 1)

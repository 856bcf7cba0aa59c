"""What every positional strategy is given and what it may do.

B batch, T length, H heads, δ head dimension, D = H·δ width; d = m - n >= 0 is the distance from query m back to key n.
A strategy overrides the hooks it uses and nothing else; the model asks `uses(hook)` and stays blind to the rest.
"""

from abc import ABC, abstractmethod
from dataclasses import dataclass

import torch
from torch import Tensor

from kerple.errors import UserError
from kerple.positions.constrained import Constrained
from kerple.positions.products import precise as precise


@dataclass(frozen=True)
class Shape:
    """What the model hands to every strategy.

    Args:
        dim: Width D of the residual stream.
        heads: Attention heads H; must divide ``dim``.
        length: Training length in tokens. Only the learned table is sized by it.

    Raises:
        UserError: If a number is not positive or the heads do not divide the width.
    """

    dim: int
    heads: int
    length: int

    def __post_init__(self) -> None:
        for name in ("dim", "heads", "length"):
            if getattr(self, name) < 1:
                raise UserError(f"{name}: got {getattr(self, name)}, expected a positive number")
        if self.dim % self.heads:
            raise UserError(f"heads: got {self.heads}, which does not divide dim {self.dim}; choose a divisor of dim")

    @property
    def head_dim(self) -> int:
        """Dimension δ of one head."""
        return self.dim // self.heads


class Position(Constrained, ABC):
    """A positional strategy: how a transformer learns where its tokens stand.

    A subclass takes ``Shape`` as its one positional argument and its own options after it. Every hook is optional.
    Positions are int64, biases and angles fp32, whatever the precision of the weights or of autocast: a strategy's own
    parameters stay in fp32 too (`Constrained`). Its docstring has a line ``Parameters: `formula```, which a test
    holds it to; the formula may use D, H, δ, L (training length) and the strategy's options.
    """

    shift_invariant: bool = False
    """Whether the logits stay the same when every position is shifted by one `offset`."""

    prefix_consistent: bool = True
    """Whether the logits of a prefix are the prefix of the logits; not where the input's length changes angles."""

    share_across_layers: bool = True
    """Whether one instance serves all layers, or the model builds one per layer; an instance may override it.

    As an option it defaults to None, the strategy's usual: jsonargparse carries the options of a saved configuration
    over when the command line changes the strategy, and one's default would become another's wish."""

    max_length: int | None = None
    """First position that cannot be represented; None where there is no such bound."""

    @abstractmethod  # keeps the class abstract: jsonargparse would accept a concrete base as a strategy
    def __init__(self) -> None:
        super().__init__()
        self.anchor: Tensor
        self.register_buffer("anchor", torch.zeros(()), persistent=False)  # a strategy without state has a device too

    def uses(self, hook: str) -> bool:
        """Whether this strategy overrides ``hook``; may differ between training and evaluation, so ask each time."""
        return getattr(type(self), hook) is not getattr(Position, hook)

    def embed(self, x: Tensor, positions: Tensor) -> Tensor:
        """Token embeddings x (B, T, D) with absolute positions (T,) int64 worked in; (B, T, D)."""
        return x

    def rotate(self, q: Tensor, k: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
        """Queries and keys (B, H, T, δ) turned by their positions (T,) int64; the same shapes and dtypes."""
        return q, k

    def bias(self, length: int) -> Tensor | None:
        """What is added to a scaled score at distance d, as a table (H, length) in fp32."""
        return None

    def weight(self, length: int) -> Tensor | None:
        """What q·k is multiplied by at distance d, as a table (H, length) in fp32."""
        return None

    def content(self, x: Tensor) -> Tensor | None:
        """Numbers per token that `scores` needs, from the block's normed input x (B, T, D); (B, H, T, c), cached."""
        return None

    def scores(
        self, q: Tensor, k: Tensor, query_positions: Tensor, key_positions: Tensor, content: Tensor | None
    ) -> Tensor:
        """What is added to the scaled scores of a block of queries and depends on more than distance.

        Args:
            q: (B, H, Tq, δ), a block of queries, rotated if the strategy rotates.
            k: (B, H, Tk, δ), the keys that block may see.
            query_positions: (Tq,) int64.
            key_positions: (Tk,) int64.
            content: What `content` gave for those keys, (B, H, Tk, c), or None.

        Returns:
            (B or 1, H, Tq, Tk) fp32, finite; the attention masks the future.
        """
        raise AssertionError(f"{type(self).__name__} does not override scores; ask uses('scores') first")

    def values(self, attention: Tensor, query_positions: Tensor, key_positions: Tensor) -> Tensor:
        """What is added to the output (B, H, Tq, δ) of a block of queries, given its probabilities (B, H, Tq, Tk)."""
        raise AssertionError(f"{type(self).__name__} does not override values; ask uses('values') first")

    @property
    def device(self) -> torch.device:
        """Where the strategy's tables are made."""
        return self.anchor.device

    def distances(self, length: int) -> Tensor:
        """0, 1, …, length - 1 in fp32 on the device of the strategy; (length,)."""
        return torch.arange(length, dtype=torch.float32, device=self.device)

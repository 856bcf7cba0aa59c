"""A strategy in a network small enough for every property."""

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn

from kerple.model import Transformer
from kerple.model.self_attention import Hooks, tell
from kerple.positions import At, Position, Shape
from kerple.positions.wrapper import Wrapper

LENGTH, VOCABULARY = 32, 50


class DoesNotApply(Exception):
    """Raised by a property that says nothing of this strategy."""


@dataclass(frozen=True)
class Subject:
    """What is checked.

    Args:
        build: Gives the strategy of a shape.
    """

    build: Callable[[Shape], Position]

    def position(self, length: int = LENGTH) -> Position:
        """One instance in evaluation mode, width 32, 4 heads."""
        torch.manual_seed(0)
        return self.build(Shape(32, 4, length)).eval()

    def network(self, length: int = LENGTH, kv_heads: int | None = None, layers: int = 2) -> Transformer:
        """Width 32, 4 heads, evaluation mode, every parameter of the strategy away from its start.

        Weights are large enough that attention is not uniform, or no property would notice what a strategy does.
        """
        torch.manual_seed(0)
        network = Transformer(Shape(32, 4, length), layers, VOCABULARY, self.build, kv_heads=kv_heads)
        with torch.no_grad():
            for position in network.positions:
                for parameter in position.parameters():
                    parameter.add_(0.3 * torch.rand_like(parameter))  # some start where they do nothing
                position.constrain_()
            for block in network.blocks:
                nn.init.normal_(block.attention.qkv.weight, std=0.3)
        return network.eval()

    def reach(self, wanted: int, length: int = LENGTH) -> int:
        """The wanted number of positions, or all there are."""
        most = self.position(length).max_length
        return wanted if most is None else min(wanted, most)


Property = Callable[[Subject], None]
PROPERTIES: dict[str, Property] = {}
"""By name, in words: what is held of every strategy. Each raises an error if it is not so."""


def holds(function: Property) -> Property:
    """Register a property under its name."""
    PROPERTIES[function.__name__.replace("_", " ")] = function
    return function


def tokens(batch: int, length: int) -> Tensor:
    """(batch, length) int64, the same in every run."""
    return torch.randint(0, VOCABULARY, (batch, length), generator=torch.Generator().manual_seed(length))


def same(got: Tensor, wanted: Tensor, what: str, atol: float = 1e-5, rtol: float = 1e-4) -> None:
    """Raise an AssertionError, one line, where numbers differ."""
    assert got.shape == wanted.shape, f"{what}: shape {tuple(got.shape)}, expected {tuple(wanted.shape)}"
    off = (got - wanted).detach().abs()  # NaN where one of them is
    assert (off <= atol + rtol * wanted.abs()).all(), f"{what}: differs by up to {float(off.max()):.3g}"


def attended(
    way: Callable[..., Tensor],
    position: Position,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    x: Tensor,
    window: int | None = None,
    offset: int = 0,
) -> Tensor:
    """Attention with a strategy and nothing around it, to be compared with a formula.

    Args:
        way: `kerple.attention.attend`, or another with its arguments.
        position: The strategy.
        q: (B, H, T, δ), not projected.
        k: (B, G, T, δ), not projected.
        v: (B, G, T, δ).
        x: (B, T, D), what strategies remember something of.
        window: Keys a query sees.
        offset: Added to every position.
    """
    told = tell(position, At.line(q.shape[2], offset), x.new_zeros(x.shape[:2], dtype=torch.int64), window)
    memory = position.remember(x, told.at, None)
    q, k = position.project(q, k, memory, told.at)
    hooks = Hooks(position, told.at, memory)
    return way(
        *(q, k, v),
        scale=v.shape[-1] ** -0.5,
        table=told.table,
        weight=told.weight,
        window=told.window,
        sink=position.sink(q, told.at),
        mix=hooks.mix if hooks.mixes else None,
        values=hooks.values if position.uses("values") else None,
    )


class Moved(Wrapper):
    """A strategy told other positions: those of ``where`` (rows,) or (B, rows), with gaps or said to have them."""

    def __init__(self, position: Position, where: Tensor) -> None:
        super().__init__(position)
        self.where = where

    def relocate(self, at: At, tokens: Tensor) -> At:
        at = replace(at, positions=self.where[..., at.rows], contiguous=False)
        return self.position.relocate(at, tokens)


def move(network: Transformer, where: Tensor) -> Transformer:
    """Tell every strategy of a network these positions."""
    for i, position in enumerate(network.positions):
        network.positions[i] = Moved(position, where).eval()
    return network

"""`Subject`: a strategy in a small network, on which properties are checked; and functions for these checks."""

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn

from kerple.model import Transformer
from kerple.model.self_attention import modifiers_of, prepare_context
from kerple.positions import Position, Shape, TokenPositions
from kerple.positions.wrapper import Wrapper

LENGTH, VOCABULARY = 32, 50


class DoesNotApply(Exception):
    """Raised by a property that does not apply to a strategy."""


@dataclass(frozen=True)
class Subject:
    """The strategy that is checked.

    Args:
        build: Function from a shape to the strategy.
    """

    build: Callable[[Shape], Position]

    def position(self, length: int = LENGTH) -> Position:
        """An instance of the strategy in evaluation mode, with width 32 and 4 heads."""
        torch.manual_seed(0)
        return self.build(Shape(32, 4, length)).eval()

    def network(self, length: int = LENGTH, kv_heads: int | None = None, layers: int = 2) -> Transformer:
        """A network of width 32 with 4 heads in evaluation mode, whose strategy has other than its initial parameters.

        Weights are so large that attention is not uniform; else the strategy would have hardly any effect.
        """
        torch.manual_seed(0)
        network = Transformer(Shape(32, 4, length), layers, VOCABULARY, self.build, kv_heads=kv_heads)
        with torch.no_grad():
            for position in network.positions:
                for parameter in position.parameters():
                    parameter.add_(0.3 * torch.rand_like(parameter))  # some initial values have no effect
                position.constrain_()
            for block in network.blocks:
                nn.init.normal_(block.attention.qkv.weight, std=0.3)
        return network.eval()

    def reach(self, wanted: int) -> int:
        """The number of positions, or the largest that the strategy has if that is less."""
        most = self.position().max_length
        return wanted if most is None else min(wanted, most)


Property = Callable[[Subject], None]
PROPERTIES: dict[str, Property] = {}
"""The properties by their names. Each is a function that raises an error if the property does not hold."""


def holds(function: Property) -> Property:
    """Register a property under its name."""
    PROPERTIES[function.__name__.replace("_", " ")] = function
    return function


def tokens(batch: int, length: int) -> Tensor:
    """Random tokens (batch, length) int64, the same in every run."""
    return torch.randint(0, VOCABULARY, (batch, length), generator=torch.Generator().manual_seed(length))


def same(got: Tensor, wanted: Tensor, what: str, atol: float = 1e-5, rtol: float = 1e-4) -> None:
    """Check that numbers are close; the AssertionError is one line."""
    assert got.shape == wanted.shape, f"{what}: shape {tuple(got.shape)}, expected {tuple(wanted.shape)}"
    off = (got - wanted).detach().abs()  # NaN if one of them is NaN
    assert (off <= atol + rtol * wanted.abs()).all(), f"{what}: differs by up to {float(off.max()):.3g}"


def attended(
    attention: Callable[..., Tensor],
    position: Position,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    x: Tensor,
    window: int | None = None,
    offset: int = 0,
) -> Tensor:
    """Attention with a strategy, without the network around it.

    Args:
        attention: `kerple.attention.attend`, or a function with the same arguments.
        position: The strategy.
        q: Queries (B, H, T, δ) before `Position.transform_qk`.
        k: Keys (B, G, T, δ) before `Position.transform_qk`.
        v: Values (B, G, T, δ).
        x: Input of `Position.token_state`, (B, T, D).
        window: Number of keys that a query sees; None for all.
        offset: Added to every position.
    """
    context = prepare_context(
        position, TokenPositions.line(q.shape[2], offset), x.new_zeros(x.shape[:2], dtype=torch.int64), window
    )
    state = position.token_state(x, context.at, None)
    q, k = position.transform_qk(q, k, state, context.at)
    return attention(q, k, v, modifiers_of(position, context, q, v, state))


class Moved(Wrapper):
    """A strategy at other positions, those of ``where`` (rows,) or (B, rows), which count as having gaps."""

    def __init__(self, position: Position, where: Tensor) -> None:
        super().__init__(position)
        self.where = where

    def remap_positions(self, at: TokenPositions, tokens: Tensor) -> TokenPositions:
        at = replace(at, positions=self.where[..., at.rows], contiguous=False)
        return self.position.remap_positions(at, tokens)


def move(network: Transformer, where: Tensor) -> Transformer:
    """Move the strategies of a network to these positions."""
    for i, position in enumerate(network.positions):
        network.positions[i] = Moved(position, where).eval()
    return network

"""`Subject`: a strategy in a small network, and functions for checks of its properties."""

import inspect
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cached_property, wraps

import torch
from torch import Tensor, nn

from kerple.model import Transformer
from kerple.positions import Position, Shape, TokenPositions
from kerple.positions.wrapper import Wrapper

LENGTH, VOCABULARY = 32, 50
SHORT, MEDIUM, LONG = 30, 90, 300
LAYERS = 60  # depth for the strategy, so that the last layer is the last of a pattern of 2, 3, 4, 5 or 6 layers
LARGEST = 1000  # integers up to this one among a strategy's options increase the longest length


class DoesNotApply(Exception):
    """Raised by a property that does not apply to a strategy."""


@dataclass(frozen=True)
class Subject:
    """Strategy under test.

    Args:
        build: Function from a shape to the strategy.
    """

    build: Callable[[Shape], Position]

    def build_layer(self, shape: Shape) -> Position:
        """Build the strategy for the first or the last of `LAYERS` layers; the network has only these two."""
        return self.build(replace(shape, layer=LAYERS - 1 if shape.layer else 0, layers=LAYERS))

    def position(self, length: int = LENGTH) -> Position:
        """Return the strategy in evaluation mode, with width 32, 4 heads and this training length."""
        torch.manual_seed(0)
        return self.build_layer(Shape(32, 4, length)).eval()

    def network(self, length: int = 0, kv_heads: int | None = None, trained: int = LENGTH) -> Transformer:
        """Return a network of two layers with width 32 and 4 heads, whose strategy has changed parameters.

        The training length is ``trained``. It is ``length`` if a strategy trained at ``trained`` cannot represent
        ``length`` positions. Weights are so large that attention is not uniform and the strategy has an effect.
        """
        limit = self.position().max_length
        torch.manual_seed(0)
        shape = Shape(32, 4, trained if limit is None or limit >= length else length)
        network = Transformer(shape, 2, VOCABULARY, self.build_layer, kv_heads=kv_heads)
        with torch.no_grad():
            for position in network.positions:
                for parameter in position.parameters():
                    parameter.add_(0.3 * torch.rand_like(parameter))  # some initial values have no effect
                position.constrain_()
            for block in network.blocks:
                nn.init.normal_(block.attention.qkv.weight, std=0.3)
        return network.eval()

    @cached_property
    def lengths(self) -> tuple[int, ...]:
        """Tested numbers of tokens: 30, 90, and at least 300.

        The longest includes several blocks of queries. It exceeds by at least 50 the largest integer up to 1,000 among
        the strategy's options, attributes and sizes of parameters.
        """
        positions, numbers = self.network().positions, [0]
        options = getattr(self.build, "keywords", {})
        for module in positions.modules():
            defaults = inspect.signature(type(module)).parameters
            numbers += [options.get(name, option.default) for name, option in defaults.items()]
            numbers += vars(module).values()
        numbers += [size for tensor in (*positions.parameters(), *positions.buffers()) for size in tensor.shape]
        largest = max(number for number in numbers if type(number) is int and number <= LARGEST)
        return SHORT, MEDIUM, max(LONG, largest + 50)


Property = Callable[[Subject], None]
PROPERTIES: dict[str, Property] = {}
"""Properties by name. Each is a function that raises an error if the property does not hold."""


AT_LENGTHS: set[Property] = set()
"""Properties that are tested at each of `Subject.lengths`."""


def holds(function: Property) -> Property:
    """Register a property under its name."""
    PROPERTIES[function.__name__.replace("_", " ")] = function
    return function


def holds_at_lengths(function: Callable[[Subject, int], None]) -> Property:
    """Register a property that is tested at each of `Subject.lengths`."""

    @wraps(function)
    def at_lengths(subject: Subject) -> None:
        for length in subject.lengths:
            function(subject, length)

    AT_LENGTHS.add(at_lengths)
    return holds(at_lengths)


def tokens(batch: int, length: int) -> Tensor:
    """Return random tokens (batch, length) int64, equal in every run."""
    return torch.randint(0, VOCABULARY, (batch, length), generator=torch.Generator().manual_seed(length))


def same(got: Tensor, expected: Tensor, what: str, atol: float = 1e-5, rtol: float = 1e-4) -> None:
    """Check that numbers are close; the AssertionError is one line."""
    assert got.shape == expected.shape, f"{what}: shape {tuple(got.shape)}, expected {tuple(expected.shape)}"
    off = (got - expected).detach().abs()  # NaN if one of them is NaN
    assert (off <= atol + rtol * expected.abs()).all(), f"{what}: differs by up to {float(off.max()):.3g}"


class _ExplicitPositions(Wrapper):
    """Strategy at the positions ``where``, (rows,) or (B, rows), which are marked as not contiguous.

    Its name is private, so that the command line does not offer it.
    """

    def __init__(self, position: Position, where: Tensor) -> None:
        super().__init__(position)
        self.where = where

    def remap_positions(self, positions: TokenPositions, tokens: Tensor) -> TokenPositions:
        positions = replace(positions, ids=self.where[..., positions.rows], contiguous=False)
        return self.position.remap_positions(positions, tokens)


def set_positions(network: Transformer, where: Tensor) -> Transformer:
    """Replace the positions in all strategies of a network."""
    for i, position in enumerate(network.positions):
        network.positions[i] = _ExplicitPositions(position, where).eval()
    return network

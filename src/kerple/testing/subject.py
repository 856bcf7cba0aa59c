"""`Subject`: a strategy under test in a small network, and the registry of the properties that it is tested for."""

import inspect
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cached_property, wraps

import torch
from torch import Tensor, nn

from kerple.model import Transformer
from kerple.positions import (
    AttentionWeights,
    LayerPattern,
    Position,
    QueryKeyBlock,
    Shape,
    StrategyBuilder,
    TokenPositions,
)
from kerple.positions.wrapper import Wrapper

LENGTH, VOCABULARY = 32, 50  # default training length, and number of tokens of the vocabulary
SHORT, MEDIUM, LONG = 30, 90, 300  # numbers of tokens of the tested inputs; the longest may have more than `LONG`
LAYERS = 60  # number of layers in the strategy's shape, of which only `Subject.layers` are built
LARGEST = 1000  # a larger integer among a strategy's options does not increase the longest input


class DoesNotApply(Exception):
    """Raised by the test of a property that the strategy need not have."""


@dataclass(frozen=True)
class Subject:
    """Strategy under test.

    Args:
        build: Function from a shape to the strategy.
        fast: Whether only the shortest of the inputs is tested.
    """

    build: StrategyBuilder
    fast: bool = False

    @cached_property
    def layers(self) -> list[int]:
        """Layers of the network among `LAYERS` layers: the first layer of each kind of a `LayerPattern`.

        Without several kinds, these are the first and the last layer.
        """
        shape = Shape(32, 4, LENGTH, layers=LAYERS)
        first_of_kind: dict[tuple[str, ...], int] = {}
        for layer in range(LAYERS if self.build(shape).varies_by_layer else 0):
            modules = self.build(replace(shape, layer=layer)).modules()
            first_of_kind.setdefault(tuple(m.kind for m in modules if isinstance(m, LayerPattern)), layer)
        return [*first_of_kind.values()] if len(first_of_kind) > 1 else [0, LAYERS - 1]

    @property
    def distinct_layers(self) -> list[int]:
        """Layers with different strategies, as indices for `position`."""
        return [*range(len(self.layers) if self.position().varies_by_layer else 1)]

    def build_layer(self, shape: Shape) -> Position:
        """Build the strategy of a layer of the network."""
        return self.build(replace(shape, layer=self.layers[shape.layer], layers=LAYERS))

    def position(self, length: int = LENGTH, layer: int = 0, dim: int = 32, head_width: int | None = None) -> Position:
        """Return the strategy of a layer in evaluation mode, with 4 heads, and these sizes of its `Shape`."""
        # torch.manual_seed would take 2 ms, because it records a stack trace for each accelerator
        torch.default_generator.manual_seed(0)
        return self.build_layer(Shape(dim, 4, length, layer, len(self.layers), head_width=head_width)).eval()

    def network(self, length: int = 0, kv_heads: int | None = None, trained: int = LENGTH) -> Transformer:
        """Return a network with the layers `layers`, width 32 and 4 heads, in evaluation mode.

        Random numbers are added to the parameters of the strategy, because some of its initial values have no effect.
        Weights are so large that attention is not uniform.

        Args:
            length: Largest number of tokens that the network must be able to read.
            kv_heads: Number of key heads; None for one per query head.
            trained: Training length. If the strategy has a ``max_length`` below ``length``, ``length`` is used.
        """
        limits = [self.position(layer=layer).max_length for layer in self.distinct_layers]
        limit = min((limit for limit in limits if limit is not None), default=None)
        torch.default_generator.manual_seed(0)
        shape = Shape(32, 4, trained if limit is None or limit >= length else length)
        network = Transformer(shape, len(self.layers), VOCABULARY, self.build_layer, kv_heads=kv_heads)
        change_parameters(network)
        for block in network.blocks:
            nn.init.normal_(block.attention.qkv.weight, std=0.3)
        return network.eval()

    @cached_property
    def lengths(self) -> tuple[int, ...]:
        """Numbers of tokens of the tested inputs: 30, 90, and at least 300.

        The longest input consists of several blocks of queries. It has at least 50 tokens more than the largest
        integer up to 1,000 among the strategy's options, attributes, and sizes of parameters and buffers.
        """
        if self.fast:
            return (SHORT,)
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
"""Tests of properties, by the statement of the property. A test raises an error if the property does not hold."""
AT_LENGTHS: set[Property] = set()
"""Tests that read an input of each of `Subject.lengths`."""


def holds(function: Property) -> Property:
    """Register the test of a property. The first line of the test's docstring states the property."""
    PROPERTIES[(function.__doc__ or "").splitlines()[0].removesuffix(".").replace("`", "")] = function
    return function


def holds_at_lengths(function: Callable[[Subject, int], None]) -> Property:
    """Register the test of a property with an input of each of `Subject.lengths`; see `holds`."""

    @wraps(function)
    def test(subject: Subject) -> None:
        for length in subject.lengths:
            function(subject, length)

    AT_LENGTHS.add(test)
    return holds(test)


@torch.no_grad()
def change_parameters(network: Transformer) -> None:
    """Add random numbers to the parameters of the strategies of a network, and keep the parameters in their ranges."""
    for position in network.positions:
        for parameter in position.parameters():
            parameter.add_(0.3 * torch.rand_like(parameter))
        position.constrain_()


def tokens(batch: int, length: int) -> Tensor:
    """Return random tokens (batch, length) int64, the same in every call."""
    return torch.randint(0, VOCABULARY, (batch, length), generator=torch.Generator().manual_seed(length))


def same(got: Tensor, expected: Tensor, what: str, atol: float = 1e-5, rtol: float = 1e-4) -> None:
    """Check that |got - expected| <= atol + rtol · |expected|; ``what`` names the tensors in the AssertionError."""
    assert got.shape == expected.shape, f"{what}: shape {tuple(got.shape)}, expected {tuple(expected.shape)}"
    error = (got - expected).detach().abs()  # NaN in either fails the comparison
    assert (error <= atol + rtol * expected.abs()).all(), f"{what}: differs by up to {float(error.max()):.3g}"


class _ExplicitPositions(Wrapper):
    """Strategy that reads tokens at given positions, which it marks as not contiguous.

    The name of this class is private, so that the command line does not offer the class.

    Args:
        position: The strategy.
        ids: Positions by row (index of the token in the input), (rows,) or (B, rows) int64.
    """

    def __init__(self, position: Position, ids: Tensor) -> None:
        super().__init__(position)
        self.ids = ids

    def remap_positions(self, positions: TokenPositions, tokens: Tensor) -> TokenPositions:
        positions = replace(positions, ids=self.ids[..., positions.rows], contiguous=False)
        return self.position.remap_positions(positions, tokens)


def set_positions(network: Transformer, ids: Tensor) -> Transformer:
    """Set the positions ``ids``, (T,) or (B, T) int64, in all strategies of a network; return the network."""
    for i, position in enumerate(network.positions):
        network.positions[i] = _ExplicitPositions(position, ids).eval()
    return network


def results_of_hooks(
    position: Position,
    length: int,
    dtype: torch.dtype = torch.float32,
    positions: TokenPositions | None = None,
    dim: int = 32,
    head_dim: int = 8,
) -> dict[str, Tensor]:
    """Return the results of all hooks except `transform_output` for random input, by name.

    Args:
        position: The strategy.
        length: Number of tokens.
        dtype: Dtype of the input. The numbers are the same for each dtype.
        positions: Positions after `remap_positions`. If None, they begin at 3000, because bf16 rounds many integers
            above 256. With a ``max_length``, they begin at 0.
        dim: Width D of the strategy's shape.
        head_dim: Head dimension δ of the strategy's shape.

    Raises:
        AssertionError: If a hook modifies one of its arguments in place.
    """
    torch.manual_seed(1)

    def random(*shape: int) -> Tensor:
        return (torch.randint(-64, 65, shape) / 32).to(dtype)  # -2 to 2, without rounding in bf16

    k = random(2, 4, length, head_dim)
    x = random(2, length, 64)[..., :dim]  # so that later numbers do not depend on D
    if positions is None:
        positions = TokenPositions.arange(length, 3000 if position.max_length is None else 0)
        positions = position.remap_positions(positions, torch.zeros(2, length, dtype=torch.int64))
    distance = torch.arange(3000).float()
    results: dict[str, Tensor | None] = {
        "embed": position.embed(x, positions),
        "bias": position.bias(distance),
        "score_scale": position.score_scale(distance),
    }
    state = results["token_state"] = position.token_state(x, positions, None)
    results["q"], results["k"] = _, transformed = position.transform_qk(k, k.flip(0), state, positions)
    results["key_bias"], results["value_bias"] = position.key_bias(state), position.value_bias()
    width, seen = transformed.shape[-1], torch.ones(5, length, dtype=torch.bool).tril(length - 5)
    # not the results of `transform_qk`, which are rounded in bf16
    q, transformed = random(2, 4, 5, width), random(2, 4, length, width)
    results["sink_logit"] = position.sink_logit(q, positions[-5:])
    query_bias = position.query_bias(q, state, positions[-5:])
    results["features"], results["curves"] = (None, None) if query_bias is None else query_bias
    block = QueryKeyBlock(positions[-5:], positions, seen, state)
    if position.uses("modify_scores"):
        scores = position.modify_scores(torch.randn(2, 4, 5, length).masked_fill(~seen, 0), q, transformed, block)
        scores = scores.p if isinstance(scores, AttentionWeights) else scores
        results["scores"], results["sink of scores"] = scores if isinstance(scores, tuple) else (scores, None)
    if position.uses("add_to_output"):
        results["add_to_output"] = position.add_to_output(random(2, 4, 5, length).abs() / 2, k, block)
    for what, tensor in {"distance": distance, "x": x, "k": k, "positions.ids": positions.ids}.items():
        assert not tensor._version, f"a hook modifies {what} in place; the next layer receives the modified tensor"
    return {what: tensor for what, tensor in results.items() if tensor is not None}

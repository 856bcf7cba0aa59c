from collections.abc import Callable

import pytest
import torch

import kerple.positions as positions
from kerple.model import Transformer
from kerple.positions import Position, Shape, names


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(0)


@pytest.fixture
def tiny_network() -> Callable[..., Transformer]:
    """Two layers, width 32, 4 heads, training length 32, 50 token ids; eval mode, fp32.

    The weights are ten times those of training: at their real start attention is all but uniform and hides mistakes.
    """

    def build(name: str, length: int = 32, **options: object) -> Transformer:
        def position(shape: Shape) -> Position:
            return positions.build(name, dim=shape.dim, heads=shape.heads, length=shape.length, **options)

        assert name in names()
        network = Transformer(Shape(32, 4, length), 2, 50, position).eval()
        with torch.no_grad():
            for module in network.modules():
                if isinstance(module, torch.nn.Linear | torch.nn.Embedding):
                    module.weight.normal_(std=0.2)
        return network

    return build

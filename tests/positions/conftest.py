"""A network small enough to run every property over every strategy."""

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch

from kerple.model.transformer import Transformer
from kerple.positions import Shape, strategies

LENGTH = 32


@pytest.fixture
def tiny_network() -> Callable[..., Transformer]:
    """Builds a two-layer network of width 32 with 4 heads, in evaluation mode, every parameter away from 0."""

    def make(name: str, length: int = LENGTH, **options: Any) -> Transformer:
        torch.manual_seed(0)
        network = Transformer(
            Shape(32, 4, length),
            layers=2,
            vocabulary=50,
            position=partial(strategies()[name], **options),
        )
        with torch.no_grad():
            for position in network.positions:
                for parameter in position.parameters():
                    parameter.add_(0.3 * torch.rand_like(parameter))  # CoPE starts at 0, where it is NoPE
                position.constrain_()
        # large enough weights that attention is not uniform, or no property would notice what a strategy does
        for block in network.blocks:
            torch.nn.init.normal_(block.attention.qkv.weight, std=0.3)
        return network.eval()

    return make

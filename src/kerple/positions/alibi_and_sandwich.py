"""`ALiBi` and `Sandwich`: attention biases that are simple functions of the distance d and the head h = 1..H."""

import math

import torch
from torch import Tensor, nn

from kerple.positions.angles import angles
from kerple.positions.base import Position, Shape


class ALiBi(Position):
    """Linear penalty on distance: ``-slope_h · d`` (Press et al. 2022, arXiv 2108.12409, section 3).

    Slopes are 2^(-8h/H). If H is not a power of two, let P be the largest power of two below H. The slopes are then
    those of P heads, followed by every second slope of 2P heads, as in the published code.

    Parameters: `H * learnable`, shared by all layers. Cost: one (H, T) table per forward pass.

    Args:
        shape: Sizes of the model.
        learnable: Whether the slopes are trained. They stay non-negative.
    """

    shift_invariant = True

    def __init__(self, shape: Shape, learnable: bool = False) -> None:
        super().__init__()
        slopes = alibi_slopes(shape.heads)
        self.slopes: Tensor  # (H,)
        if learnable:
            self.learn("slopes", shape.heads, slopes, minimum=0.0)
        else:
            self.slopes = nn.Buffer(torch.tensor(slopes, dtype=torch.float32), persistent=False)

    def bias(self, distance: Tensor) -> Tensor:
        return -self.slopes[:, None] * distance  # (H, N)


def alibi_slopes(heads: int) -> list[float]:
    """Return the slope of each head in `ALiBi`."""
    power = 2 ** math.floor(math.log2(heads))
    slopes = [2 ** (-8 * (i + 1) / power) for i in range(power)]
    return slopes + [2 ** (-8 * (i + 1) / (2 * power)) for i in range(0, 2 * (heads - power), 2)]


class Sandwich(Position):
    """Inner product of two sinusoidal position embeddings, as a bias by distance (Chi et al. 2023, arXiv 2212.10356,
    section 4).

    ``H / (8h) · Σ_i cos(d / 10000^(2i/size))``, i = 0..size/2-1.

    Parameters: `0`. Cost: one (H, T) table per forward pass.

    Args:
        shape: Sizes of the model.
        size: Width of the position embeddings, twice the number of cosines. Chi et al. use 128 for every head
            dimension.

    Raises:
        UserError: If ``size`` is odd or below 2.
    """

    shift_invariant = True

    def __init__(self, shape: Shape, size: int = 128) -> None:
        super().__init__()
        self.require(size >= 2 and size % 2 == 0, "size", size, "an even number of 2 or more, such as 128")
        self.heads, self.size = shape.heads, size

    def bias(self, distance: Tensor) -> Tensor:
        waves = angles(distance, self.size, 10000.0).cos().sum(-1)  # (N,) fp64
        heads = torch.arange(1, self.heads + 1, dtype=waves.dtype, device=waves.device)  # (H,)
        return (waves / (8 / self.heads * heads)[:, None]).to(distance.dtype)  # (H, N)

"""Strategies that add a function of distance and head to the scores: one (H, T) table, never a T × T tensor."""

import math

import torch
from torch import Tensor, nn

from kerple.errors import UserError
from kerple.positions.angles import exact, frequencies
from kerple.positions.base import Position, Shape


class ALiBi(Position):
    """Linear penalty on distance: ``-slope_h · d`` (Press et al. 2022, arXiv 2108.12409, section 3).

    Slopes are 2^(-8h/H), h = 1..H. For a head count that is not a power of two they are those of the power of two
    below it, then every second slope of twice that power: the published code's rule, which several re-implementations
    miss.

    Parameters: `H * learnable`, shared by all layers. Cost: one (H, T) table a forward.

    Args:
        shape: What the model hands to every strategy.
        learnable: Train the slopes; `constrain_` keeps them at 0 or above.
    """

    shift_invariant = True

    def __init__(self, shape: Shape, learnable: bool = False) -> None:
        super().__init__()
        self.slopes: Tensor
        if learnable:
            self.learn("slopes", shape.heads, alibi_slopes(shape.heads), minimum=0.0)
        else:
            slopes = torch.tensor(alibi_slopes(shape.heads), dtype=torch.float32)  # (H,)
            self.register_buffer("slopes", slopes, persistent=False)

    def bias(self, length: int) -> Tensor:
        return -self.slopes[:, None] * self.distances(length)  # (H, length)


def alibi_slopes(heads: int) -> list[float]:
    """ALiBi's slope of each head, steepest first within each of the two groups."""
    below = 2 ** math.floor(math.log2(heads))
    slopes = [2 ** (-8 * (i + 1) / below) for i in range(below)]
    between = [2 ** (-8 * (i + 1) / (2 * below)) for i in range(0, 2 * (heads - below), 2)]
    return slopes + between


class T5(Position):
    """A learned number per bucket of distances and head: ``b_h[bucket(d)]`` (Raffel et al. 2020, arXiv 1910.10683,
    section 2.1).

    The first half of the buckets holds one distance each, the other half grows by a constant factor up to the largest
    distance; everything further shares the last. Unlike T5's own, these scores are divided by √δ, as every strategy's
    here. Starts as N(0, 0.02).

    Parameters: `buckets * H`, shared by all layers. Cost: one (H, T) table a forward.

    Args:
        shape: What the model hands to every strategy.
        buckets: Number of buckets, 2 or more.
        max_distance: Where the last bucket begins at the latest; more than half the buckets.

    Raises:
        UserError: If a number is out of range.
    """

    shift_invariant = True

    def __init__(self, shape: Shape, buckets: int = 32, max_distance: int = 128) -> None:
        super().__init__()
        if buckets < 2:
            raise UserError(f"T5: buckets: got {buckets}, expected 2 or more; the paper uses 32")
        if max_distance <= buckets // 2:
            raise UserError(
                f"T5: max_distance: got {max_distance}, expected more than the {buckets // 2} distances with a "
                "bucket of their own; the paper uses 128"
            )
        self.buckets, self.max_distance = buckets, max_distance
        self.table = nn.Parameter(torch.empty(shape.heads, buckets, dtype=torch.float32).normal_(std=0.02))

    def bias(self, length: int) -> Tensor:
        distance = torch.arange(length, device=self.device)
        return self.table[:, t5_bucket(distance, self.buckets, self.max_distance)]  # (H, length)


def t5_bucket(distance: Tensor, buckets: int, max_distance: int) -> Tensor:
    """Bucket of each distance (…) int64, boundaries in fp32 as in the published code; (…) int64."""
    exact_ones = buckets // 2
    far = torch.log(distance.clamp(min=1).float() / exact_ones) / math.log(max_distance / exact_ones)
    far = exact_ones + (far * (buckets - exact_ones)).long()
    return torch.where(distance < exact_ones, distance, far.clamp(max=buckets - 1))


class Sandwich(Position):
    """What remains of the sinusoid when only its position-position product is kept (Chi et al. 2022, arXiv
    2212.10356, section 4).

    ``H / (8h) · Σ_i cos(d / 10000^(2i/size))``, i = 0..size/2-1, h = 1..H.

    Parameters: `0`. Cost: one (H, T) table a forward.

    Args:
        shape: What the model hands to every strategy.
        size: Twice the number of cosines; the paper uses 128 for every head dimension.

    Raises:
        UserError: If the size is odd or below 2.
    """

    shift_invariant = True

    def __init__(self, shape: Shape, size: int = 128) -> None:
        super().__init__()
        if size < 2 or size % 2:
            raise UserError(f"Sandwich: size: got {size}, expected an even number of 2 or more; the paper uses 128")
        self.heads, self.size = shape.heads, size

    def bias(self, length: int) -> Tensor:
        turns = frequencies(self.size, 10000.0, self.device)  # (size/2,)
        waves = (
            (torch.arange(length, dtype=turns.dtype, device=self.device)[:, None] * turns).cos().sum(-1)
        )  # (length,)
        ratio = 8 / self.heads * torch.arange(1, self.heads + 1, dtype=exact(self.device), device=self.device)  # (H,)
        return (waves / ratio[:, None]).float()  # (H, length)

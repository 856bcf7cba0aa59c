"""`T5`: a learned bias for each bucket of distances."""

import math

import torch
from torch import Tensor, nn

from kerple.positions.base import Position, Shape


class T5(Position):
    """A learned number per bucket of distances and head: ``b_h[bucket(d)]`` (Raffel et al. 2020, arXiv 1910.10683,
    section 2.1).

    The first half of the buckets holds one distance each, the other half grows by a constant factor up to the largest
    distance; everything further shares the last. Unlike T5's own, these scores are divided by √δ, as every strategy's
    here. Starts as N(0, 0.02).

    Parameters: `buckets * H`, shared by all layers. Cost: one (H, T) table a forward.

    Args:
        shape: Sizes of the model.
        buckets: Number of buckets, 2 or more.
        max_distance: Where the last bucket begins at the latest; more than half the buckets.

    Raises:
        UserError: If a number is out of range.
    """

    shift_invariant = True

    def __init__(self, shape: Shape, buckets: int = 32, max_distance: int = 128) -> None:
        super().__init__()
        self.require(buckets >= 2, "buckets", buckets, "2 or more; the paper uses 32")
        expected = f"more than the {buckets // 2} distances with a bucket of their own; the paper uses 128"
        self.require(max_distance > buckets // 2, "max_distance", max_distance, expected)
        self.buckets, self.max_distance = buckets, max_distance
        self.table = nn.Parameter(torch.empty(shape.heads, buckets, dtype=torch.float32).normal_(std=0.02))

    def bias(self, distance: Tensor) -> Tensor:
        return self.table[:, t5_bucket(distance.long(), self.buckets, self.max_distance)]  # (H, N)


def t5_bucket(distance: Tensor, buckets: int, max_distance: int) -> Tensor:
    """Bucket of each distance (…) int64, boundaries in fp32 as in the published code; (…) int64."""
    exact_ones = buckets // 2
    far = torch.log(distance.clamp(min=1).float() / exact_ones) / math.log(max_distance / exact_ones)
    far = exact_ones + (far * (buckets - exact_ones)).long()
    return torch.where(distance < exact_ones, distance, far.clamp(max=buckets - 1))

"""`T5`: a learned attention bias for each bucket of distances."""

import math

import torch
from torch import Tensor, nn

from kerple.positions.base import Position, Shape


class T5(Position):
    """Learned bias ``b_h[bucket(d)]`` of head h for each bucket of distances d (Raffel et al. 2020, arXiv 1910.10683, §
    2.1).

    Buckets in the first half contain one distance each. The sizes of the other buckets grow geometrically. The
    last bucket also contains all distances from ``max_distance`` on. Biases are initialised from N(0, 0.02²). As for
    all strategies here, and unlike in T5, scores are divided by √δ, where δ is the head dimension.

    Parameters: `buckets * H`, shared by all layers. Cost: one (H, T) table per forward pass.

    Args:
        shape: Sizes of the model.
        buckets: Number of buckets, 2 or more.
        max_distance: All distances from this one on are in the last bucket; more than half of ``buckets``.

    Raises:
        UserError: If ``buckets`` or ``max_distance`` is out of range.
    """

    shift_invariant = True

    def __init__(self, shape: Shape, buckets: int = 32, max_distance: int = 128) -> None:
        super().__init__()
        self.require(buckets >= 2, "buckets", buckets, "2 or more, such as 32")
        expected = f"more than {buckets // 2}, half the number of buckets"
        self.require(max_distance > buckets // 2, "max_distance", max_distance, expected)
        self.buckets, self.max_distance = buckets, max_distance
        self.table = nn.Parameter(torch.empty(shape.heads, buckets, dtype=torch.float32).normal_(std=0.02))

    def bias(self, distance: Tensor) -> Tensor:
        return self.table[:, t5_bucket(distance.long(), self.buckets, self.max_distance)]  # (H, N)


def t5_bucket(distance: Tensor, buckets: int, max_distance: int) -> Tensor:
    """Return the bucket of each distance, (…) int64 -> (…) int64, computed in fp32 as in the published code."""
    exact = buckets // 2  # number of buckets with one distance
    fraction = torch.log(distance.clamp(min=1).float() / exact) / math.log(max_distance / exact)
    bucket = exact + (fraction * (buckets - exact)).long()
    return torch.where(distance < exact, distance, bucket.clamp(max=buckets - 1))

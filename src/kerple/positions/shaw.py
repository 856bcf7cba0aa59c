"""`Shaw`: learned vectors of the clipped distance, added to keys and values."""

import torch
from torch import Tensor, nn

from kerple.positions.base import Position, Shape
from kerple.positions.fp32_matmul import precise
from kerple.positions.token_positions import TokenPositions


class Shaw(Position):
    """Learned vectors of the clipped distance, added to keys and values (Shaw et al. 2018, arXiv 1803.02155, § 3).

    At distance d, the score is ``q·(k + a^K[min(d, clip)]) / √δ`` and the value is ``v + a^V[min(d, clip)]``, where δ
    is the head dimension. Attention is causal, so that negative distances need no vectors. The vectors a^K and a^V are
    initialised by `torch.nn.init.xavier_uniform_`.

    Parameters: `2 * (clip + 1) * δ`, shared by heads, one set per layer by default.
    Cost: explicit scores of keys at distances below ``clip``, with ``clip`` + 1 inner products per query. Attention to
    farther keys is fused.

    Args:
        shape: Sizes of the model.
        clip: Larger distances use the vectors of this distance. With 0 the scores do not depend on the distance.

    Raises:
        UserError: If ``clip`` is negative.
    """

    shift_invariant = True
    per_layer = True

    def __init__(self, shape: Shape, clip: int = 16) -> None:
        super().__init__()
        self.require(clip >= 0, "clip", clip, "a distance of 0 or more, such as 16")
        self.clip = clip
        self.key_vectors = nn.Parameter(torch.empty(clip + 1, shape.head_dim, dtype=torch.float32))
        self.value_vectors = nn.Parameter(torch.empty(clip + 1, shape.head_dim, dtype=torch.float32))
        nn.init.xavier_uniform_(self.key_vectors)
        nn.init.xavier_uniform_(self.value_vectors)

    def query_bias(self, q: Tensor, state: Tensor | None, positions: TokenPositions) -> tuple[Tensor, Tensor]:
        return precise(q), self.key_vectors.T * self.key_vectors.shape[-1] ** -0.5

    def value_bias(self) -> Tensor:
        return self.value_vectors

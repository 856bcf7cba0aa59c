"""`StickBreaking`: attention weights from a stick-breaking process instead of a softmax."""

import math

import torch
from torch import Tensor
from torch.nn import functional as F

from kerple.positions.base import Position, Shape
from kerple.positions.token_positions import AttentionWeights, QueryKeyBlock

SCORES_AT_ONCE = 2**17  # small enough for the cache of a CPU
HIDDEN_SCORE = -1e4  # σ(-1e4) is 0


class StickBreaking(Position):
    """``A_mn = σ(z_mn) · Π_{n < l < m} (1 - σ(z_ml))`` for n < m, z = q·k / √δ (Tan et al. 2025, arXiv 2410.17980,
    section 2).

    Starting from the key before the query, each key takes the fraction σ(z) of the remaining weight. The final
    remainder is discarded, or given to the query's own value (``rest``), as in the paper's appendix. Without ``rest``
    the weights sum to less than 1.

    Parameters: `0`. Cost: explicit scores, and a logarithm and a cumulative sum for each of them.

    Args:
        shape: Sizes of the model.
        rest: Whether the query's own value gets the remainder.
    """

    shift_invariant = True

    def __init__(self, shape: Shape, rest: bool = False) -> None:
        super().__init__()
        self.rest = rest

    def modify_scores(self, s: Tensor, q: Tensor, k: Tensor, block: QueryKeyBlock) -> AttentionWeights:
        own_key = block.queries.rows[:, None] == block.keys.rows  # (Tq, Tk)
        return AttentionWeights(StickBreakingWeights.apply(s, block.seen & ~own_key, own_key if self.rest else None))


class StickBreakingWeights(torch.autograd.Function):
    """Attention weights A (B, H, Tq, Tk) from scores z of the same shape.

    ``before`` (Tq, Tk) bool is true for seen keys before the query. ``rest`` (Tq, Tk) bool is true for the key that
    gets the remainder, or None.

    With c_n = Σ_{n <= l < m} log(1 - σ(z_l)), A_n = exp(z_n + c_n), because log σ(z) = z + log(1 - σ(z)). Let
    w = A ∘ grad. dA_n/dz_l = -A_n · σ(z_l) for l > n, so that the gradient of z_l is w_l - σ(z_l) · Σ_{n <= l} w_n.
    """

    @staticmethod
    def forward(ctx, z: Tensor, before: Tensor, rest: Tensor | None) -> Tensor:
        z = z.masked_fill(~before, HIDDEN_SCORE)
        weights = torch.cat([_weights(part, rest) for part in _parts(z)]).view(z.shape)
        ctx.save_for_backward(z, weights, rest)
        return weights

    @staticmethod
    def backward(ctx, grad: Tensor):
        z, weights, rest = ctx.saved_tensors
        parts = zip(_parts(z), _parts(weights), _parts(grad), strict=True)
        return torch.cat([_gradient(*part, rest) for part in parts]).view(z.shape), None, None


def _parts(x: Tensor) -> tuple[Tensor, ...]:
    """Split (B, H, Tq, Tk) into tensors (·, Tq, Tk) that fit the cache of a CPU; no split on other devices."""
    head_size = x[0, 0].numel()
    heads = max(1, SCORES_AT_ONCE // head_size) if x.device.type == "cpu" else x[..., 0, 0].numel()
    return x.flatten(0, 1).split(heads)


def _weights(z: Tensor, rest: Tensor | None) -> Tensor:
    # -c_n, summed from the nearest key on, so that weights of near keys are precise
    logs = F.softplus(z, threshold=40).flip(-1).cumsum_(-1)
    minimum = math.log(torch.finfo(z.dtype).tiny) + 7  # exp of smaller numbers is many times slower
    weights = (z - logs.flip(-1)).clamp_(min=minimum).exp_()
    weights = F.threshold(weights, 2 * math.exp(minimum), 0.0, inplace=True)
    return weights if rest is None else torch.where(rest, (-logs[..., -1:]).exp(), weights)


def _gradient(z: Tensor, weights: Tensor, grad: Tensor, rest: Tensor | None) -> Tensor:
    w = weights * grad
    if rest is None:
        return w.addcmul_(w.cumsum(-1), z.sigmoid(), value=-1)
    sums = w.masked_fill(rest, 0).cumsum(-1).add_((w * rest).sum(-1, keepdim=True))
    return w.masked_fill(rest, 0).addcmul_(sums, z.sigmoid(), value=-1)

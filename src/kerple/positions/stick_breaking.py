"""`StickBreaking`: attention weights from a stick-breaking process instead of a softmax."""

import math

import torch
from torch import Tensor
from torch.nn import functional as F

from kerple.base.errors import require
from kerple.positions.base import Position, Shape
from kerple.positions.token_positions import AttentionWeights, QueryKeyBlock

SCORES_AT_ONCE = 2**17  # number of scores that fit the cache of a CPU
HIDDEN_SCORE = -1e4  # its sigmoid is 0 in fp32 and fp64


class StickBreaking(Position):
    """Attention weights ``A_mn = σ(z_mn) · Π_{n < l < m} (1 - σ(z_ml))`` of query m and keys n < m with scores z (Tan
    et al. 2025, arXiv 2410.17980, section 2).

    z = q·k / √δ are the scores, where δ is the head dimension. From the key before the query back to the first key,
    each key takes the fraction σ(z) of the remaining weight. With ``rest`` the final remainder is the weight of the
    query's own value (appendix of Tan et al.). By default the remainder is discarded, and weights sum to less than 1.

    Parameters: `0`. Cost: explicit scores, a logarithm for each score, and a cumulative sum over the keys.

    Args:
        shape: Sizes of the model.
        rest: Whether the query's own value gets the remainder. If False, the weight of the query's own value is 0.
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
    gets the remainder; it is None if the remainder is discarded.

    For query m, let c_n = Σ_{n <= l < m} log(1 - σ(z_l)). Then A_n = exp(z_n + c_n), because
    log σ(z) = z + log(1 - σ(z)). The derivatives are dA_n/dz_n = A_n · (1 - σ(z_n)), and dA_n/dz_l = -A_n · σ(z_l) for
    l > n. Let w_n = A_n · dloss/dA_n. Then dloss/dz_l = w_l - σ(z_l) · Σ_{n <= l} w_n.
    """

    @staticmethod
    def forward(ctx, z: Tensor, before: Tensor, rest: Tensor | None) -> Tensor:
        z = z.masked_fill(~before, HIDDEN_SCORE)
        weights = torch.cat([_weights(part, rest) for part in _parts(z)]).view(z.shape)
        ctx.save_for_backward(z, weights, rest)
        return weights

    @staticmethod
    def backward(ctx, grad: Tensor):
        # `once_differentiable` raises no error if autograd.grad differentiates a gradient
        once = torch.compiler.is_compiling() or not torch.is_grad_enabled()
        require(once, "create_graph", True, "False: the weights of StickBreaking have no second derivatives")
        z, weights, rest = ctx.saved_tensors
        parts = zip(_parts(z), _parts(weights), _parts(grad), strict=True)
        return torch.cat([_gradient(*part, rest) for part in parts]).view(z.shape), None, None


def _parts(x: Tensor) -> tuple[Tensor, ...]:
    """Split x (B, H, Tq, Tk) into tensors (heads, Tq, Tk) that fit the cache of a CPU; one tensor on other devices."""
    x = x.flatten(0, 1)  # (B·H, Tq, Tk)
    return x.split(max(1, SCORES_AT_ONCE // x[0].numel()) if x.device.type == "cpu" else len(x))


def _weights(z: Tensor, rest: Tensor | None) -> Tensor:
    """Return the weights of a part, which has the scores z (heads, Tq, Tk)."""
    # -c_n, from the last key to the first; sums that begin at the nearest key keep the weights of near keys precise
    minus_c = F.softplus(z, threshold=40).flip(-1).cumsum_(-1)
    minimum = math.log(torch.finfo(z.dtype).tiny) + 7  # exp is many times slower below about log(tiny); 7 is a margin
    weights = (z - minus_c.flip(-1)).clamp_(min=minimum).exp_()
    weights = F.threshold(weights, 2 * math.exp(minimum), 0.0, inplace=True)
    return weights if rest is None else torch.where(rest, (-minus_c[..., -1:]).exp(), weights)


def _gradient(z: Tensor, weights: Tensor, grad: Tensor, rest: Tensor | None) -> Tensor:
    """Return the gradient of the scores z of a part from the gradient of its weights."""
    w = weights * grad
    if rest is None:
        return w.addcmul_(w.cumsum(-1), z.sigmoid(), value=-1)
    sums = w.masked_fill(rest, 0).cumsum(-1).add_((w * rest).sum(-1, keepdim=True))
    return w.masked_fill(rest, 0).addcmul_(sums, z.sigmoid(), value=-1)

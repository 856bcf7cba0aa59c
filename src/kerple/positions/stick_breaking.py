"""`StickBreaking`: attention in which each key takes a share of what the keys nearer to the query have left."""

import math

import torch
from torch import Tensor
from torch.nn import functional as F

from kerple.positions.base import Position, Shape
from kerple.positions.token_positions import AttentionWeights, QueryKeyBlock

SCORES_AT_ONCE = 2**17  # so that they stay in the cache of a CPU
NEVER = -1e4  # a score whose σ is 0


class StickBreaking(Position):
    """``A_mn = σ(z_mn) · Π_{n < l < m} (1 - σ(z_ml))`` for n < m, z = q·k / √δ (Tan et al. 2025, arXiv 2410.17980,
    section 2).

    A query does not see itself. What is left of the stick goes nowhere, or to the query's own value (``rest``), as in
    the paper's appendix. There is no softmax: the shares add up to 1 less what is left.

    Parameters: `0`. Cost: explicit scores, one logarithm and one running sum for each, and a backward pass of its own.

    Args:
        shape: Sizes of the model.
        rest: Whether what is left goes to the query's own value.
    """

    shift_invariant = True

    def __init__(self, shape: Shape, rest: bool = False) -> None:
        super().__init__()
        self.rest = rest

    def modify_scores(self, s: Tensor, q: Tensor, k: Tensor, block: QueryKeyBlock) -> AttentionWeights:
        itself = block.queries.rows[:, None] == block.keys.rows  # (Tq, Tk)
        return AttentionWeights(Stick.apply(s, block.seen & ~itself, itself if self.rest else None))


class Stick(torch.autograd.Function):
    """The share of each key, (B, H, Tq, Tk), from scores z of that shape.

    ``before`` is true for the keys before each query that it sees, (Tq, Tk) bool, and ``rest`` for the key that gets
    what is left of the stick; None if no key gets it.

    With c_n = Σ_{n <= l < m} log(1 - σ(z_l)), A_n = exp(z_n + c_n), because log σ(z) = z + log(1 - σ(z)); and with
    w = A ∘ grad, the gradient of z_l is w_l - σ(z_l) · Σ_{n <= l} w_n, as A_n falls by σ(z_l) for every l from n on.
    """

    @staticmethod
    def forward(ctx, z: Tensor, before: Tensor, rest: Tensor | None) -> Tensor:
        z = z.masked_fill(~before, NEVER)
        shares = torch.cat([_shares(part, rest) for part in _parts(z)]).view(z.shape)
        ctx.save_for_backward(z, shares, rest)
        return shares

    @staticmethod
    def backward(ctx, grad: Tensor):
        z, shares, rest = ctx.saved_tensors
        parts = zip(_parts(z), _parts(shares), _parts(grad), strict=True)
        return torch.cat([_gradient(*part, rest) for part in parts]).view(z.shape), None, None


def _parts(x: Tensor) -> tuple[Tensor, ...]:
    """Split (B, H, Tq, Tk) into tensors (·, Tq, Tk); on a CPU, so small ones that each stays in its cache."""
    of_head = x[0, 0].numel()
    return x.flatten(0, 1).split(max(1, SCORES_AT_ONCE // of_head) if x.device.type == "cpu" else x[..., 0, 0].numel())


def _shares(z: Tensor, rest: Tensor | None) -> Tensor:
    # -c_n, summed from the nearest key on, so that near keys are precise
    logs = F.softplus(z, threshold=40).flip(-1).cumsum_(-1)
    least = math.log(torch.finfo(z.dtype).tiny) + 7  # exp of smaller numbers is many times slower
    shares = (z - logs.flip(-1)).clamp_(min=least).exp_()
    shares = F.threshold(shares, 2 * math.exp(least), 0.0, inplace=True)
    return shares if rest is None else torch.where(rest, (-logs[..., -1:]).exp(), shares)


def _gradient(z: Tensor, shares: Tensor, grad: Tensor, rest: Tensor | None) -> Tensor:
    w = shares * grad
    if rest is None:
        return w.addcmul_(w.cumsum(-1), z.sigmoid(), value=-1)
    farther = w.masked_fill(rest, 0).cumsum(-1).add_((w * rest).sum(-1, keepdim=True))
    return w.masked_fill(rest, 0).addcmul_(farther, z.sigmoid(), value=-1)

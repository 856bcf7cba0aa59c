"""Attention that breaks a stick: the nearest key that wants it takes its share first."""

import math

import torch
from torch import Tensor
from torch.nn import functional as F

from kerple.positions.base import Position, Shape
from kerple.positions.pairs import Pairs, Shares


class StickBreaking(Position):
    """``A_mn = σ(z_mn) · Π_{n < l < m} (1 - σ(z_ml))`` for n < m, z = q·k / √δ (Tan et al. 2025, arXiv 2410.17980,
    section 2).

    A query does not see itself. What is left of the stick goes nowhere, or to the query's own value (``rest``), as in
    the paper's appendix. There is no softmax: the shares add up to 1 less what is left.

    Parameters: `0`. Cost: explicit scores, one logarithm and one running sum for each, and a backward pass of its own.

    Args:
        shape: What the model hands to every strategy.
        rest: Whether what is left goes to the query's own value.
    """

    shift_invariant = True

    def __init__(self, shape: Shape, rest: bool = False) -> None:
        super().__init__()
        self.rest = rest

    def mix(self, s: Tensor, q: Tensor, k: Tensor, pairs: Pairs) -> Shares:
        own = pairs.queries.rows[:, None] == pairs.keys.rows  # (Tq, Tk)
        return Shares(Stick.apply(s, pairs.seen & ~own, own if self.rest else None))


class Stick(torch.autograd.Function):
    """Shares (B, H, Tq, Tk) of scores z of that shape; which keys come before, (Tq, Tk) bool, and get the rest.

    With c_n = Σ_{n <= l < m} log(1 - σ(z_l)), A_n = exp(z_n + c_n), because log σ(z) = z + log(1 - σ(z)); and with
    w = A ∘ grad, the gradient of z_l is w_l - σ(z_l) · Σ_{n <= l} w_n, as A_n falls by σ(z_l) for every l from n on.
    """

    @staticmethod
    def forward(ctx, z: Tensor, before: Tensor, rest: Tensor | None) -> Tensor:  # type: ignore[override]
        left = F.logsigmoid(-z).masked_fill_(~before, 0)
        left = left.flip(-1).cumsum_(-1).flip(-1)  # from the nearest key on, so that near ones are precise
        of_all = left[..., :1].exp() if rest is not None else None
        least = math.log(torch.finfo(z.dtype).tiny) + 7  # below it the processor is many times slower
        nothing = (left.add_(z) < least).logical_or_(~before)
        shares = left.clamp_(min=least).exp_().masked_fill_(nothing, 0)
        if rest is not None:
            shares = torch.where(rest, of_all, shares)
        ctx.save_for_backward(z, shares, before, rest)
        return shares

    @staticmethod
    def backward(ctx, grad: Tensor):  # type: ignore[override]
        z, shares, before, rest = ctx.saved_tensors
        w = shares * grad
        of_rest = 0 if rest is None else (w * rest).sum(-1, keepdim=True)
        farther = (w if rest is None else w.masked_fill(rest, 0)).cumsum(-1).add_(of_rest)
        return w.sub_(farther.mul_(z.sigmoid())).masked_fill_(~before, 0), None, None

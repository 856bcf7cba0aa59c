"""`pair_network`: a network of two layers on the scores and biases of all heads, for each pair of query and key.

A layer may also read the neighbours of a key. Queries are computed in pieces, so that not all activations of the hidden
layer are stored at once. B is the batch size, H the number of heads, Tq the number of queries and Tk the number of
keys. n is the number of pairs of a piece, and taps the number of keys that a layer reads for one output, an odd number:
the key itself and its neighbours on both sides.
"""

import torch
from torch import Tensor
from torch.nn import functional as F

from kerple.positions.fp32_matmul import full_precision

HIDDEN_AT_ONCE = 2**18  # activations (B, hidden, n) of a piece of several queries on a CPU at most; they fit the cache
HIDDEN_AT_ONCE_ON_GPU = 2**26  # larger than on a CPU, because each piece costs several kernel launches
SLOPE = 0.01  # slope of LeakyReLU for negative numbers


@torch.library.custom_op("kerple::pair_network", mutates_args=())
def pair_network(s: Tensor, b: Tensor, seen: Tensor, w1_s: Tensor, w1_b: Tensor, b1: Tensor, w2: Tensor) -> Tensor:
    """Return ``w2 * LeakyReLU(w1_s * s + w1_b * b + b1)`` without autocast and TF32; ``*`` is a convolution over keys.

    With one tap, the result for a pair depends on this pair only. With several, the caller sets ``s`` and ``b`` of
    unseen keys to 0, and the hidden units of unseen keys are set to 0 here. The result has first derivatives, but no
    second derivatives. All arguments except ``seen`` have the dtype of ``s``.

    Args:
        s: Scores (B, H, Tq, Tk), fp32 or fp64.
        b: Biases by distance, (H, Tq, Tk) if they are equal for the whole batch, else (B, H, Tq, Tk).
        seen: Which keys each query sees, (Tq, Tk) bool or (B, 1, Tq, Tk).
        w1_s: Weight of the first layer for the scores, (hidden, taps * H). Its columns ``t * H`` to ``t * H + H - 1``
            multiply the scores of key ``k + t - taps // 2`` for the hidden units of key k.
        w1_b: Weight of the first layer for the biases, (hidden, taps * H), in the order of ``w1_s``.
        b1: Bias vector of the first layer, (hidden,).
        w2: Weight of the second layer, (taps * H, hidden). Its rows ``t * H`` to ``t * H + H - 1`` multiply the hidden
            units of key k for the result of key ``k + t - taps // 2``.

    Returns:
        (B, H, Tq, Tk).
    """
    result = torch.empty_like(s)
    taps, keys = len(w2) // s.shape[1], s.shape[-1]
    with full_precision(s.device):
        for rows in _pieces(s, len(b1)):
            s_piece, b_piece = (_neighbours(x[..., rows, :], taps) for x in (s, b))
            hidden = _zero_unseen(_hidden(s_piece, b_piece, w1_s, w1_b, b1), seen[..., rows, :], taps)
            result[..., rows, :] = _sum_of_neighbours(w2.expand(len(s), -1, -1).bmm(hidden), taps, keys)
    return result


@torch.library.custom_op("kerple::pair_network_backward", mutates_args=())
def pair_network_backward(
    grad: Tensor, s: Tensor, b: Tensor, seen: Tensor, w1_s: Tensor, w1_b: Tensor, b1: Tensor, w2: Tensor
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Return the gradients of all arguments of `pair_network` except ``seen``.

    ``grad`` (B, H, Tq, Tk) is the gradient of its result.
    """
    d_s, d_b = torch.empty_like(s), torch.empty_like(b)
    d_w1_s, d_w1_b, d_b1, d_w2 = (torch.zeros_like(x) for x in (w1_s, w1_b, b1, w2))
    w2_t, w1_s_t = (x.mT.expand(len(s), -1, -1) for x in (w2, w1_s))
    taps, keys = len(w2) // s.shape[1], s.shape[-1]
    with full_precision(s.device):
        for rows in _pieces(s, len(b1)):
            grad_piece, s_piece, b_piece = (_neighbours(x[..., rows, :], taps) for x in (grad, s, b))
            seen_piece = seen[..., rows, :]
            # (B, hidden, n), not stored in the forward pass
            hidden = _zero_unseen(_hidden(s_piece, b_piece, w1_s, w1_b, b1), seen_piece, taps)
            d_w2 += grad_piece.bmm(hidden.mT).sum(0)
            d_hidden = torch.ops.aten.leaky_relu_backward(w2_t.bmm(grad_piece), hidden, SLOPE, True)
            d_hidden = _zero_unseen(d_hidden, seen_piece, taps)
            d_s[..., rows, :] = _sum_of_neighbours(w1_s_t.bmm(d_hidden), taps, keys)
            d_w1_s += d_hidden.bmm(s_piece.mT).sum(0)
            d_b_hidden = d_hidden.sum_to_size(*b_piece.shape[:-2], *d_hidden.shape[1:])  # (hidden, n) or (B, hidden, n)
            d_b[..., rows, :] = _sum_of_neighbours(w1_b.mT @ d_b_hidden, taps, keys)
            d_w1_b += (d_b_hidden @ b_piece.mT).sum_to_size(w1_b.shape)
            d_b1 += d_b_hidden.sum(-1).sum_to_size(b1.shape)
    return d_s, d_b, d_w1_s, d_w1_b, d_b1, d_w2


def _pieces(s: Tensor, hidden: int) -> list[slice]:
    """Return the queries of each piece, for a network with this number of hidden units."""
    batch, _, queries, keys = s.shape
    at_once = HIDDEN_AT_ONCE if s.device.type == "cpu" else HIDDEN_AT_ONCE_ON_GPU
    size = max(1, at_once // (batch * hidden * keys))
    return [slice(i, i + size) for i in range(0, queries, size)]


def _hidden(s: Tensor, b: Tensor, w1_s: Tensor, w1_b: Tensor, b1: Tensor) -> Tensor:
    """Return the activations of the hidden layer (B, hidden, n) for `_neighbours` of scores and biases."""
    b_hidden = w1_b @ b + b1[:, None]  # (hidden, n), or (B, hidden, n)
    size = (len(s), len(b1), s.shape[-1])
    return F.leaky_relu_(torch.baddbmm(b_hidden.expand(size), w1_s.expand(len(s), -1, -1), s), SLOPE)


def _zero_unseen(hidden: Tensor, seen: Tensor, taps: int) -> Tensor:
    """Set the hidden units (B, hidden, n) of unseen keys to 0, in place, if neighbours read them."""
    return hidden if taps == 1 else hidden.mul_(seen.flatten(-2).to(hidden.dtype))  # faster than masked_fill_


def _neighbours(x: Tensor, taps: int) -> Tensor:
    """Return x (…, c, queries, Tk) of each key and its neighbours, (…, taps * c, n); 0 outside of the keys."""
    if taps == 1:
        return x.flatten(-2)
    shifts = (i - taps // 2 for i in range(taps))
    return torch.cat([F.pad(x, (-shift, shift)) for shift in shifts], -3).flatten(-2)


def _sum_of_neighbours(y: Tensor, taps: int, keys: int) -> Tensor:
    """Return the transpose of `_neighbours` of y (…, taps * c, n), (…, c, queries, Tk)."""
    y = y.unflatten(-1, (-1, keys))
    if taps == 1:
        return y
    shifts = (i - taps // 2 for i in range(taps))
    return torch.stack([F.pad(x, (shift, -shift)) for x, shift in zip(y.chunk(taps, -3), shifts, strict=True)]).sum(0)


@pair_network.register_fake
def _(s, b, seen, w1_s, w1_b, b1, w2):
    return torch.empty_like(s)


@pair_network_backward.register_fake
def _(grad, s, b, seen, w1_s, w1_b, b1, w2):
    return tuple(torch.empty_like(x) for x in (s, b, w1_s, w1_b, b1, w2))


def _backward(ctx, grad: Tensor) -> tuple[Tensor | None, ...]:
    d_s, d_b, *d_weights = pair_network_backward(grad.contiguous(), *ctx.saved_tensors)
    return d_s, d_b, None, *d_weights


pair_network.register_autograd(_backward, setup_context=lambda ctx, inputs, output: ctx.save_for_backward(*inputs))

"""`pair_network`: a network of two layers on the scores and biases of all heads, for each pair of query and key.

Pairs are computed in pieces, so that not all activations of the hidden layer are stored at once. N is the number of
pairs of a sequence, and n the number of pairs of a piece. B is the batch size, and H the number of heads.
"""

import torch
from torch import Tensor
from torch.nn import functional as F

from kerple.positions.fp32_matmul import full_precision

HIDDEN_AT_ONCE = 2**18  # largest number of activations (B, hidden, n) of a piece on a CPU; they fit the cache
HIDDEN_AT_ONCE_ON_GPU = 2**26  # larger than on a CPU, because each piece costs several kernel launches
SLOPE = 0.01  # slope of LeakyReLU for negative numbers


@torch.library.custom_op("kerple::pair_network", mutates_args=())
def pair_network(s: Tensor, b: Tensor, w1: Tensor, b1: Tensor, w2: Tensor) -> Tensor:
    """Return ``w2 · LeakyReLU(w1 · [s; b] + b1)`` for each pair, without autocast and TF32.

    The result has first derivatives, but no second derivatives. All arguments have the dtype of ``s``.

    Args:
        s: Scores (B, H, N), fp32 or fp64.
        b: Biases by distance, (H, N) if they are equal for the whole batch, else (B, H, N).
        w1: Weight of the first layer, (hidden, 2H).
        b1: Bias vector of the first layer, (hidden,).
        w2: Weight of the second layer, (H, hidden).

    Returns:
        (B, H, N).
    """
    result, w2 = torch.empty_like(s), w2.expand(len(s), -1, -1)
    with full_precision(s.device):
        for piece in _pieces(s, len(b1)):
            result[..., piece] = w2.bmm(_hidden(s[..., piece], b[..., piece], w1, b1))
    return result


@torch.library.custom_op("kerple::pair_network_backward", mutates_args=())
def pair_network_backward(
    grad: Tensor, s: Tensor, b: Tensor, w1: Tensor, b1: Tensor, w2: Tensor
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Return the gradients of all arguments of `pair_network`; ``grad`` (B, H, N) is the gradient of its result."""
    w1_s, w1_b = w1.chunk(2, -1)  # (hidden, H) each
    d_s, d_b = torch.empty_like(s), torch.empty_like(b)
    d_w1_s, d_w1_b, d_b1, d_w2 = (torch.zeros_like(x) for x in (w1_s, w1_b, b1, w2))
    w2_t, w1_s_t = (x.mT.expand(len(s), -1, -1) for x in (w2, w1_s))
    with full_precision(s.device):
        for piece in _pieces(s, len(b1)):
            grad_piece, s_piece, b_piece = (x[..., piece] for x in (grad, s, b))
            hidden = _hidden(s_piece, b_piece, w1, b1)  # (B, hidden, n), not stored in the forward pass
            d_w2 += grad_piece.bmm(hidden.mT).sum(0)
            d_hidden = torch.ops.aten.leaky_relu_backward(w2_t.bmm(grad_piece), hidden, SLOPE, True)
            d_s[..., piece] = w1_s_t.bmm(d_hidden)
            d_w1_s += d_hidden.bmm(s_piece.mT).sum(0)
            d_b_hidden = d_hidden.sum_to_size(*b.shape[:-2], *d_hidden.shape[1:])  # (hidden, n), or (B, hidden, n)
            d_b[..., piece] = w1_b.mT @ d_b_hidden
            d_w1_b += (d_b_hidden @ b_piece.mT).sum_to_size(w1_b.shape)
            d_b1 += d_b_hidden.sum(-1).sum_to_size(b1.shape)
    return d_s, d_b, torch.cat([d_w1_s, d_w1_b], -1), d_b1, d_w2


def _pieces(s: Tensor, hidden: int) -> list[slice]:
    """Return the pairs of each piece, for a network with this number of hidden units."""
    size = max(1, (HIDDEN_AT_ONCE if s.device.type == "cpu" else HIDDEN_AT_ONCE_ON_GPU) // (len(s) * hidden))
    return [slice(i, i + size) for i in range(0, s.shape[-1], size)]


def _hidden(s: Tensor, b: Tensor, w1: Tensor, b1: Tensor) -> Tensor:
    """Return the activations of the hidden layer, (B, hidden, n), for a piece."""
    w1_s, w1_b = w1.chunk(2, -1)
    b_hidden = w1_b @ b + b1[:, None]  # (hidden, n), or (B, hidden, n)
    size = (len(s), len(b1), s.shape[-1])
    return F.leaky_relu_(torch.baddbmm(b_hidden.expand(size), w1_s.expand(len(s), -1, -1), s), SLOPE)


@pair_network.register_fake
def _(s, b, w1, b1, w2):
    return torch.empty_like(s)


@pair_network_backward.register_fake
def _(grad, s, b, w1, b1, w2):
    return tuple(torch.empty_like(x) for x in (s, b, w1, b1, w2))


def _backward(ctx, grad: Tensor) -> tuple[Tensor, ...]:
    return pair_network_backward(grad.contiguous(), *ctx.saved_tensors)


pair_network.register_autograd(_backward, setup_context=lambda ctx, inputs, output: ctx.save_for_backward(*inputs))

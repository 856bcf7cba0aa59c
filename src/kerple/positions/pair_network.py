"""A small network over the heads at each pair of query and key, computed in pieces that fit the CPU's cache."""

import torch
from torch import Tensor
from torch.nn import functional as F

from kerple.positions.products import unrounded

HIDDEN = 2**18  # hidden numbers of a piece on a CPU
MANY = 2**26  # the same elsewhere, where each piece costs some launches
SLOPE = 0.01  # of LeakyReLU


@torch.library.custom_op("kerple::pair_network", mutates_args=())
def pair_network(s: Tensor, b: Tensor, into: Tensor, bias: Tensor, out: Tensor) -> Tensor:
    """Compute ``out · LeakyReLU(into · [s; b] + bias)`` at each of N pairs, unrounded by autocast and TF32.

    It can be differentiated once.


    Args:
        s: (B, H, N), fp32 or fp64 with all others.
        b: (H, N) where a batch shares it, or (B, H, N).
        into: (hidden, 2H).
        bias: (hidden,).
        out: (H, hidden).

    Returns:
        (B, H, N).
    """
    result, out = torch.empty_like(s), out.expand(len(s), -1, -1)
    with unrounded(s.device):
        for piece in _pieces(s, len(bias)):
            result[..., piece] = out.bmm(_hidden(s[..., piece], b[..., piece], into, bias))
    return result


@torch.library.custom_op("kerple::pair_network_backward", mutates_args=())
def pair_network_backward(
    grad: Tensor, s: Tensor, b: Tensor, into: Tensor, bias: Tensor, out: Tensor
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Compute the gradients of all arguments of `pair_network`."""
    of_s, of_b = into.chunk(2, -1)  # (hidden, H) each
    d_s, d_b = torch.empty_like(s), torch.empty_like(b)
    d_of_s, d_of_b, d_bias, d_out = (torch.zeros_like(x) for x in (of_s, of_b, bias, out))
    back, into_s = (x.mT.expand(len(s), -1, -1) for x in (out, of_s))
    with unrounded(s.device):
        for piece in _pieces(s, len(bias)):
            g, s_, b_ = (x[..., piece] for x in (grad, s, b))
            hidden = _hidden(s_, b_, into, bias)  # (B, hidden, n), made again
            d_out += g.bmm(hidden.mT).sum(0)
            d_hidden = torch.ops.aten.leaky_relu_backward(back.bmm(g), hidden, SLOPE, True)
            d_s[..., piece] = into_s.bmm(d_hidden)
            d_of_s += d_hidden.bmm(s_.mT).sum(0)
            d_biased = d_hidden.sum_to_size(*b.shape[:-2], *d_hidden.shape[1:])  # (…, hidden, n) of the bias' shape
            d_b[..., piece] = of_b.mT @ d_biased
            d_of_b += (d_biased @ b_.mT).sum_to_size(of_b.shape)
            d_bias += d_biased.sum(-1).sum_to_size(bias.shape)
    return d_s, d_b, torch.cat([d_of_s, d_of_b], -1), d_bias, d_out


def _pieces(s: Tensor, hidden: int) -> list[slice]:
    size = max(1, (HIDDEN if s.device.type == "cpu" else MANY) // (len(s) * hidden))
    return [slice(i, i + size) for i in range(0, s.shape[-1], size)]


def _hidden(s: Tensor, b: Tensor, into: Tensor, bias: Tensor) -> Tensor:
    of_s, of_b = into.chunk(2, -1)
    of_biases = of_b @ b + bias[:, None]  # (hidden, n), made once for a batch that shares them, or (B, hidden, n)
    size = (len(s), len(bias), s.shape[-1])
    return F.leaky_relu_(torch.baddbmm(of_biases.expand(size), of_s.expand(len(s), -1, -1), s), SLOPE)


@pair_network.register_fake
def _(s, b, into, bias, out):
    return torch.empty_like(s)


@pair_network_backward.register_fake
def _(grad, s, b, into, bias, out):
    return tuple(torch.empty_like(x) for x in (s, b, into, bias, out))


def _save(ctx, inputs, output) -> None:
    ctx.save_for_backward(*inputs)


def _backward(ctx, grad: Tensor) -> tuple[Tensor, ...]:
    return pair_network_backward(grad.contiguous(), *ctx.saved_tensors)


pair_network.register_autograd(_backward, setup_context=_save)

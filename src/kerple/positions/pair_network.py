"""`pair_network`: a small network over the heads for each pair of query and key, computed in pieces."""

import torch
from torch import Tensor
from torch.nn import functional as F

from kerple.positions.products import full_precision

HIDDEN = 2**18  # number of hidden units of a piece on a CPU, which fit its cache
HIDDEN_ON_GPU = 2**26  # larger, because each piece costs several kernel launches
SLOPE = 0.01  # of LeakyReLU


@torch.library.custom_op("kerple::pair_network", mutates_args=())
def pair_network(s: Tensor, b: Tensor, into: Tensor, bias: Tensor, out: Tensor) -> Tensor:
    """Return ``out · LeakyReLU(into · [s; b] + bias)`` for each of N pairs, without autocast and TF32.

    It can be differentiated once.

    Args:
        s: (B, H, N), fp32 or fp64, which is the dtype of all arguments.
        b: (H, N) if equal for the whole batch, else (B, H, N).
        into: (hidden, 2H).
        bias: (hidden,).
        out: (H, hidden).

    Returns:
        (B, H, N).
    """
    result, out = torch.empty_like(s), out.expand(len(s), -1, -1)
    with full_precision(s.device):
        for piece in _pieces(s, len(bias)):
            result[..., piece] = out.bmm(_hidden(s[..., piece], b[..., piece], into, bias))
    return result


@torch.library.custom_op("kerple::pair_network_backward", mutates_args=())
def pair_network_backward(
    grad: Tensor, s: Tensor, b: Tensor, into: Tensor, bias: Tensor, out: Tensor
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Return the gradients of all arguments of `pair_network`."""
    s_weight, b_weight = into.chunk(2, -1)  # (hidden, H) each
    d_s, d_b = torch.empty_like(s), torch.empty_like(b)
    d_s_weight, d_b_weight, d_bias, d_out = (torch.zeros_like(x) for x in (s_weight, b_weight, bias, out))
    out_t, s_weight_t = (x.mT.expand(len(s), -1, -1) for x in (out, s_weight))
    with full_precision(s.device):
        for piece in _pieces(s, len(bias)):
            g, s_, b_ = (x[..., piece] for x in (grad, s, b))
            hidden = _hidden(s_, b_, into, bias)  # (B, hidden, n), computed again
            d_out += g.bmm(hidden.mT).sum(0)
            d_hidden = torch.ops.aten.leaky_relu_backward(out_t.bmm(g), hidden, SLOPE, True)
            d_s[..., piece] = s_weight_t.bmm(d_hidden)
            d_s_weight += d_hidden.bmm(s_.mT).sum(0)
            d_b_hidden = d_hidden.sum_to_size(*b.shape[:-2], *d_hidden.shape[1:])  # ((B,) hidden, n), as b
            d_b[..., piece] = b_weight.mT @ d_b_hidden
            d_b_weight += (d_b_hidden @ b_.mT).sum_to_size(b_weight.shape)
            d_bias += d_b_hidden.sum(-1).sum_to_size(bias.shape)
    return d_s, d_b, torch.cat([d_s_weight, d_b_weight], -1), d_bias, d_out


def _pieces(s: Tensor, hidden: int) -> list[slice]:
    size = max(1, (HIDDEN if s.device.type == "cpu" else HIDDEN_ON_GPU) // (len(s) * hidden))
    return [slice(i, i + size) for i in range(0, s.shape[-1], size)]


def _hidden(s: Tensor, b: Tensor, into: Tensor, bias: Tensor) -> Tensor:
    s_weight, b_weight = into.chunk(2, -1)
    b_hidden = b_weight @ b + bias[:, None]  # ((B,) hidden, n), as b
    size = (len(s), len(bias), s.shape[-1])
    return F.leaky_relu_(torch.baddbmm(b_hidden.expand(size), s_weight.expand(len(s), -1, -1), s), SLOPE)


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

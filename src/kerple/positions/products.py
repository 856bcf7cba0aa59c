"""Products of matrices in full precision, which strategies use so that neither autocast nor TF32 rounds them."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor


def precise(x: Tensor) -> Tensor:
    """x in fp32, or unchanged in fp64: what biases, angles and scores are computed in."""
    return x if x.dtype == torch.float64 else x.float()


def product(a: Tensor, b: Tensor) -> Tensor:
    """``a @ b``, (…, m, k) times (…, k, n), in fp32 (fp64 for fp64) whatever autocast and the matmul precision say.

    TF32, which ``torch.set_float32_matmul_precision("high")`` switches on, keeps 11 bits of each factor.
    """
    a, b = precise(a), precise(b)
    dtype = torch.promote_types(a.dtype, b.dtype)
    return _product(a.to(dtype), b.to(dtype))


@contextmanager
def unrounded(device: torch.device) -> Iterator[None]:
    """Context in which products are computed without autocast and TF32.

    It is for the inside of custom operators: elsewhere a compiled network would leave it out.
    """
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("highest")
    try:
        with torch.autocast(device.type, enabled=False):
            yield
    finally:
        torch.set_float32_matmul_precision(before)


@torch.library.custom_op("kerple::product", mutates_args=())
def _product(a: Tensor, b: Tensor) -> Tensor:
    with unrounded(a.device):
        return torch.matmul(a, b).contiguous()


@_product.register_fake
def _(a: Tensor, b: Tensor) -> Tensor:
    return torch.matmul(a, b).contiguous()


def _save(ctx, inputs, output) -> None:
    ctx.save_for_backward(*inputs)


def _backward(ctx, grad: Tensor) -> tuple[Tensor | None, Tensor | None]:
    a, b = ctx.saved_tensors
    of_a, of_b = ctx.needs_input_grad
    return (
        _product(grad, b.mT).sum_to_size(a.shape) if of_a else None,
        _product(a.mT, grad).sum_to_size(b.shape) if of_b else None,
    )


_product.register_autograd(_backward, setup_context=_save)

"""Products of matrices in full precision, without rounding by autocast or TF32."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor
from torch.autograd.forward_ad import unpack_dual

from kerple.base.errors import UserError


def precise(x: Tensor) -> Tensor:
    """Return x in fp32, or unchanged if it is fp64."""
    return x if x.dtype == torch.float64 else x.float()


def refuse_tangents(*tensors: Tensor | None) -> None:
    """Raise a UserError in forward-mode differentiation, because custom operators would return tangents of 0."""
    if torch.compiler.is_compiling():
        return
    if any(x is not None and unpack_dual(x).tangent is not None for x in tensors):
        raise UserError("jvp: got differentiation in forward mode, expected reverse mode: torch.autograd.grad")


def product(a: Tensor, b: Tensor) -> Tensor:
    """Return ``a @ b``, (…, m, k) times (…, k, n), in fp32, or in fp64 if a factor is fp64.

    Autocast and TF32 do not affect the result. TF32 would round each factor to 11 significant bits.
    ``torch.set_float32_matmul_precision("high")`` enables TF32.
    """
    refuse_tangents(a, b)
    a, b = precise(a), precise(b)
    dtype = torch.promote_types(a.dtype, b.dtype)
    return _product(a.to(dtype), b.to(dtype))


@contextmanager
def full_precision(device: torch.device) -> Iterator[None]:
    """Context in which products are computed without autocast and TF32.

    Use it only inside custom operators, because torch.compile ignores it in other code.
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
    with full_precision(a.device):
        return torch.matmul(a, b).contiguous()


@_product.register_fake
def _(a: Tensor, b: Tensor) -> Tensor:
    return torch.matmul(a, b).contiguous()


def _backward(ctx, grad: Tensor) -> tuple[Tensor | None, Tensor | None]:
    a, b = ctx.saved_tensors
    a_needs_grad, b_needs_grad = ctx.needs_input_grad
    return (
        _product(grad, b.mT).sum_to_size(a.shape) if a_needs_grad else None,
        _product(a.mT, grad).sum_to_size(b.shape) if b_needs_grad else None,
    )


_product.register_autograd(_backward, setup_context=lambda ctx, inputs, output: ctx.save_for_backward(*inputs))

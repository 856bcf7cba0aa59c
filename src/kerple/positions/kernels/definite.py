"""Numerical checks of whether a kernel is conditionally positive definite."""

from collections.abc import Callable

import torch
from torch import Tensor

from kerple.base.errors import UserError


def is_conditionally_positive_definite(
    kernel: Callable[[Tensor], Tensor], points: Tensor, tolerance: float = 1e-9
) -> bool:
    """Whether a kernel is CPD on these points: whether the doubly centred Gram matrix has no negative eigenvalue.

    Args:
        kernel: A `Kernel`, or any function of distances (M,) fp64 -> (M,) or (H, M); all H must pass.
        points: (N,) or (N, dimensions), computed in fp64.
        tolerance: How far below zero an eigenvalue may be, relative to the largest magnitude among them.
    """
    gram = _gram(kernel, points)  # (H, N, N)
    centred = gram - gram.mean(-1, keepdim=True) - gram.mean(-2, keepdim=True) + gram.mean((-1, -2), keepdim=True)
    smallest, largest = _extremes(centred)  # (H,) each
    return bool((smallest >= -tolerance * torch.maximum(largest, gram.abs().amax((-1, -2)))).all())


def positive_definite_offset(kernel: Callable[[Tensor], Tensor], points: Tensor, tolerance: float = 1e-9) -> float:
    """The first c of 1, 2, 4, … for which kernel + c is positive semi-definite on these points, for every head.

    The paper's lemma (section 3) holds if no Σ c_m c_n k(m, n) with Σ c_m = 0 and c ≠ 0 vanishes: -d² is CPD, but has
    such sums on three points of a line, and no offset. Softmax cancels the offset, so no strategy needs it.

    Args:
        kernel: As in `is_conditionally_positive_definite`.
        points: (N,) or (N, dimensions), all different, computed in fp64.
        tolerance: How far below zero an eigenvalue may be, relative to the largest entry of the kernel.

    Raises:
        UserError: If no such c is found before fp64 stops telling one from another: the kernel is not CPD, or -d².
    """
    gram = _gram(kernel, points)  # (H, N, N)
    allowed = tolerance * gram.abs().amax((-1, -2)).clamp(min=1.0)  # (H,)
    offset = 1.0
    while offset * gram.shape[-1] * torch.finfo(gram.dtype).eps < allowed.min():
        if bool((_extremes(gram + offset)[0] >= -allowed).all()):
            return offset
        offset *= 2
    raise UserError(
        f"kernel: no offset up to {offset:g} makes it positive semi-definite on the {gram.shape[-1]} points, expected "
        "a conditionally positive definite kernel; see is_conditionally_positive_definite"
    )


@torch.no_grad()
def _gram(kernel: Callable[[Tensor], Tensor], points: Tensor) -> Tensor:
    places = points.detach().double().reshape(len(points), -1)  # (N, dimensions)
    distance = (places[:, None] - places).norm(dim=-1)  # (N, N)
    return kernel(distance.flatten()).double().reshape(-1, *distance.shape)  # (H, N, N)


def _extremes(matrices: Tensor) -> tuple[Tensor, Tensor]:
    values = torch.linalg.eigvalsh(matrices)  # (H, N)
    return values[:, 0], values.abs().amax(-1)

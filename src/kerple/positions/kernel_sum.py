"""`KernelSum`: sums of kernels of distance, and the check that a kernel is conditionally positive definite.

A kernel k(d) of the distance d = |m - n| of points m and n is conditionally positive definite (CPD) if
``Σ_mn c_m c_n k(|m - n|) >= 0`` for all numbers c with ``Σ_m c_m = 0``. Sums and non-negative multiples of CPD kernels
are CPD (Chi et al. 2022, arXiv 2205.09921, section 3).
"""

from collections.abc import Callable, Sequence
from typing import cast

import torch
from torch import Tensor, nn

from kerple.positions.base import Position, Shape, StrategyBuilder, is_distance_bias
from kerple.positions.kerple import KerpleLog, KerplePower


class KernelSum(Position):
    """Bias ``Σ_i factor_i · k_i(d)``, where k_i is the bias of strategy i at distance d. The sum must be a
    conditionally positive definite kernel.

    `KernelSum` does not multiply scores. To multiply them by a function of distance too, use `Combined`.

    Parameters: `0`, and those of the kernels; shared by all layers.
    Cost: one (H, T) table per forward pass for each kernel.

    Args:
        shape: Sizes of the model.
        kernels: Functions that build strategies from the shape. Each strategy must be only a bias by distance, such as
            KerpleLog or a class of your project.
        factors: A non-negative number for each kernel; None means that all are 1.

    Raises:
        UserError: If there is no kernel, a kernel is not only a bias by distance, or the initial sum is not
            conditionally positive definite at distances 0 to 63. If a factor is negative, or the numbers of factors and
            kernels differ.
    """

    shift_invariant = True

    def __init__(
        self,
        shape: Shape,
        kernels: Sequence[StrategyBuilder] = (KerpleLog, KerplePower),
        factors: list[float] | None = None,
    ) -> None:
        super().__init__()
        self.kernels = cast(Sequence[Position], nn.ModuleList(build(shape) for build in kernels))
        self.factors = [1.0] * len(self.kernels) if factors is None else factors
        names = [type(kernel).__name__ for kernel in self.kernels]
        only_biases = bool(names) and all(map(is_distance_bias, self.kernels))
        self.require(only_biases, "kernels", names, "one or more biases by distance, such as KerpleLog")
        valid = len(self.factors) == len(names) and all(factor >= 0 for factor in self.factors)
        self.require(valid, "factors", factors, f"{len(names)} numbers of 0 or more, one per kernel")
        points = torch.arange(64.0)  # on the meta device tensors have no values to check
        definite = points.is_meta or is_conditionally_positive_definite(self.bias, points)
        self.require(definite, "kernels", names, "conditionally positive definite kernels, such as KerpleLog")

    def bias(self, distance: Tensor) -> Tensor:
        tables = [cast(Tensor, kernel.bias(distance)) for kernel in self.kernels]
        products = [factor * table for factor, table in zip(self.factors, tables, strict=True)]  # (H, N) each
        return torch.stack(products).sum(0)


@torch.no_grad()
def is_conditionally_positive_definite(kernel: Callable[[Tensor], Tensor], points: Tensor) -> bool:
    """Whether a kernel is CPD on these points: the doubly centred Gram matrix has no negative eigenvalue.

    A negative eigenvalue counts as a rounding error if its magnitude is at most 1e-9 of the largest magnitude of an
    eigenvalue or an entry of the Gram matrix.

    Args:
        kernel: Function from N distances (N,) fp64 to values (N,) or, for H heads, (H, N), such as the method `bias` of
            a strategy. Each head must be CPD.
        points: Points (N,) or (N, dimensions), whose Euclidean distances are the arguments of the kernel.
    """
    points = points.detach().double().reshape(len(points), -1)  # (N, dimensions)
    distance = (points[:, None] - points).norm(dim=-1)  # (N, N)
    gram = kernel(distance.flatten()).double().reshape(-1, *distance.shape)  # (H, N, N)
    if not gram.isfinite().all():  # such as 1/d at distance 0
        return False
    centred = gram - gram.mean(-1, keepdim=True) - gram.mean(-2, keepdim=True) + gram.mean((-1, -2), keepdim=True)
    eigenvalues = torch.linalg.eigvalsh(centred)  # (H, N)
    largest = torch.maximum(eigenvalues.abs().amax(-1), gram.abs().amax((-1, -2)))  # (H,)
    return bool((eigenvalues[:, 0] >= -1e-9 * largest).all())

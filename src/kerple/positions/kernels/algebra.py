"""`Sum` and `Scaled`: kernels that are made of other kernels."""

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, cast

import torch
from torch import Tensor, nn

from kerple.base.errors import UserError
from kerple.positions.kernels.kernel import Kernel, Start

if TYPE_CHECKING:
    from kerple.positions.modules import Modules


class Sum(Kernel):
    """``k_1(d) + k_2(d) + …``; CPD if all of them are. Written ``k_1 + k_2`` in Python.

    Args:
        heads: Number of heads H.
        kernels: Builders of the kernels, each given H.

    Raises:
        UserError: If there are none.
    """

    def __init__(self, heads: int, kernels: Sequence[Callable[[int], Kernel]]) -> None:
        super().__init__(heads)
        if not kernels:
            raise UserError("Sum: kernels: got none, expected at least one kernel")
        self.kernels = cast("Modules[Kernel]", nn.ModuleList(build(heads) for build in kernels))
        self.conditionally_positive_definite = all(k.conditionally_positive_definite for k in self.kernels)

    def forward(self, distance: Tensor) -> Tensor:
        return torch.stack([kernel(distance) for kernel in self.kernels]).sum(0)  # (H, N)


class Scaled(Kernel):
    """``factor · k(d)``, factor >= 0; CPD if k is. Written ``factor * k`` in Python.

    Args:
        heads: Number of heads H.
        kernel: Builder of the kernel, given H.
        factor: Start if learned, else its value: one number, or one per head. None draws from U(0, 1) if learned,
            else is 1.
        learn: Whether it is learned, which adds H parameters.
        floor: Lower bound of a learned factor.

    Raises:
        UserError: If a factor is negative, or below the floor if learned.
    """

    factor: Tensor

    def __init__(
        self,
        heads: int,
        kernel: Callable[[int], Kernel],
        factor: Start = None,
        learn: bool = False,
        floor: float = 0.01,
    ) -> None:
        super().__init__(heads)
        self.kernel = kernel(heads)
        self.conditionally_positive_definite = self.kernel.conditionally_positive_definite
        if learn:
            self.draw("factor", factor, 1.0, floor)
        else:
            self.fix("factor", 1.0 if factor is None else factor, minimum=0.0)

    def forward(self, distance: Tensor) -> Tensor:
        return self.factor[:, None] * self.kernel(distance)  # (H, N)

"""`Power`, `Log` and `Gaussian`: the basic kernels."""

import torch
from torch import Tensor

from kerple.positions.kernels.kernel import Kernel, Start


class Power(Kernel):
    """``-strength · d^exponent``, strength >= floor, floor <= exponent <= 2. CPD. ALiBi is exponent 1.

    Args:
        heads: Number of heads H; 2 H parameters, H if the exponent is not learned.
        strength: Start; None draws from U(0, 1).
        exponent: Start, or its value if not learned; None draws from U(0, 2), or is 1 if not learned.
        learn_exponent: Whether it is learned; None is yes.
        floor: Lower bound of both.
    """

    conditionally_positive_definite = True
    strength: Tensor
    exponent: Tensor

    def __init__(
        self,
        heads: int,
        strength: Start = None,
        exponent: Start = None,
        learn_exponent: bool | None = None,
        floor: float = 0.01,
    ) -> None:
        super().__init__(heads)
        self.draw("strength", strength, 1.0, floor)
        self.set_exponent(exponent, learn_exponent is not False, 1.0, floor)

    def forward(self, distance: Tensor) -> Tensor:
        return -self.strength[:, None] * distance ** self.exponent[:, None]  # (H, N)


class Log(Kernel):
    """``-strength · log(1 + rate · d^exponent)``, strength, rate >= floor, floor <= exponent <= 2. CPD.

    Args:
        heads: Number of heads H; 2 H parameters, 3 H if the exponent is learned.
        strength: Start; None draws from U(0, 2).
        rate: Start; None draws from U(0, 1).
        exponent: Start, or its value if not learned; None draws from U(0, 2), or is 1 if not learned.
        learn_exponent: Whether it is learned; None is no.
        floor: Lower bound of all three.
    """

    conditionally_positive_definite = True
    strength: Tensor
    rate: Tensor
    exponent: Tensor

    def __init__(
        self,
        heads: int,
        strength: Start = None,
        rate: Start = None,
        exponent: Start = None,
        learn_exponent: bool | None = None,
        floor: float = 0.01,
    ) -> None:
        super().__init__(heads)
        self.draw("strength", strength, 2.0, floor)
        self.draw("rate", rate, 1.0, floor)
        self.set_exponent(exponent, bool(learn_exponent), 1.0, floor)

    def forward(self, distance: Tensor) -> Tensor:
        grown = distance ** self.exponent[:, None]  # (H, N)
        return -self.strength[:, None] * torch.log1p(self.rate[:, None] * grown)  # (H, N)


class Gaussian(Kernel):
    """``exp(-rate · d^exponent)``, rate >= floor, floor <= exponent <= 2. Positive definite, so CPD.

    Args:
        heads: Number of heads H; H parameters, 2 H if the exponent is learned.
        rate: Start; None draws from U(0, 1).
        exponent: Start, or its value if not learned; None draws from U(0, 2), or is 2 if not learned.
        learn_exponent: Whether it is learned; None is no.
        floor: Lower bound of both.
    """

    conditionally_positive_definite = True
    rate: Tensor
    exponent: Tensor

    def __init__(
        self,
        heads: int,
        rate: Start = None,
        exponent: Start = None,
        learn_exponent: bool | None = None,
        floor: float = 0.01,
    ) -> None:
        super().__init__(heads)
        self.draw("rate", rate, 1.0, floor)
        self.set_exponent(exponent, bool(learn_exponent), 2.0, floor)

    def forward(self, distance: Tensor) -> Tensor:
        return torch.exp(-self.rate[:, None] * distance ** self.exponent[:, None])  # (H, N)

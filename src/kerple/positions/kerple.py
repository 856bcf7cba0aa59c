"""KERPLE: the eight kernels of distance of its paper (Chi et al. 2022, arXiv 2205.09921), under the paper's names.

Power and log are in section 4, the others in tables 5 and 6. A kernel of the distance d is added to the score
q·k / √δ, or multiplied with it, as in the authors' code. Their equation also divides the kernel by √δ. The constant
that makes a conditionally positive definite kernel positive definite is omitted, because softmax cancels it.

The parameters r1, r2, … have one number per head, and all layers share them. An option of the same name sets their
initial value: one number for all heads, or a list with one number per head. None draws random numbers between
``floor`` and the upper end of the paper's range. After each optimiser step `constrain_` clamps all parameters to at
least ``floor``, and exponents to at most 2.
"""

from abc import abstractmethod

import torch
from torch import Tensor

from kerple.positions.base import Position, Shape
from kerple.positions.constrained import HUGE, Start


class KerpleKernel(Position):
    """Base class of the eight kernels: shift-invariant, with a positive lower bound of the parameters.

    Args:
        shape: Sizes of the model.
        floor: Lower bound of the parameters.
        parameters: Initial value, upper end of random initial values and upper bound of each parameter, in the order of
            the random draws.

    Raises:
        UserError: If ``floor`` is not positive.
    """

    shift_invariant = True
    r1: Tensor
    r2: Tensor
    r3: Tensor
    r4: Tensor

    @abstractmethod
    def __init__(self, shape: Shape, floor: float, **parameters: tuple[Start, float, float]) -> None:
        super().__init__()
        self.require(floor > 0, "floor", floor, "a positive number; the paper's code uses 0.01")
        for name, (start, top, maximum) in parameters.items():
            self.learn(name, shape.heads, start, between=(floor, top), minimum=floor, maximum=maximum)


class KerpleLog(KerpleKernel):
    """Bias ``-r1_h · log(1 + r2_h · d)``, r1, r2 >= floor: the best kernel of the paper.

    Parameters: `2 * H`, shared by all layers. Cost: one (H, T) table per forward pass.

    Args:
        shape: Sizes of the model.
        r1: Start of the strength; None draws from U(0, 2).
        r2: Start of the rate; None draws from U(0, 1).
        floor: Lower bound of both, positive.

    Raises:
        UserError: If a start is out of range, or there is neither one nor H of it.
    """

    def __init__(self, shape: Shape, r1: Start = None, r2: Start = None, floor: float = 0.01) -> None:
        super().__init__(shape, floor, r1=(r1, 2.0, HUGE), r2=(r2, 1.0, HUGE))

    def bias(self, distance: Tensor) -> Tensor:
        return -self.r1[:, None] * torch.log1p(self.r2[:, None] * distance)  # (H, N)


class KerplePower(KerpleKernel):
    """Bias ``-r1_h · d^r2_h``, r1, r2 >= floor, r2 <= 2. ALiBi is r2 = 1.

    Parameters: `2 * H`, shared by all layers. Cost: one (H, T) table per forward pass.

    Args:
        shape: Sizes of the model.
        r1: Start of the strength; None draws from U(0, 1).
        r2: Start of the exponent; None draws from U(0, 2).
        floor: Lower bound of both, positive.

    Raises:
        UserError: If a start is out of range, or there is neither one nor H of it.
    """

    def __init__(self, shape: Shape, r1: Start = None, r2: Start = None, floor: float = 0.01) -> None:
        super().__init__(shape, floor, r1=(r1, 1.0, HUGE), r2=(r2, 2.0, 2.0))

    def bias(self, distance: Tensor) -> Tensor:
        return -self.r1[:, None] * distance ** self.r2[:, None]  # (H, N)


class KerpleLog3(KerpleKernel):
    """Bias ``-r1_h · log(1 + r2_h · d^r3_h)``, all >= floor, r3 <= 2 (the paper's 3-para-log).

    Parameters: `3 * H`, shared by all layers. Cost: one (H, T) table per forward pass.

    Args:
        shape: Sizes of the model.
        r1: Start of the strength; None draws from U(0, 2).
        r2: Start of the rate; None draws from U(0, 1).
        r3: Start of the exponent; None draws from U(0, 2).
        floor: Lower bound of all three, positive.

    Raises:
        UserError: If a start is out of range, or there is neither one nor H of it.
    """

    def __init__(self, shape: Shape, r1: Start = None, r2: Start = None, r3: Start = None, floor: float = 0.01) -> None:
        super().__init__(shape, floor, r1=(r1, 2.0, HUGE), r2=(r2, 1.0, HUGE), r3=(r3, 2.0, 2.0))

    def bias(self, distance: Tensor) -> Tensor:
        power = distance ** self.r3[:, None]  # (H, N)
        return -self.r1[:, None] * torch.log1p(self.r2[:, None] * power)  # (H, N)


class KerpleBias2(KerpleKernel):
    """Bias ``r1_h · exp(-r2_h · d²)``, r1, r2 >= floor (the paper's 2-para-bias).

    The bias fades to 0; in the paper, perplexity explodes beyond twice the training length.

    Parameters: `2 * H`, shared by all layers. Cost: one (H, T) table per forward pass.

    Args:
        shape: Sizes of the model.
        r1: Start of the strength; None draws from U(0, 1).
        r2: Start of the rate; None draws from U(0, 1).
        floor: Lower bound of both, positive.

    Raises:
        UserError: If a start is out of range, or there is neither one nor H of it.
    """

    def __init__(self, shape: Shape, r1: Start = None, r2: Start = None, floor: float = 0.01) -> None:
        # r2 is drawn before r1
        super().__init__(shape, floor, r2=(r2, 1.0, HUGE), r1=(r1, 1.0, HUGE))

    def bias(self, distance: Tensor) -> Tensor:
        return self.r1[:, None] * torch.exp(-self.r2[:, None] * distance**2)  # (H, N)


class KerpleBias3(KerpleKernel):
    """Bias ``r1_h · exp(-r2_h · d^r3_h)``, all >= floor, r3 <= 2 (the paper's 3-para-bias).

    The bias fades to 0; in the paper, perplexity explodes beyond twice the training length.

    Parameters: `3 * H`, shared by all layers. Cost: one (H, T) table per forward pass.

    Args:
        shape: Sizes of the model.
        r1: Start of the strength; None draws from U(0, 1).
        r2: Start of the rate; None draws from U(0, 1).
        r3: Start of the exponent; None draws from U(0, 2).
        floor: Lower bound of all three, positive.

    Raises:
        UserError: If a start is out of range, or there is neither one nor H of it.
    """

    def __init__(self, shape: Shape, r1: Start = None, r2: Start = None, r3: Start = None, floor: float = 0.01) -> None:
        super().__init__(shape, floor, r2=(r2, 1.0, HUGE), r3=(r3, 2.0, 2.0), r1=(r1, 1.0, HUGE))

    def bias(self, distance: Tensor) -> Tensor:
        return self.r1[:, None] * torch.exp(-self.r2[:, None] * distance ** self.r3[:, None])  # (H, N)


class KerpleWeight1(KerpleKernel):
    """Weight ``exp(-r1_h · d²)``, r1 >= floor (the paper's 1-para-wht).

    Parameters: `1 * H`, shared by all layers. Cost: explicit scores, and one (H, T) table per forward pass.

    Args:
        shape: Sizes of the model.
        r1: Start of the rate; None draws from U(0, 1).
        floor: Its lower bound, positive.

    Raises:
        UserError: If a start is out of range, or there is neither one nor H of it.
    """

    def __init__(self, shape: Shape, r1: Start = None, floor: float = 0.01) -> None:
        super().__init__(shape, floor, r1=(r1, 1.0, HUGE))

    def score_scale(self, distance: Tensor) -> Tensor:
        return torch.exp(-self.r1[:, None] * distance**2)  # (H, N)


class KerpleWeight2(KerpleKernel):
    """Weight ``exp(-r1_h · d^r2_h)``, r1, r2 >= floor, r2 <= 2 (the paper's 2-para-wht).

    Parameters: `2 * H`, shared by all layers. Cost: explicit scores, and one (H, T) table per forward pass.

    Args:
        shape: Sizes of the model.
        r1: Start of the rate; None draws from U(0, 1).
        r2: Start of the exponent; None draws from U(0, 2).
        floor: Lower bound of both, positive.

    Raises:
        UserError: If a start is out of range, or there is neither one nor H of it.
    """

    def __init__(self, shape: Shape, r1: Start = None, r2: Start = None, floor: float = 0.01) -> None:
        super().__init__(shape, floor, r1=(r1, 1.0, HUGE), r2=(r2, 2.0, 2.0))

    def score_scale(self, distance: Tensor) -> Tensor:
        return torch.exp(-self.r1[:, None] * distance ** self.r2[:, None])  # (H, N)


class KerpleBiasWeight(KerpleKernel):
    """Bias ``-r1_h · d^r2_h`` and weight ``exp(-r3_h · d^r4_h)``, all >= floor, r2, r4 <= 2 (the paper's bias+wht).

    Parameters: `4 * H`, shared by all layers. Cost: explicit scores, and two (H, T) tables per forward pass.

    Args:
        shape: Sizes of the model.
        r1: Start of the bias's strength; None draws from U(0, 1).
        r2: Start of the bias's exponent; None draws from U(0, 2).
        r3: Start of the weight's rate; None draws from U(0, 1).
        r4: Start of the weight's exponent; None draws from U(0, 2).
        floor: Lower bound of all four, positive.

    Raises:
        UserError: If a start is out of range, or there is neither one nor H of it.
    """

    def __init__(
        self, shape: Shape, r1: Start = None, r2: Start = None, r3: Start = None, r4: Start = None, floor: float = 0.01
    ) -> None:
        super().__init__(shape, floor, r1=(r1, 1.0, HUGE), r2=(r2, 2.0, 2.0), r3=(r3, 1.0, HUGE), r4=(r4, 2.0, 2.0))

    def bias(self, distance: Tensor) -> Tensor:
        return -self.r1[:, None] * distance ** self.r2[:, None]  # (H, N)

    def score_scale(self, distance: Tensor) -> Tensor:
        return torch.exp(-self.r3[:, None] * distance ** self.r4[:, None])  # (H, N)

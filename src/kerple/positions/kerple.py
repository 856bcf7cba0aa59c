"""The eight kernels of KERPLE (Chi et al. 2022, arXiv 2205.09921): functions of the distance d from query to key.

A *bias* is added to the scaled score q·k / √δ, where δ is the head dimension. A *weight* is a factor of the scaled
score. Both are as in the authors' code. In the equation of the paper, the kernel is also divided by √δ. The constant
that makes a conditionally positive definite kernel positive definite is omitted, because softmax cancels it. The power
and log kernels are in section 4 of the paper, the others in its tables 5 and 6.

The parameters r1, r2, … have one number per head h, written r1_h, and all layers share them. An option of the same name
sets their initial value: one number for all heads, or a list with one number per head. If it is None, random numbers
between ``floor`` and the upper end of the paper's range are drawn. After each optimiser step `constrain_` clamps all
parameters to at least ``floor``, and exponents to at most 2.

H is the number of heads, T the number of tokens, and N a number of distances.
"""

from abc import abstractmethod

import torch
from torch import Tensor

from kerple.positions.base import Position, Shape
from kerple.positions.constrained_parameters import HUGE, Start


class KerpleKernel(Position):
    """Base class of the eight kernels.

    Args:
        shape: Sizes of the model.
        floor: Lower bound of the parameters.
        parameters: Initial value, upper end of random initial values, and upper bound of each parameter by name. Random
            values are drawn in the order of these arguments.

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
        self.require(floor > 0, "floor", floor, "a positive number, such as 0.01")
        for name, (start, upper_end, maximum) in parameters.items():
            self.learn(name, shape.heads, start, between=(floor, upper_end), minimum=floor, maximum=maximum)


class KerpleLog(KerpleKernel):
    """Bias ``-r1_h · log(1 + r2_h · d)``: the best kernel of Chi et al.

    Parameters: `2 * H`, shared by all layers. Cost: one (H, T) table per forward pass.

    Args:
        shape: Sizes of the model.
        r1: Initial strength; None draws from U(floor, 2).
        r2: Initial rate; None draws from U(floor, 1).
        floor: Lower bound of both, positive.

    Raises:
        UserError: If ``floor`` or an initial value is out of range, or a list does not have one number per head.
    """

    def __init__(self, shape: Shape, r1: Start = None, r2: Start = None, floor: float = 0.01) -> None:
        super().__init__(shape, floor, r1=(r1, 2.0, HUGE), r2=(r2, 1.0, HUGE))

    def bias(self, distance: Tensor) -> Tensor:
        return -self.r1[:, None] * torch.log1p(self.r2[:, None] * distance)  # (H, N)


class KerplePower(KerpleKernel):
    """Bias ``-r1_h · d^r2_h``. With ``r2 = 1`` it is ALiBi.

    Parameters: `2 * H`, shared by all layers. Cost: one (H, T) table per forward pass.

    Args:
        shape: Sizes of the model.
        r1: Initial strength; None draws from U(floor, 1).
        r2: Initial exponent; None draws from U(floor, 2).
        floor: Lower bound of both, positive.

    Raises:
        UserError: If ``floor`` or an initial value is out of range, or a list does not have one number per head.
    """

    def __init__(self, shape: Shape, r1: Start = None, r2: Start = None, floor: float = 0.01) -> None:
        super().__init__(shape, floor, r1=(r1, 1.0, HUGE), r2=(r2, 2.0, 2.0))

    def bias(self, distance: Tensor) -> Tensor:
        return -self.r1[:, None] * distance ** self.r2[:, None]  # (H, N)


class KerpleLog3(KerpleKernel):
    """Bias ``-r1_h · log(1 + r2_h · d^r3_h)`` (3-para-log in Chi et al.).

    Parameters: `3 * H`, shared by all layers. Cost: one (H, T) table per forward pass.

    Args:
        shape: Sizes of the model.
        r1: Initial strength; None draws from U(floor, 2).
        r2: Initial rate; None draws from U(floor, 1).
        r3: Initial exponent; None draws from U(floor, 2).
        floor: Lower bound of all three, positive.

    Raises:
        UserError: If ``floor`` or an initial value is out of range, or a list does not have one number per head.
    """

    def __init__(self, shape: Shape, r1: Start = None, r2: Start = None, r3: Start = None, floor: float = 0.01) -> None:
        super().__init__(shape, floor, r1=(r1, 2.0, HUGE), r2=(r2, 1.0, HUGE), r3=(r3, 2.0, 2.0))

    def bias(self, distance: Tensor) -> Tensor:
        power = distance ** self.r3[:, None]  # (H, N)
        return -self.r1[:, None] * torch.log1p(self.r2[:, None] * power)  # (H, N)


class KerpleBias2(KerpleKernel):
    """Bias ``r1_h · exp(-r2_h · d²)`` (2-para-bias in Chi et al.).

    The bias approaches 0 at large distances. In Chi et al., perplexity explodes beyond twice the training length.

    Parameters: `2 * H`, shared by all layers. Cost: one (H, T) table per forward pass.

    Args:
        shape: Sizes of the model.
        r1: Initial strength; None draws from U(floor, 1).
        r2: Initial rate; None draws from U(floor, 1).
        floor: Lower bound of both, positive.

    Raises:
        UserError: If ``floor`` or an initial value is out of range, or a list does not have one number per head.
    """

    def __init__(self, shape: Shape, r1: Start = None, r2: Start = None, floor: float = 0.01) -> None:
        # r2 is drawn before r1, so that a seed gives the same initial values as in earlier versions of this project
        super().__init__(shape, floor, r2=(r2, 1.0, HUGE), r1=(r1, 1.0, HUGE))

    def bias(self, distance: Tensor) -> Tensor:
        return self.r1[:, None] * torch.exp(-self.r2[:, None] * distance**2)  # (H, N)


class KerpleBias3(KerpleKernel):
    """Bias ``r1_h · exp(-r2_h · d^r3_h)`` (3-para-bias in Chi et al.).

    The bias approaches 0 at large distances. In Chi et al., perplexity explodes beyond twice the training length.

    Parameters: `3 * H`, shared by all layers. Cost: one (H, T) table per forward pass.

    Args:
        shape: Sizes of the model.
        r1: Initial strength; None draws from U(floor, 1).
        r2: Initial rate; None draws from U(floor, 1).
        r3: Initial exponent; None draws from U(floor, 2).
        floor: Lower bound of all three, positive.

    Raises:
        UserError: If ``floor`` or an initial value is out of range, or a list does not have one number per head.
    """

    def __init__(self, shape: Shape, r1: Start = None, r2: Start = None, r3: Start = None, floor: float = 0.01) -> None:
        super().__init__(shape, floor, r2=(r2, 1.0, HUGE), r3=(r3, 2.0, 2.0), r1=(r1, 1.0, HUGE))

    def bias(self, distance: Tensor) -> Tensor:
        return self.r1[:, None] * torch.exp(-self.r2[:, None] * distance ** self.r3[:, None])  # (H, N)


class KerpleWeight1(KerpleKernel):
    """Factor ``exp(-r1_h · d²)`` of the scaled score (1-para-wht in Chi et al.).

    Parameters: `1 * H`, shared by all layers. Cost: one (H, T) table per forward pass; explicit scores on a GPU.

    Args:
        shape: Sizes of the model.
        r1: Initial rate; None draws from U(floor, 1).
        floor: Lower bound of r1, positive.

    Raises:
        UserError: If ``floor`` or an initial value is out of range, or a list does not have one number per head.
    """

    def __init__(self, shape: Shape, r1: Start = None, floor: float = 0.01) -> None:
        super().__init__(shape, floor, r1=(r1, 1.0, HUGE))

    def score_scale(self, distance: Tensor) -> Tensor:
        return torch.exp(-self.r1[:, None] * distance**2)  # (H, N)


class KerpleWeight2(KerpleKernel):
    """Factor ``exp(-r1_h · d^r2_h)`` of the scaled score (2-para-wht in Chi et al.).

    Parameters: `2 * H`, shared by all layers. Cost: one (H, T) table per forward pass; explicit scores on a GPU.

    Args:
        shape: Sizes of the model.
        r1: Initial rate; None draws from U(floor, 1).
        r2: Initial exponent; None draws from U(floor, 2).
        floor: Lower bound of both, positive.

    Raises:
        UserError: If ``floor`` or an initial value is out of range, or a list does not have one number per head.
    """

    def __init__(self, shape: Shape, r1: Start = None, r2: Start = None, floor: float = 0.01) -> None:
        super().__init__(shape, floor, r1=(r1, 1.0, HUGE), r2=(r2, 2.0, 2.0))

    def score_scale(self, distance: Tensor) -> Tensor:
        return torch.exp(-self.r1[:, None] * distance ** self.r2[:, None])  # (H, N)


class KerpleBiasWeight(KerpleKernel):
    """Bias ``-r1_h · d^r2_h``, and factor ``exp(-r3_h · d^r4_h)`` of the scaled score before the bias is added
    (bias+wht in Chi et al.).

    Parameters: `4 * H`, shared by all layers. Cost: two (H, T) tables per forward pass; explicit scores on a GPU.

    Args:
        shape: Sizes of the model.
        r1: Initial strength of the bias; None draws from U(floor, 1).
        r2: Initial exponent of the bias; None draws from U(floor, 2).
        r3: Initial rate of the weight; None draws from U(floor, 1).
        r4: Initial exponent of the weight; None draws from U(floor, 2).
        floor: Lower bound of all four, positive.

    Raises:
        UserError: If ``floor`` or an initial value is out of range, or a list does not have one number per head.
    """

    def __init__(
        self, shape: Shape, r1: Start = None, r2: Start = None, r3: Start = None, r4: Start = None, floor: float = 0.01
    ) -> None:
        super().__init__(shape, floor, r1=(r1, 1.0, HUGE), r2=(r2, 2.0, 2.0), r3=(r3, 1.0, HUGE), r4=(r4, 2.0, 2.0))

    def bias(self, distance: Tensor) -> Tensor:
        return -self.r1[:, None] * distance ** self.r2[:, None]  # (H, N)

    def score_scale(self, distance: Tensor) -> Tensor:
        return torch.exp(-self.r3[:, None] * distance ** self.r4[:, None])  # (H, N)

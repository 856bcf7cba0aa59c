"""Kernels of distance, and the algebra KERPLE builds strategies from (Chi et al. 2022, arXiv 2205.09921, section 3).

A kernel k(d), d = |m - n|, is conditionally positive definite (CPD) if Σ c_m c_n k(|m - n|) >= 0 whenever Σ c_m = 0.
Sums and non-negative multiples of CPD kernels are CPD. A CPD kernel plus a large enough constant is positive definite
on a finite set of points, and softmax does not see the constant: so a CPD kernel can be added to attention scores as
it is.

A new kernel:

    class Rational(Kernel):
        def __init__(self, heads: int) -> None:
            super().__init__(heads)
            self.learn("rate", heads, 0.1, minimum=0.01)

        def forward(self, distance: Tensor) -> Tensor:
            return -self.rate[:, None] * distance / (1 + distance)
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn

from kerple.errors import UserError
from kerple.positions.constrained import HUGE, Constrained

Start = float | list[float] | None
"""Starting value of a parameter: one for all heads, one per head, or None for a draw from the paper's range."""


class Kernel(Constrained, ABC):
    """One function of distance per head, with learnable parameters kept in their ranges.

    Args:
        heads: Number of heads H; the one positional argument, so that a kernel can be named in a YAML.
    """

    conditionally_positive_definite: bool = False
    """Whether this is claimed for all parameters in range; the tests check every kernel that claims it."""

    def __init__(self, heads: int) -> None:
        super().__init__()
        self.heads = heads

    @abstractmethod
    def forward(self, distance: Tensor) -> Tensor:
        """Distances (N,) >= 0 in fp32 or fp64 -> (H, N)."""

    def __add__(self, other: "Kernel") -> "Sum":
        if other.heads != self.heads:
            raise UserError(f"heads: got kernels of {self.heads} and {other.heads} heads, expected the same number")
        return Sum(self.heads, [lambda _: self, lambda _: other])

    def __mul__(self, factor: float) -> "Scaled":
        return Scaled(self.heads, lambda _: self, factor)

    __rmul__ = __mul__

    def draw(self, name: str, start: Start, upper: float, floor: float, maximum: float = HUGE) -> None:
        """Learn ``name`` (H,) in [floor, maximum], starting at ``start``, or from U(floor, upper) if that is None."""
        if not 0 < floor < upper:
            raise UserError(f"floor: got {floor}, expected a positive number below {upper}; the paper's code uses 0.01")
        self.learn(name, self.heads, start, between=(floor, upper), minimum=floor, maximum=maximum)

    def fix(self, name: str, value: float | list[float], *, minimum: float, maximum: float = HUGE) -> None:
        """Hold ``name`` (H,) at a value in [minimum, maximum], unlearned; it is not in the checkpoint."""
        self.learn(name, self.heads, value, minimum=minimum, maximum=maximum)
        del self.ranges[name]
        self.register_buffer(name, self._parameters.pop(name).detach(), persistent=False)

    # learn_exponent defaults to None in every kernel: jsonargparse carries a default over when a command line changes
    # the class, so a False of Log's would reach Power
    def set_exponent(self, start: Start, learn: bool, usual: float, floor: float) -> None:
        """``exponent`` (H,) in [floor, 2]: learned, from ``start`` or U(floor, 2), or ``start`` or ``usual``, fixed."""
        if learn:
            self.draw("exponent", start, 2.0, floor, maximum=2.0)
        else:
            self.fix("exponent", usual if start is None else start, minimum=floor, maximum=2.0)


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
        self.kernels = nn.ModuleList(build(heads) for build in kernels)
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

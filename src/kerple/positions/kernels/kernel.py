"""`Kernel`: the base class of kernels of distance."""

from abc import ABC, abstractmethod

from torch import Tensor

from kerple.base.errors import UserError
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

    def __add__(self, other: "Kernel") -> "Kernel":
        if other.heads != self.heads:
            raise UserError(f"heads: got kernels of {self.heads} and {other.heads} heads, expected the same number")
        from kerple.positions.kernels.algebra import Sum  # which is made of kernels

        return Sum(self.heads, [lambda _: self, lambda _: other])

    def __mul__(self, factor: float) -> "Kernel":
        from kerple.positions.kernels.algebra import Scaled

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
        fixed = self._parameters.pop(name)
        assert fixed is not None
        self.register_buffer(name, fixed.detach(), persistent=False)

    # learn_exponent defaults to None in every kernel: jsonargparse carries a default over when a command line changes
    # the class, so a False of Log's would reach Power
    def set_exponent(self, start: Start, learn: bool, usual: float, floor: float) -> None:
        """``exponent`` (H,) in [floor, 2]: learned, from ``start`` or U(floor, 2), or ``start`` or ``usual``, fixed."""
        if learn:
            self.draw("exponent", start, 2.0, floor, maximum=2.0)
        else:
            self.fix("exponent", usual if start is None else start, minimum=floor, maximum=2.0)

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

from kerple.positions.kernels.algebra import Scaled, Sum
from kerple.positions.kernels.basic import Gaussian, Log, Power
from kerple.positions.kernels.definite import is_conditionally_positive_definite, positive_definite_offset
from kerple.positions.kernels.kernel import Kernel, Start

__all__ = [
    "Gaussian",
    "Kernel",
    "Log",
    "Power",
    "Scaled",
    "Start",
    "Sum",
    "is_conditionally_positive_definite",
    "positive_definite_offset",
]

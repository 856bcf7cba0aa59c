"""`Kerple`: any kernel of distance as a bias, and any as a weight."""

from collections.abc import Callable

from torch import Tensor

from kerple.base.errors import UserError
from kerple.positions.base import Position, Shape
from kerple.positions.kernels import Kernel, Log

Build = Callable[[int], Kernel]
"""A kernel's class with its options bound, waiting for the number of heads."""


class Kerple(Position):
    """Composite kernel ``q·k / √δ · w_h(d) + b_h(d)`` (Chi et al. 2022, arXiv 2205.09921, section 4).

    The bias is added after the division by √δ, as in the authors' code; their equation divides it too. The constant
    that makes a conditionally positive definite kernel positive definite is not here: softmax cancels it.

    Parameters: `2 * H` for the default, else those of the kernels; shared by all layers.
    Cost: one (H, T) table a forward for each kernel, whatever it computes.

    Args:
        shape: What the model hands to every strategy.
        bias: Builder of the additive kernel b, given H; None for none.
        weight: Builder of the multiplicative kernel w, given H; None for none.

    Raises:
        UserError: If there is neither kernel.
    """

    shift_invariant = True

    def __init__(
        self,
        shape: Shape,
        bias: Build | None = Log,
        weight: Build | None = None,
    ) -> None:
        super().__init__()
        if bias is None and weight is None:
            raise UserError("Kerple: bias, weight: got none for both, expected at least one kernel; or use NoPE")
        self.additive = None if bias is None else bias(shape.heads)
        self.multiplicative = None if weight is None else weight(shape.heads)

    def uses(self, hook: str) -> bool:
        kernels = {"bias": self.additive, "weight": self.multiplicative}
        return kernels[hook] is not None if hook in kernels else super().uses(hook)

    def bias(self, distance: Tensor) -> Tensor | None:
        return None if self.additive is None else self.additive(distance)  # (H, N)

    def weight(self, distance: Tensor) -> Tensor | None:
        return None if self.multiplicative is None else self.multiplicative(distance)  # (H, N)

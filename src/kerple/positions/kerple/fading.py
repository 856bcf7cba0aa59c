"""`KerpleBias2` and `KerpleBias3`: biases that fade to 0 with the distance.

Source: Chi et al. 2022, arXiv 2205.09921, table 5. In the paper, perplexity with them explodes beyond twice the
training length.
"""

from operator import attrgetter

from kerple.positions.base import Shape
from kerple.positions.kernels import Gaussian, Scaled, Start
from kerple.positions.kerple.composite import Kerple


class KerpleBias2(Kerple):
    """``q·k / √δ + r1_h · exp(-r2_h · d²)``, r1, r2 >= floor (the paper's 2-para-bias).

    The bias fades to 0; in the paper, perplexity explodes beyond twice the training length.

    Parameters: `2 * H`, shared by all layers. Cost: one (H, T) table a forward.

    Args:
        shape: What the model hands to every strategy.
        r1: Start of the strength; one number or one per head, None draws from U(0, 1).
        r2: Start of the rate; None draws from U(0, 1).
        floor: Lower bound of all of them, positive.

    Raises:
        UserError: If a start is out of range, or there is neither one nor H of it.
    """

    r1 = property(attrgetter("additive.factor"))
    r2 = property(attrgetter("additive.kernel.rate"))

    def __init__(self, shape: Shape, r1: Start = None, r2: Start = None, floor: float = 0.01) -> None:
        super().__init__(
            shape,
            lambda heads: Scaled(heads, lambda h: Gaussian(h, r2, floor=floor), r1, True, floor),
            None,
        )


class KerpleBias3(Kerple):
    """``q·k / √δ + r1_h · exp(-r2_h · d^r3_h)``, all >= floor, r3 <= 2 (the paper's 3-para-bias).

    The bias fades to 0; in the paper, perplexity explodes beyond twice the training length.

    Parameters: `3 * H`, shared by all layers. Cost: one (H, T) table a forward.

    Args:
        shape: What the model hands to every strategy.
        r1: Start of the strength; one number or one per head, None draws from U(0, 1).
        r2: Start of the rate; None draws from U(0, 1).
        r3: Start of the exponent; None draws from U(0, 2).
        floor: Lower bound of all of them, positive.

    Raises:
        UserError: If a start is out of range, or there is neither one nor H of it.
    """

    r1 = property(attrgetter("additive.factor"))
    r2 = property(attrgetter("additive.kernel.rate"))
    r3 = property(attrgetter("additive.kernel.exponent"))

    def __init__(self, shape: Shape, r1: Start = None, r2: Start = None, r3: Start = None, floor: float = 0.01) -> None:
        super().__init__(
            shape,
            lambda heads: Scaled(heads, lambda h: Gaussian(h, r2, r3, True, floor), r1, True, floor),
            None,
        )

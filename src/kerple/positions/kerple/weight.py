"""`KerpleWeight1`, `KerpleWeight2` and `KerpleBiasWeight`: weights by distance, the last one with a bias.

Source: Chi et al. 2022, arXiv 2205.09921, tables 5 and 6.
"""

from operator import attrgetter

from kerple.positions.base import Shape
from kerple.positions.kernels import Gaussian, Power, Start
from kerple.positions.kerple.composite import Kerple


class KerpleWeight1(Kerple):
    """``q·k / √δ · exp(-r1_h · d²)``, r1 >= floor (the paper's 1-para-wht).

    Parameters: `1 * H`, shared by all layers. Cost: one (H, T) table a forward.

    Args:
        shape: What the model hands to every strategy.
        r1: Start of the rate; one number or one per head, None draws from U(0, 1).
        floor: Lower bound of all of them, positive.

    Raises:
        UserError: If a start is out of range, or there is neither one nor H of it.
    """

    r1 = property(attrgetter("multiplicative.rate"))

    def __init__(self, shape: Shape, r1: Start = None, floor: float = 0.01) -> None:
        super().__init__(shape, None, lambda heads: Gaussian(heads, r1, floor=floor))


class KerpleWeight2(Kerple):
    """``q·k / √δ · exp(-r1_h · d^r2_h)``, r1, r2 >= floor, r2 <= 2 (the paper's 2-para-wht).

    Parameters: `2 * H`, shared by all layers. Cost: one (H, T) table a forward.

    Args:
        shape: What the model hands to every strategy.
        r1: Start of the rate; one number or one per head, None draws from U(0, 1).
        r2: Start of the exponent; None draws from U(0, 2).
        floor: Lower bound of all of them, positive.

    Raises:
        UserError: If a start is out of range, or there is neither one nor H of it.
    """

    r1 = property(attrgetter("multiplicative.rate"))
    r2 = property(attrgetter("multiplicative.exponent"))

    def __init__(self, shape: Shape, r1: Start = None, r2: Start = None, floor: float = 0.01) -> None:
        super().__init__(shape, None, lambda heads: Gaussian(heads, r1, r2, True, floor))


class KerpleBiasWeight(Kerple):
    """``q·k / √δ · exp(-r3_h · d^r4_h) - r1_h · d^r2_h``, all >= floor, r2, r4 <= 2 (the paper's bias+wht).

    Parameters: `4 * H`, shared by all layers. Cost: two (H, T) tables a forward.

    Args:
        shape: What the model hands to every strategy.
        r1: Start of the bias's strength; one number or one per head, None draws from U(0, 1).
        r2: Start of the bias's exponent; None draws from U(0, 2).
        r3: Start of the weight's rate; None draws from U(0, 1).
        r4: Start of the weight's exponent; None draws from U(0, 2).
        floor: Lower bound of all of them, positive.

    Raises:
        UserError: If a start is out of range, or there is neither one nor H of it.
    """

    r1 = property(attrgetter("additive.strength"))
    r2 = property(attrgetter("additive.exponent"))
    r3 = property(attrgetter("multiplicative.rate"))
    r4 = property(attrgetter("multiplicative.exponent"))

    def __init__(
        self,
        shape: Shape,
        r1: Start = None,
        r2: Start = None,
        r3: Start = None,
        r4: Start = None,
        floor: float = 0.01,
    ) -> None:
        super().__init__(
            shape,
            lambda heads: Power(heads, r1, r2, floor=floor),
            lambda heads: Gaussian(heads, r3, r4, True, floor),
        )

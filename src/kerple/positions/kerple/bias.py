"""`KerpleLog`, `KerplePower` and `KerpleLog3`: biases that grow without bound with the distance.

Source: Chi et al. 2022, arXiv 2205.09921, section 4 and table 5.
"""

from operator import attrgetter

from kerple.positions.base import Shape
from kerple.positions.kernels import Log, Power, Start
from kerple.positions.kerple.composite import Kerple


class KerpleLog(Kerple):
    """``q·k / √δ - r1_h · log(1 + r2_h · d)``, r1, r2 >= floor: the paper's best.

    Parameters: `2 * H`, shared by all layers. Cost: one (H, T) table a forward.

    Args:
        shape: What the model hands to every strategy.
        r1: Start of the strength; one number or one per head, None draws from U(0, 2).
        r2: Start of the rate; None draws from U(0, 1).
        floor: Lower bound of all of them, positive.

    Raises:
        UserError: If a start is out of range, or there is neither one nor H of it.
    """

    r1 = property(attrgetter("additive.strength"))
    r2 = property(attrgetter("additive.rate"))

    def __init__(self, shape: Shape, r1: Start = None, r2: Start = None, floor: float = 0.01) -> None:
        super().__init__(shape, lambda heads: Log(heads, r1, r2, floor=floor), None)


class KerplePower(Kerple):
    """``q·k / √δ - r1_h · d^r2_h``, r1, r2 >= floor, r2 <= 2. ALiBi is r2 = 1.

    Parameters: `2 * H`, shared by all layers. Cost: one (H, T) table a forward.

    Args:
        shape: What the model hands to every strategy.
        r1: Start of the strength; one number or one per head, None draws from U(0, 1).
        r2: Start of the exponent; None draws from U(0, 2).
        floor: Lower bound of all of them, positive.

    Raises:
        UserError: If a start is out of range, or there is neither one nor H of it.
    """

    r1 = property(attrgetter("additive.strength"))
    r2 = property(attrgetter("additive.exponent"))

    def __init__(self, shape: Shape, r1: Start = None, r2: Start = None, floor: float = 0.01) -> None:
        super().__init__(shape, lambda heads: Power(heads, r1, r2, floor=floor), None)


class KerpleLog3(Kerple):
    """``q·k / √δ - r1_h · log(1 + r2_h · d^r3_h)``, all >= floor, r3 <= 2 (the paper's 3-para-log).

    Parameters: `3 * H`, shared by all layers. Cost: one (H, T) table a forward.

    Args:
        shape: What the model hands to every strategy.
        r1: Start of the strength; one number or one per head, None draws from U(0, 2).
        r2: Start of the rate; None draws from U(0, 1).
        r3: Start of the exponent; None draws from U(0, 2).
        floor: Lower bound of all of them, positive.

    Raises:
        UserError: If a start is out of range, or there is neither one nor H of it.
    """

    r1 = property(attrgetter("additive.strength"))
    r2 = property(attrgetter("additive.rate"))
    r3 = property(attrgetter("additive.exponent"))

    def __init__(self, shape: Shape, r1: Start = None, r2: Start = None, r3: Start = None, floor: float = 0.01) -> None:
        super().__init__(shape, lambda heads: Log(heads, r1, r2, r3, True, floor), None)

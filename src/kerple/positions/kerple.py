"""KERPLE: kernels of distance as attention biases and weights, with the paper's eight under their names.

Chi et al. 2022, arXiv 2205.09921: power and log are section 4, the others the variants of tables 5 and 6.
"""

from collections.abc import Callable
from operator import attrgetter

from torch import Tensor

from kerple.errors import UserError
from kerple.positions.base import Position, Shape
from kerple.positions.kernels import Gaussian, Kernel, Log, Power, Scaled, Start

Build = Callable[[int], Kernel]
"""A kernel's class with its options bound, waiting for the number of heads."""


class Kerple(Position):
    """Composite kernel ``q·k / √δ · w_h(d) + b_h(d)`` (Chi et al. 2022, arXiv 2205.09921, section 4).

    The bias is added after the division by √δ, as in the authors' code; their equation divides it too. The constant
    that makes a conditionally positive definite kernel positive definite is not here: softmax cancels it.

    Parameters: `2 * H` for the default, else those of the kernels; shared by all layers unless said otherwise.
    Cost: one (H, T) table a forward for each kernel, whatever it computes.

    Args:
        shape: What the model hands to every strategy.
        bias: Builder of the additive kernel b, given H; None for none.
        weight: Builder of the multiplicative kernel w, given H; None for none.
        share_across_layers: One set of parameters for all layers (yes if None, as in the paper) or one per layer.

    Raises:
        UserError: If there is neither kernel.
    """

    shift_invariant = True

    def __init__(
        self,
        shape: Shape,
        bias: Build | None = Log,
        weight: Build | None = None,
        share_across_layers: bool | None = None,
    ) -> None:
        super().__init__()
        if bias is None and weight is None:
            raise UserError("Kerple: bias and weight: got neither; give at least one kernel, or use NoPE")
        self.share_across_layers = share_across_layers is not False
        self.additive = None if bias is None else bias(shape.heads)
        self.multiplicative = None if weight is None else weight(shape.heads)

    def uses(self, hook: str) -> bool:
        kernels = {"bias": self.additive, "weight": self.multiplicative}
        return kernels[hook] is not None if hook in kernels else super().uses(hook)

    def bias(self, length: int) -> Tensor | None:
        return None if self.additive is None else self.additive(self.distances(length))  # (H, length)

    def weight(self, length: int) -> Tensor | None:
        return None if self.multiplicative is None else self.multiplicative(self.distances(length))  # (H, length)


class KerpleLog(Kerple):
    """``q·k / √δ - r1_h · log(1 + r2_h · d)``, r1, r2 >= floor: the paper's best.

    Parameters: `2 * H`, shared by all layers unless said otherwise. Cost: one (H, T) table a forward.

    Args:
        shape: What the model hands to every strategy.
        r1: Start of the strength; one number or one per head, None draws from U(0, 2).
        r2: Start of the rate; None draws from U(0, 1).
        floor: Lower bound of all of them, positive.
        share_across_layers: One set of parameters for all layers (yes if None) or one per layer.

    Raises:
        UserError: If a start is out of range, or there is neither one nor H of it.
    """

    r1 = property(attrgetter("additive.strength"))
    r2 = property(attrgetter("additive.rate"))

    def __init__(
        self,
        shape: Shape,
        r1: Start = None,
        r2: Start = None,
        floor: float = 0.01,
        share_across_layers: bool | None = None,
    ) -> None:
        super().__init__(shape, lambda heads: Log(heads, r1, r2, floor=floor), None, share_across_layers)


class KerplePower(Kerple):
    """``q·k / √δ - r1_h · d^r2_h``, r1, r2 >= floor, r2 <= 2. ALiBi is r2 = 1.

    Parameters: `2 * H`, shared by all layers unless said otherwise. Cost: one (H, T) table a forward.

    Args:
        shape: What the model hands to every strategy.
        r1: Start of the strength; one number or one per head, None draws from U(0, 1).
        r2: Start of the exponent; None draws from U(0, 2).
        floor: Lower bound of all of them, positive.
        share_across_layers: One set of parameters for all layers (yes if None) or one per layer.

    Raises:
        UserError: If a start is out of range, or there is neither one nor H of it.
    """

    r1 = property(attrgetter("additive.strength"))
    r2 = property(attrgetter("additive.exponent"))

    def __init__(
        self,
        shape: Shape,
        r1: Start = None,
        r2: Start = None,
        floor: float = 0.01,
        share_across_layers: bool | None = None,
    ) -> None:
        super().__init__(shape, lambda heads: Power(heads, r1, r2, floor=floor), None, share_across_layers)


class KerpleLog3(Kerple):
    """``q·k / √δ - r1_h · log(1 + r2_h · d^r3_h)``, all >= floor, r3 <= 2 (the paper's 3-para-log).

    Parameters: `3 * H`, shared by all layers unless said otherwise. Cost: one (H, T) table a forward.

    Args:
        shape: What the model hands to every strategy.
        r1: Start of the strength; one number or one per head, None draws from U(0, 2).
        r2: Start of the rate; None draws from U(0, 1).
        r3: Start of the exponent; None draws from U(0, 2).
        floor: Lower bound of all of them, positive.
        share_across_layers: One set of parameters for all layers (yes if None) or one per layer.

    Raises:
        UserError: If a start is out of range, or there is neither one nor H of it.
    """

    r1 = property(attrgetter("additive.strength"))
    r2 = property(attrgetter("additive.rate"))
    r3 = property(attrgetter("additive.exponent"))

    def __init__(
        self,
        shape: Shape,
        r1: Start = None,
        r2: Start = None,
        r3: Start = None,
        floor: float = 0.01,
        share_across_layers: bool | None = None,
    ) -> None:
        super().__init__(shape, lambda heads: Log(heads, r1, r2, r3, True, floor), None, share_across_layers)


class KerpleBiasWeight(Kerple):
    """``q·k / √δ · exp(-r3_h · d^r4_h) - r1_h · d^r2_h``, all >= floor, r2, r4 <= 2 (the paper's bias+wht).

    Parameters: `4 * H`, shared by all layers unless said otherwise. Cost: two (H, T) tables a forward.

    Args:
        shape: What the model hands to every strategy.
        r1: Start of the bias's strength; one number or one per head, None draws from U(0, 1).
        r2: Start of the bias's exponent; None draws from U(0, 2).
        r3: Start of the weight's rate; None draws from U(0, 1).
        r4: Start of the weight's exponent; None draws from U(0, 2).
        floor: Lower bound of all of them, positive.
        share_across_layers: One set of parameters for all layers (yes if None) or one per layer.

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
        share_across_layers: bool | None = None,
    ) -> None:
        super().__init__(
            shape,
            lambda heads: Power(heads, r1, r2, floor=floor),
            lambda heads: Gaussian(heads, r3, r4, True, floor),
            share_across_layers,
        )


class KerpleBias2(Kerple):
    """``q·k / √δ + r1_h · exp(-r2_h · d²)``, r1, r2 >= floor (the paper's 2-para-bias).

    A bias that fades to 0: beyond twice the training length it explodes.

    Parameters: `2 * H`, shared by all layers unless said otherwise. Cost: one (H, T) table a forward.

    Args:
        shape: What the model hands to every strategy.
        r1: Start of the strength; one number or one per head, None draws from U(0, 1).
        r2: Start of the rate; None draws from U(0, 1).
        floor: Lower bound of all of them, positive.
        share_across_layers: One set of parameters for all layers (yes if None) or one per layer.

    Raises:
        UserError: If a start is out of range, or there is neither one nor H of it.
    """

    r1 = property(attrgetter("additive.factor"))
    r2 = property(attrgetter("additive.kernel.rate"))

    def __init__(
        self,
        shape: Shape,
        r1: Start = None,
        r2: Start = None,
        floor: float = 0.01,
        share_across_layers: bool | None = None,
    ) -> None:
        super().__init__(
            shape,
            lambda heads: Scaled(heads, lambda h: Gaussian(h, r2, floor=floor), r1, True, floor),
            None,
            share_across_layers,
        )


class KerpleBias3(Kerple):
    """``q·k / √δ + r1_h · exp(-r2_h · d^r3_h)``, all >= floor, r3 <= 2 (the paper's 3-para-bias).

    A bias that fades to 0: beyond twice the training length it explodes.

    Parameters: `3 * H`, shared by all layers unless said otherwise. Cost: one (H, T) table a forward.

    Args:
        shape: What the model hands to every strategy.
        r1: Start of the strength; one number or one per head, None draws from U(0, 1).
        r2: Start of the rate; None draws from U(0, 1).
        r3: Start of the exponent; None draws from U(0, 2).
        floor: Lower bound of all of them, positive.
        share_across_layers: One set of parameters for all layers (yes if None) or one per layer.

    Raises:
        UserError: If a start is out of range, or there is neither one nor H of it.
    """

    r1 = property(attrgetter("additive.factor"))
    r2 = property(attrgetter("additive.kernel.rate"))
    r3 = property(attrgetter("additive.kernel.exponent"))

    def __init__(
        self,
        shape: Shape,
        r1: Start = None,
        r2: Start = None,
        r3: Start = None,
        floor: float = 0.01,
        share_across_layers: bool | None = None,
    ) -> None:
        super().__init__(
            shape,
            lambda heads: Scaled(heads, lambda h: Gaussian(h, r2, r3, True, floor), r1, True, floor),
            None,
            share_across_layers,
        )


class KerpleWeight1(Kerple):
    """``q·k / √δ · exp(-r1_h · d²)``, r1 >= floor (the paper's 1-para-wht).

    Parameters: `1 * H`, shared by all layers unless said otherwise. Cost: one (H, T) table a forward.

    Args:
        shape: What the model hands to every strategy.
        r1: Start of the rate; one number or one per head, None draws from U(0, 1).
        floor: Lower bound of all of them, positive.
        share_across_layers: One set of parameters for all layers (yes if None) or one per layer.

    Raises:
        UserError: If a start is out of range, or there is neither one nor H of it.
    """

    r1 = property(attrgetter("multiplicative.rate"))

    def __init__(
        self, shape: Shape, r1: Start = None, floor: float = 0.01, share_across_layers: bool | None = None
    ) -> None:
        super().__init__(shape, None, lambda heads: Gaussian(heads, r1, floor=floor), share_across_layers)


class KerpleWeight2(Kerple):
    """``q·k / √δ · exp(-r1_h · d^r2_h)``, r1, r2 >= floor, r2 <= 2 (the paper's 2-para-wht).

    Parameters: `2 * H`, shared by all layers unless said otherwise. Cost: one (H, T) table a forward.

    Args:
        shape: What the model hands to every strategy.
        r1: Start of the rate; one number or one per head, None draws from U(0, 1).
        r2: Start of the exponent; None draws from U(0, 2).
        floor: Lower bound of all of them, positive.
        share_across_layers: One set of parameters for all layers (yes if None) or one per layer.

    Raises:
        UserError: If a start is out of range, or there is neither one nor H of it.
    """

    r1 = property(attrgetter("multiplicative.rate"))
    r2 = property(attrgetter("multiplicative.exponent"))

    def __init__(
        self,
        shape: Shape,
        r1: Start = None,
        r2: Start = None,
        floor: float = 0.01,
        share_across_layers: bool | None = None,
    ) -> None:
        super().__init__(shape, None, lambda heads: Gaussian(heads, r1, r2, True, floor), share_across_layers)

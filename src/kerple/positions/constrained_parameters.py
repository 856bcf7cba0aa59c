"""`Constrained`: a module whose parameters have ranges and stay in fp32."""

from collections.abc import Callable
from typing import Any, Self

import torch
from torch import Tensor, nn

from kerple.base.errors import require

Start = float | list[float] | None
"""Initial value of a parameter: one number for all entries, a list with one per entry, or None for random values.

Entries usually belong to heads."""

HUGE = 1e6
"""Default maximum of a parameter. It keeps tables of biases far below the largest fp32 number."""


class Constrained(nn.Module):
    """Module whose parameters are fp32 and are projected into their ranges by `constrain_`.

    Its parameters and buffers stay fp32 in ``module.bfloat16()`` and with Lightning's ``bf16-true``. Some strategies
    convert distances to the dtype of their parameters, and bf16 cannot represent all integers above 256.
    ``module.double()`` converts parameters and buffers to fp64.
    """

    def __init__(self) -> None:
        super().__init__()
        self.ranges: dict[str, tuple[float, float]] = {}

    def learn(
        self,
        name: str,
        size: int,
        start: Start = None,
        *,
        between: tuple[float, float] = (0.0, 1.0),
        minimum: float,
        maximum: float = HUGE,
    ) -> None:
        """Register the parameter ``name`` (size,) fp32, which `constrain_` clamps to [minimum, maximum].

        Args:
            name: Name of the attribute, also in the checkpoint.
            size: Number of entries, usually the number of heads.
            start: Initial value of all entries, or one value per entry; None draws random values.
            between: Range of the uniform distribution of random values, which are also clamped.
            minimum: Smallest allowed value.
            maximum: Largest allowed value.

        Raises:
            UserError: If an initial value is not in [minimum, maximum], a list of values does not have length ``size``,
                or random values are needed and ``between`` is empty.
        """
        parameter = torch.empty(size, dtype=torch.float32)
        if start is None:
            given = f"no initial value, and an empty range of random values, {between[0]:g} to {between[1]:g}"
            expected = f"an initial value of {name}, or a smaller start of the range (`floor`)"
            require(between[0] < between[1], name, given, expected)
            parameter.uniform_(*between).clamp_(minimum, maximum)
        else:
            values = [float(start)] * size if isinstance(start, int | float) else start
            require(len(values) == size, name, f"{len(values)} initial values", f"1 or {size} (one per head)")
            in_range = all(minimum <= v <= maximum for v in values)  # also refuses NaN
            require(in_range, name, f"initial value {start}", f"from {minimum:g} to {maximum:g}")
            parameter.copy_(torch.tensor(values, dtype=torch.float32))
        self.register_parameter(name, nn.Parameter(parameter))
        self.ranges[name] = (minimum, maximum)

    @torch.no_grad()
    def constrain_(self) -> None:
        """Call `clamp_` of this module and of all modules inside it. The trainer calls it after each optimiser step."""
        for module in self.modules():
            if isinstance(module, Constrained):
                module.clamp_()

    def clamp_(self) -> None:
        """Project the parameters of this module, without its children, into their ranges, in place.

        NaN stays NaN, so that the run stops instead of continuing with the lower bound.
        """
        for name, (minimum, maximum) in self.ranges.items():
            getattr(self, name).clamp_(minimum, maximum)

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Self:
        def keep_precision(tensor: Tensor) -> Tensor:
            converted: Any = fn(tensor)
            rounded = tensor.is_floating_point() and converted.dtype in (torch.bfloat16, torch.float16)
            return tensor.to(converted.device) if rounded else converted

        return super()._apply(keep_precision, recurse)

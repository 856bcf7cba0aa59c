"""`check_combination`: which strategies `Together` cannot combine."""

from collections.abc import Sequence

from kerple.errors import UserError
from kerple.positions.base import Position
from kerple.positions.cope import CoPE
from kerple.positions.path import PaTH
from kerple.positions.pope import PoPE
from kerple.positions.rotary import RoPE
from kerple.positions.shaw import Shaw
from kerple.positions.transformer_xl import TransformerXL
from kerple.positions.xpos import XPos

OF_ONE_WIDTH = (CoPE, PaTH, PoPE, RoPE, Shaw, TransformerXL, XPos)
"""Strategies that turn or multiply queries and keys of as many numbers as the model gives them."""


def check_combination(parts: Sequence[Position]) -> None:
    """Raise a UserError if there are no strategies, or one of them would not do what it does alone.

    PaTH drops what others do to scores, and PoPE makes queries and keys twice as wide.
    """
    if not parts:
        raise UserError("Together: parts: got none, expected at least one strategy")
    for i, part in enumerate(parts):
        if any(isinstance(inner, PaTH) for inner in part.modules()):  # it makes scores anew
            for hook, others in (("mix", parts[:i]), ("bias", parts), ("weight", parts)):
                for other in others:
                    if other.uses(hook):
                        advice = "put PaTH before it" if hook == "mix" else "leave one of them out"
                        raise UserError(
                            f"Together: parts: got {type(other).__name__}, whose {hook} PaTH's scores would not have; "
                            f"{advice}"
                        )
        if any(isinstance(inner, PoPE) for inner in part.modules()):
            for other in (*parts[:i], *parts[i + 1 :]):
                if any(isinstance(inner, OF_ONE_WIDTH) for inner in other.modules()):
                    raise UserError(
                        f"Together: parts: got {type(other).__name__} beside PoPE, which makes queries and keys twice "
                        "as wide as it expects; leave one of them out"
                    )

"""`check_combination`: which strategies `Together` cannot combine."""

from collections.abc import Sequence

from kerple.base.errors import UserError
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
        if _holds(part, PaTH):  # it makes scores anew
            _refuse_hook(parts[:i], "modify_scores", "put PaTH before it")
            _refuse_hook(parts, "bias", "leave one of them out")
            _refuse_hook(parts, "weight", "leave one of them out")
        if _holds(part, PoPE):
            _refuse_one_width([*parts[:i], *parts[i + 1 :]])


def _holds(part: Position, *kinds: type[Position]) -> bool:
    """Whether a strategy, or one that it wraps or combines, is of one of these classes."""
    return any(isinstance(inner, kinds) for inner in part.modules())


def _refuse_hook(parts: Sequence[Position], hook: str, advice: str) -> None:
    for part in parts:
        if part.uses(hook):
            raise UserError(
                f"Together: parts: got {type(part).__name__}, whose {hook} PaTH's scores would not have; {advice}"
            )


def _refuse_one_width(parts: Sequence[Position]) -> None:
    for part in parts:
        if _holds(part, *OF_ONE_WIDTH):
            raise UserError(
                f"Together: parts: got {type(part).__name__} beside PoPE, which makes queries and keys twice as wide "
                "as it expects; leave one of them out"
            )

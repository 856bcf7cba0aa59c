"""`check_combination`: which strategies `Combined` cannot combine."""

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
"""Strategies that work with queries and keys of δ numbers, not with those of PoPE and `SelfExtend`, which have 2δ."""


def check_combination(parts: Sequence[Position]) -> None:
    """Raise a UserError if there are no strategies, or if one of them would lose its effect beside another.

    PaTH replaces the scores, and with them what other strategies did to them; PoPE and `SelfExtend` make queries and
    keys twice as wide.
    """
    if not parts:
        raise UserError("Combined: parts: got none, expected at least one strategy")
    for i, part in enumerate(parts):
        if _holds(part, PaTH):
            lost = [p for p in parts if p.uses("bias") or p.uses("score_scale")]
            lost += [p for p in parts[:i] if p.uses("modify_scores")]
            _refuse(lost, "beside PaTH, whose scores would be without its own; leave one out, or put PaTH first")
        if _holds(part, PoPE) or part.neighbor_window is not None:
            others = [*parts[:i], *parts[i + 1 :]]
            narrow = [p for p in others if _holds(p, *OF_ONE_WIDTH)]
            wide = "PoPE" if _holds(part, PoPE) else type(part).__name__
            _refuse(narrow, f"beside {wide}, which makes queries and keys twice as wide as it expects; leave one out")


def _holds(part: Position, *kinds: type[Position]) -> bool:
    """Whether a strategy, or one that it wraps or combines, is of one of these classes."""
    return any(isinstance(inner, kinds) for inner in part.modules())


def _refuse(parts: Sequence[Position], reason: str) -> None:
    if parts:
        raise UserError(f"Combined: parts: got {type(parts[0]).__name__} {reason}")

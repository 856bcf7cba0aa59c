"""`check_combination`: the check of the parts of `Combined`."""

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

SINGLE_WIDTH = (CoPE, PaTH, PoPE, RoPE, Shaw, TransformerXL, XPos)
"""Strategies that need queries and keys of width δ. PoPE and `SelfExtend` change the width to 2δ."""


def check_combination(parts: Sequence[Position]) -> None:
    """Raise a UserError if there are no strategies, or if one strategy cancels the effect of another.

    PaTH replaces the scores, including the effects of other strategies on them. PoPE and `SelfExtend` double the width
    of queries and keys.
    """
    if not parts:
        raise UserError("Combined: parts: got none, expected at least one strategy")
    for i, part in enumerate(parts):
        if _contains(part, PaTH):
            lost = [p for p in parts if p.uses("bias") or p.uses("score_scale")]
            lost += [p for p in parts[:i] if p.uses("modify_scores")]
            _refuse(lost, "with PaTH, which replaces the scores; leave one out, or put PaTH first")
        if _contains(part, PoPE) or part.neighbor_window is not None:
            others = [*parts[:i], *parts[i + 1 :]]
            narrow = [p for p in others if _contains(p, *SINGLE_WIDTH)]
            wide = "PoPE" if _contains(part, PoPE) else type(part).__name__
            _refuse(narrow, f"with {wide}, which doubles the width of queries and keys; leave one out")


def _contains(part: Position, *kinds: type[Position]) -> bool:
    """Whether a strategy, or a strategy inside it, is an instance of one of these classes."""
    return any(isinstance(inner, kinds) for inner in part.modules())


def _refuse(parts: Sequence[Position], reason: str) -> None:
    if parts:
        raise UserError(f"Combined: parts: got {type(parts[0]).__name__} {reason}")

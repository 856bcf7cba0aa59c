"""`check_combination`: the check that strategies can be combined in `Combined`."""

from collections.abc import Sequence

from kerple.base.errors import UserError, require
from kerple.positions.base import Position
from kerple.positions.cope import CoPE
from kerple.positions.path import PaTH
from kerple.positions.pope import PoPE
from kerple.positions.rotary import RoPE
from kerple.positions.self_extend import SelfExtend
from kerple.positions.shaw import Shaw
from kerple.positions.transformer_xl import TransformerXL
from kerple.positions.xpos import XPos

SINGLE_WIDTH = (CoPE, PaTH, PoPE, RoPE, SelfExtend, Shaw, TransformerXL, XPos)
"""Strategies that accept only queries and keys of the head dimension δ. `PoPE` and `SelfExtend` return them with 2δ."""


def check_combination(parts: Sequence[Position]) -> None:
    """Raise a UserError if there are no strategies, or if two of them exclude each other.

    `PaTH` computes new scores from queries and keys. The bias and the score scale of any other part would be lost, and
    so would scores that a part before `PaTH` modified. `PoPE` and `SelfExtend` double the width of queries and keys,
    which `SINGLE_WIDTH` strategies do not accept.
    """
    require(bool(parts), "Combined: parts", "none", "at least one strategy")
    for i, part in enumerate(parts):
        if _contains(part, PaTH):
            by_distance = [other for other in parts if other.uses("bias") or other.uses("score_scale")]
            _refuse(by_distance, "with PaTH, which replaces the scores; leave one out")
            earlier = [other for other in parts[:i] if other.uses("modify_scores")]
            _refuse(earlier, "before PaTH, which replaces the scores; put PaTH first")
        if _contains(part, PoPE) or part.neighbor_window is not None:
            name = "PoPE" if _contains(part, PoPE) else type(part).__name__
            single_width = [other for other in parts if other is not part and _contains(other, *SINGLE_WIDTH)]
            _refuse(single_width, f"with {name}, which doubles the width of queries and keys; leave one out")


def _contains(part: Position, *kinds: type[Position]) -> bool:
    """Whether a strategy, or a strategy inside it, is an instance of one of these classes."""
    return any(isinstance(inner, kinds) for inner in part.modules())


def _refuse(parts: Sequence[Position], reason: str) -> None:
    """Raise a UserError for the first of these parts, if there are any."""
    if parts:
        raise UserError(f"Combined: parts: got {type(parts[0]).__name__} {reason}")

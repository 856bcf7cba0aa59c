"""`check_combination`: the check that strategies can be combined in `Combined`."""

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
"""Strategies that need queries and keys of the head dimension δ. `PoPE` and `SelfExtend` double their width."""


def check_combination(parts: Sequence[Position]) -> None:
    """Raise a UserError if there are no strategies, or if two of them exclude each other.

    `PaTH` computes scores from queries and keys, so that a bias, a score scale and earlier changes of scores are lost.
    `PoPE` and `SelfExtend` double the width of queries and keys, which `SINGLE_WIDTH` strategies do not support.
    """
    if not parts:
        raise UserError("Combined: parts: got none, expected at least one strategy")
    for i, part in enumerate(parts):
        if _contains(part, PaTH):
            by_distance = [p for p in parts if p.uses("bias") or p.uses("score_scale")]
            _refuse(by_distance, "with PaTH, which replaces the scores; leave one out")
            earlier = [p for p in parts[:i] if p.uses("modify_scores")]
            _refuse(earlier, "before PaTH, which replaces the scores; put PaTH first")
        if _contains(part, PoPE) or part.neighbor_window is not None:
            name = "PoPE" if _contains(part, PoPE) else type(part).__name__
            single_width = [p for p in parts if p is not part and _contains(p, *SINGLE_WIDTH)]
            _refuse(single_width, f"with {name}, which doubles the width of queries and keys; leave one out")


def _contains(part: Position, *kinds: type[Position]) -> bool:
    """Whether a strategy, or a strategy inside it, is an instance of one of these classes."""
    return any(isinstance(inner, kinds) for inner in part.modules())


def _refuse(parts: Sequence[Position], reason: str) -> None:
    if parts:
        raise UserError(f"Combined: parts: got {type(parts[0]).__name__} {reason}")

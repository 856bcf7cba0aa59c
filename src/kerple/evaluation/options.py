"""Checks of the lengths and the protocols' options; one that cannot be honoured is an error."""

from collections.abc import Sequence
from typing import Any

from kerple.base.errors import UserError
from kerple.evaluation.protocols import Name, Protocol


def checked_lengths(lengths: Sequence[int]) -> list[int]:
    """The lengths in ascending order.

    Raises:
        UserError: If there is none, one is not positive, or one does not divide the longest.
    """
    if not lengths or min(lengths) < 1:
        raise UserError(f"lengths: got {list(lengths)}, expected at least one positive number")
    ordered = sorted(set(lengths))
    if uneven := [n for n in ordered if ordered[-1] % n]:
        raise UserError(
            f"lengths: got {uneven}, which do not divide the longest, {ordered[-1]}: a block of that many targets "
            "could not be cut into equal segments; choose divisors, such as powers of 2 times the shortest"
        )
    return ordered


def chosen_protocols(
    names: Sequence[Name],
    lengths: Sequence[int],
    *,
    window: int | None,
    stride: int | None,
    skip: int,
    k: int | None,
    block: int,
    training_length: int = 1,
) -> list[Protocol]:
    """The named protocols with their options, each once.

    Args:
        names: Names of protocols.
        lengths: Evaluation lengths in ascending order, as `checked_lengths` returns them.
        window: Option of windowed; None for the training length.
        stride: Option of sliding, at most the shortest length.
        skip: Option of sliding: 0, or at least the longest length minus the stride, and less than ``block``. Then every
            scored target has a full window at every length.
        k: Option of last, at most the shortest length.
        block: Number of targets in a block.
        training_length: Training length in tokens.

    Raises:
        UserError: If there is no name, an option is out of range, or an option belongs to a protocol that is not named.
    """
    if not names:
        raise UserError("protocols: got none, expected at least one, such as full")
    options = {"window": ("windowed", window), "stride": ("sliding", stride), "k": ("last", k)}
    for option, (owner, value) in options.items():
        if value is not None and owner not in names:
            raise UserError(f"{option}: got {value}, expected {owner} among protocols; add it or drop {option}")
        if value is not None and value < 1:
            raise UserError(f"{option}: got {value}, expected a positive number")
        if option != "window" and value is not None and value > lengths[0]:
            raise UserError(f"{option}: got {value}, expected at most {lengths[0]}, the shortest length")
    if skip and "sliding" not in names:
        raise UserError(f"skip: got {skip}, expected sliding among protocols; add it or drop skip")
    if skip and not lengths[-1] - (stride or 0) <= skip < block:
        raise UserError(
            f"skip: got {skip}, expected 0, or at least {lengths[-1] - (stride or 0)}, the longest length less the "
            f"stride, and less than {block}, the length of a block; a longer block_length leaves more targets"
        )
    own: dict[str, dict[str, Any]] = {
        "windowed": {"window": window or training_length},
        "sliding": {"stride": stride, "skip": skip},
        "last": {"k": k},
    }
    return [Protocol(name, **own.get(name, {})) for name in dict.fromkeys(names)]

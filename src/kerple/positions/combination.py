"""`check_combination`: which strategies `Together` cannot combine."""

from collections.abc import Sequence

from kerple.errors import UserError
from kerple.positions.base import Position
from kerple.positions.path import PaTH


def check_combination(parts: Sequence[Position]) -> None:
    """Raise a UserError if there are no strategies, or PaTH is among them and would drop what another one does."""
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

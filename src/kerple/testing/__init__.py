"""What holds for every positional strategy, checked for any class: of this package, or imported from anywhere."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

from kerple.positions import Position
from kerple.testing import cache, causality, learning, precision, reading  # noqa: F401 -- they register what they hold
from kerple.testing.subject import PROPERTIES, DoesNotApply, Property, Subject

__all__ = ["PROPERTIES", "DoesNotApply", "Outcome", "Property", "Subject", "check", "outcomes"]


@dataclass(frozen=True)
class Outcome:
    """Whether one property holds.

    Args:
        name: Of the property, one of `PROPERTIES`.
        holds: None where it does not apply.
        why: One line on what was found, empty where it holds.
    """

    name: str
    holds: bool | None
    why: str = ""


def outcomes(build: Callable[..., Position], **settings: Any) -> Iterator[Outcome]:
    """Each property in turn, as soon as it is known; arguments as for `check`."""
    subject = Subject(partial(build, **settings))
    for name, holds in PROPERTIES.items():
        try:
            holds(subject)
            yield Outcome(name, True)
        except DoesNotApply as reason:
            yield Outcome(name, None, str(reason))
        except Exception as error:  # whatever a strategy raises is what its author has to see
            lines = str(error).strip().splitlines() or [""]
            kind = "" if isinstance(error, AssertionError) else f"{type(error).__name__}: "
            yield Outcome(name, False, f"{kind}{lines[0]}")


def check(build: Callable[..., Position], **settings: Any) -> list[Outcome]:
    """Hold a strategy to every property.

    Args:
        build: Its class, or anything that takes a `Shape` and gives a strategy.
        **settings: Its own options.

    Returns:
        One outcome a property, all of which hold or do not apply.

    Raises:
        AssertionError: If some do not hold, with one line for each.
    """
    found = list(outcomes(build, **settings))
    failed = [f"{o.name}: {o.why}" for o in found if o.holds is False]
    assert not failed, "\n".join(failed)
    return found

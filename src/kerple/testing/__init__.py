"""The public property suite behind `python run.py check`: what has to hold for any strategy, and its checks."""

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
    """Outcome of checking one property.

    Args:
        name: Name of the property, one of `PROPERTIES`.
        holds: Whether it holds; None if it does not apply.
        why: What was found, in one line; empty if it holds.
    """

    name: str
    holds: bool | None
    why: str = ""


def outcomes(build: Callable[..., Position], **settings: Any) -> Iterator[Outcome]:
    """Check one property after the other, and yield each outcome; the arguments are those of `check`."""
    subject = Subject(partial(build, **settings))
    for name, holds in PROPERTIES.items():
        try:
            holds(subject)
            yield Outcome(name, True)
        except DoesNotApply as reason:
            yield Outcome(name, None, str(reason))
        except Exception as error:  # the author of a strategy has to see any error that it raises
            lines = str(error).strip().splitlines() or [""]
            kind = "" if isinstance(error, AssertionError) else f"{type(error).__name__}: "
            yield Outcome(name, False, f"{kind}{lines[0]}")


def check(build: Callable[..., Position], **settings: Any) -> list[Outcome]:
    """Check that a strategy has all properties.

    Args:
        build: The class of the strategy, or a function from a `Shape` to a strategy.
        **settings: Options of the strategy.

    Returns:
        The outcome of each property, which holds or does not apply.

    Raises:
        AssertionError: If a property does not hold; the message has a line for each of them.
    """
    found = list(outcomes(build, **settings))
    failed = [f"{o.name}: {o.why}" for o in found if o.holds is False]
    assert not failed, "\n".join(failed)
    return found

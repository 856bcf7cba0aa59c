"""The public property suite of `python run.py check`: properties that every strategy must have.

Most properties are tested at several lengths (`Subject.lengths`): 30, 90, and at least 300 tokens. The last length is
larger than all integer options up to 1,000, and includes several blocks of queries. The suite does not detect errors at
larger lengths, with other options, or only on a GPU. It does not compare a strategy with the formula of its paper.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

from kerple.base.errors import describe
from kerple.positions import Position
from kerple.testing import reading, rounding, training  # noqa: F401 -- they register their properties
from kerple.testing.subject import AT_LENGTHS, PROPERTIES, DoesNotApply, Property, Subject

__all__ = ["AT_LENGTHS", "PROPERTIES", "DoesNotApply", "Outcome", "Property", "Subject", "check", "outcomes"]


@dataclass(frozen=True)
class Outcome:
    """Outcome of checking one property.

    Args:
        name: Name of the property, one of `PROPERTIES`.
        holds: Whether it holds; None if it does not apply.
        lengths: Tested numbers of tokens; empty if the property does not depend on `Subject.lengths`.
        why: Reason in one line if it does not hold or apply; empty if it holds.
        error: The error that was raised if it does not hold.
    """

    name: str
    holds: bool | None
    lengths: tuple[int, ...] = ()
    why: str = ""
    error: Exception | None = None


def outcomes(build: Callable[..., Position], **settings: Any) -> Iterator[Outcome]:
    """Check all properties in turn, and yield each outcome; the arguments are those of `check`."""
    subject = Subject(partial(build, **settings))
    for name, property_ in PROPERTIES.items():
        lengths: tuple[int, ...] = ()
        try:
            lengths = subject.lengths if property_ in AT_LENGTHS else ()
            property_(subject)
            yield Outcome(name, True, lengths)
        except DoesNotApply as reason:
            yield Outcome(name, None, (), str(reason))
        except Exception as error:  # the author of a strategy must see every error
            yield Outcome(name, False, lengths, describe(error), error)


def check(build: Callable[..., Position], **settings: Any) -> list[Outcome]:
    """Check that a strategy has all properties.

    Args:
        build: The class of the strategy, or a function from a `Shape` to a strategy.
        **settings: Options of the strategy.

    Returns:
        The outcome of each property.

    Raises:
        AssertionError: If a property does not hold. The message has one line for each such property.
    """
    results = list(outcomes(build, **settings))
    failed = [f"{o.name}: {o.why}" for o in results if o.holds is False]
    assert not failed, "\n".join(failed)
    return results

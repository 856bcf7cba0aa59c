"""The public suite of `python run.py check`: tests of properties that every strategy must have.

Most properties are tested with inputs of 30, 90, and at least 300 tokens (`Subject.lengths`). The longest input has
more tokens than the value of every integer option, except for values above 1,000. Attention processes this input
in several blocks of queries. The suite does not detect an error that occurs only with longer inputs, with other
options, or on a GPU. It does not compare a strategy with the formula of its paper.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

from kerple.base.errors import describe
from kerple.positions import Position
from kerple.testing import forward_pass, fp32_computation, parameters  # noqa: F401 -- importing them registers their tests
from kerple.testing.subject import AT_LENGTHS, PROPERTIES, DoesNotApply, Property, Subject

__all__ = ["AT_LENGTHS", "PROPERTIES", "DoesNotApply", "Outcome", "Property", "Subject", "check", "outcome", "outcomes"]


@dataclass(frozen=True)
class Outcome:
    """Outcome of the test of one property.

    Args:
        name: Statement of the property, a key of `PROPERTIES`.
        holds: Whether the property holds; None if it does not apply.
        lengths: Numbers of tokens of the tested inputs; empty if the test does not use `Subject.lengths`, or the
            property does not apply.
        why: Reason in one line if the property does not hold or does not apply; empty if it holds.
        error: The error that the test raised; None if the property holds or does not apply.
    """

    name: str
    holds: bool | None
    lengths: tuple[int, ...] = ()
    why: str = ""
    error: BaseException | None = None


def outcomes(build: Callable[..., Position], **settings: Any) -> Iterator[Outcome]:
    """Test all properties in turn, and yield each outcome; the arguments are those of `check`."""
    subject = Subject(partial(build, **settings))
    yield from (outcome(subject, name) for name in PROPERTIES)


def outcome(subject: Subject, name: str) -> Outcome:
    """Test the property of `PROPERTIES` with this name, and return the outcome."""
    test = PROPERTIES[name]
    lengths: tuple[int, ...] = ()
    try:
        lengths = subject.lengths if test in AT_LENGTHS else ()
        test(subject)
        return Outcome(name, True, lengths)
    except DoesNotApply as reason:
        return Outcome(name, None, (), str(reason))
    except (Exception, SystemExit) as error:  # an error of the strategy is an outcome: all properties are tested
        return Outcome(name, False, lengths, describe(error), error)


def check(build: Callable[..., Position], **settings: Any) -> list[Outcome]:
    """Check that a strategy has all properties.

    Args:
        build: The class of the strategy, or a function from a `Shape` to a strategy.
        **settings: Options of the strategy.

    Returns:
        The outcome of each property.

    Raises:
        AssertionError: If a property does not hold, or the strategy raises an error. The message has one line for each
            property that does not hold.
    """
    results = list(outcomes(build, **settings))
    failures = [f"{o.name}: {o.why}" for o in results if o.holds is False]
    assert not failures, "\n".join(failures)
    return results

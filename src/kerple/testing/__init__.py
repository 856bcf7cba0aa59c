"""The public property suite behind `python run.py check`: properties that every strategy must have.

Most properties are read at several lengths, `Subject.lengths`: 30, 90, and 300 tokens or more, which is beyond every
whole number up to 1,000 among the strategy's options and across blocks of queries of the size that training uses. What
goes wrong only farther out, only for options other than those that are checked, or only on a GPU, it cannot see; and it
does not know what the paper says: that needs a test of the formula.
"""

import traceback
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch

from kerple.base.errors import UserError
from kerple.positions import Position
from kerple.testing import reading, rounding, training  # noqa: F401 -- they register their properties
from kerple.testing.subject import AT_LENGTHS, PROPERTIES, DoesNotApply, Property, Subject

__all__ = ["AT_LENGTHS", "PROPERTIES", "DoesNotApply", "Outcome", "Property", "Subject", "check", "outcomes"]

LIBRARIES = ("<", *(str(Path(f).parent) for f in (traceback.__file__, torch.__path__[0], __path__[0])))
"""How the names of files begin that are not the author's: generated code, and packages with their standard library."""


@dataclass(frozen=True)
class Outcome:
    """Outcome of checking one property.

    Args:
        name: Name of the property, one of `PROPERTIES`.
        holds: Whether it holds; None if it does not apply.
        lengths: Numbers of tokens of the readings; empty if the property does not depend on `Subject.lengths`.
        why: Why it does not hold or apply, in one line; empty if it holds.
        error: The error that was raised if it does not hold.
    """

    name: str
    holds: bool | None
    lengths: tuple[int, ...] = ()
    why: str = ""
    error: Exception | None = None


def outcomes(build: Callable[..., Position], **settings: Any) -> Iterator[Outcome]:
    """Check one property after the other, and yield each outcome; the arguments are those of `check`."""
    subject = Subject(partial(build, **settings))
    for name, property_ in PROPERTIES.items():
        lengths: tuple[int, ...] = ()
        try:
            lengths = subject.lengths if property_ in AT_LENGTHS else ()
            property_(subject)
            yield Outcome(name, True, lengths)
        except DoesNotApply as reason:
            yield Outcome(name, None, (), str(reason))
        except Exception as error:  # the author of a strategy has to see any error that it raises
            frames = traceback.extract_tb(error.__traceback__)
            places = [f"{f.filename}:{f.lineno}: " for f in frames if not f.filename.startswith(LIBRARIES)]
            kind = "" if isinstance(error, AssertionError | UserError) else f"{type(error).__name__}: "
            why = "".join([*places[-1:], kind, *str(error).strip().splitlines()[:1]])
            yield Outcome(name, False, lengths, why, error)


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
    results = list(outcomes(build, **settings))
    failed = [f"{o.name}: {o.why}" for o in results if o.holds is False]
    assert not failed, "\n".join(failed)
    return results

"""`python run.py check --model.position my_file.Mine`: hold a strategy to every property, and print what holds."""

import os
import sys
from collections.abc import Callable

from jsonargparse import ArgumentParser

from kerple.cli.reading import read
from kerple.positions import Position, Shape
from kerple.testing import PROPERTIES, outcomes

WORDS = {True: "holds", False: "FAILS", None: "does not apply"}


class Model:
    """What is checked.

    Args:
        position: Positional strategy, by class name or import path, with its own options below it.
    """

    def __init__(self, position: Callable[[Shape], Position]) -> None:
        self.build = position


def main(arguments: list[str]) -> None:
    """Print a line for each property as soon as it is known.

    Args:
        arguments: Of the command line.

    Raises:
        SystemExit: With status 1, if some property does not hold.
        UserError: If the strategy cannot be built.
    """
    sys.path.insert(0, os.getcwd())  # where a file of one's own lies, whatever the command is called by
    parser = ArgumentParser(prog="run.py check", description=__doc__, exit_on_error=False)
    parser.add_class_arguments(Model, "model")
    build = parser.instantiate_classes(read(parser, arguments)).model.build
    build(Shape(32, 4, 32))  # a mistake in an option is said once, not once a property
    failed = 0
    for outcome in outcomes(build):
        why = f": {outcome.why}" if outcome.why else ""
        print(f"{WORDS[outcome.holds]:14}  {outcome.name}{why}", flush=True)
        failed += outcome.holds is False
    if failed:
        print(f"{failed} of {len(PROPERTIES)} properties do not hold", file=sys.stderr)
        raise SystemExit(1)

"""`python run.py check --model.position my_file.Mine`: checks the properties of a positional strategy."""

import sys

from kerple.base.errors import UserError, describe, require
from kerple.config.options import command_parser
from kerple.config.parsing import parse
from kerple.positions import StrategyBuilder
from kerple.testing import PROPERTIES, Subject, outcomes

OUTCOMES = {True: "holds", False: "FAILS", None: "does not apply"}


def main(arguments: list[str]) -> None:
    """Check the properties of a strategy, and print a line for each.

    Args:
        arguments: Arguments of the command line.

    Raises:
        SystemExit: With status 1 if a property does not hold.
        UserError: If the strategy cannot be built.
    """
    first = next(iter(arguments), "-")
    require(first.startswith("-"), "check", first, f"an option: --model.position {first}")
    parser = command_parser("check", __doc__)
    text = "positional strategy, by class name or import path; its options are --model.position.OPTION"
    parser.add_argument("--model.position", type=StrategyBuilder, required=True, help=text)
    build = parser.instantiate_classes(parse(parser, arguments)).model.position
    try:
        Subject(build).position()
    except (Exception, SystemExit) as error:  # every property would fail for this reason
        raise UserError(describe(error)) from error
    failed = 0
    errors = list[BaseException]()  # of the strategy
    for outcome in outcomes(build):
        lengths = f" ({', '.join(map(str, outcome.lengths))} tokens)" if outcome.lengths else ""
        reason = f": {outcome.why}" if outcome.why else ""
        print(f"{OUTCOMES[outcome.holds]:14}  {outcome.name}{lengths}{reason}", flush=True)
        failed += outcome.holds is False
        errors += [outcome.error] if outcome.error and not isinstance(outcome.error, AssertionError) else []
    if failed:
        print(f"{failed} of {len(PROPERTIES)} properties do not hold", file=sys.stderr)
        raise SystemExit(1) from next(iter(errors), None)  # the cause is printed with --debug true
    print(f"all {len(PROPERTIES)} properties hold, or do not apply")

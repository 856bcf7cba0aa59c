"""`python run.py check --model.position my_file.Mine`: checks the properties of a positional strategy."""

import sys

from kerple.base.errors import UserError, describe, require
from kerple.config.options import add_switch, command_parser
from kerple.config.parsing import parse
from kerple.positions import StrategyBuilder
from kerple.testing import PROPERTIES, Subject, outcome
from kerple.testing.forward_pass import torch_compile

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
    add_switch(parser, "fast", False, "test only the properties and inputs that take seconds, without torch.compile")
    options = parser.instantiate_classes(parse(parser, arguments))
    subject = Subject(options.model.position, options.fast)
    try:
        subject.position()
    except (Exception, SystemExit) as error:  # every property would fail for this reason
        raise UserError(describe(error)) from error
    failed = 0
    errors = list[BaseException]()  # of the strategy
    tested = [name for name, test in PROPERTIES.items() if not (options.fast and test is torch_compile)]
    for name in tested:
        if sys.stdout.isatty():  # the line of the outcome replaces this line
            print(f"{'testing':14}  {name}", end="\r", flush=True)
        result = outcome(subject, name)
        lengths = f" ({', '.join(map(str, result.lengths))} tokens)" if result.lengths else ""
        reason = f": {result.why}" if result.why else ""
        print(f"{OUTCOMES[result.holds]:14}  {name}{lengths}{reason}", flush=True)
        failed += result.holds is False
        errors += [result.error] if result.error and not isinstance(result.error, AssertionError) else []
    if failed:
        print(f"{failed} of {len(tested)} properties do not hold", file=sys.stderr)
        raise SystemExit(1) from next(iter(errors), None)  # the cause is printed with --debug true
    missing = f"; without --fast, {len(PROPERTIES)} properties and longer inputs are tested" if options.fast else ""
    print(f"all {len(tested)} properties hold, or do not apply{missing}")

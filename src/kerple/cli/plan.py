"""`python run.py plan --config …`: computes the cost of a fit before it runs, from the options of `fit`."""

import logging

from kerple.base.errors import require
from kerple.config import PROGRAM
from kerple.config.parsing import parse
from kerple.model.cost import CHIPS
from kerple.training.fit_cost import NODE, cost_tables
from kerple.training.fit_options import check_data_arguments, fit_parser
from kerple.training.stored_options import insert_stored_config

PEAK_FRACTION = 0.34  # fraction of the peak FLOP/s that KERPLE-log with 162M parameters reached on an H200


def main(arguments: list[str]) -> None:
    """Print the parameters, steps, tokens, FLOPs, memory by part, and hours of a fit.

    Args:
        arguments: Arguments of the command.

    Raises:
        UserError: If an option is out of range, or the configuration is not valid for `fit`.
    """
    parser = fit_parser()
    parser.prog, parser.description = f"{PROGRAM} plan", __doc__
    parser.add_argument("--chips", default=",".join(c.name for c in CHIPS), help="kinds of devices, such as A100,H100")
    parser.add_argument("--devices", type=str, default="", help=f"numbers of devices; default: 1,{NODE},{8 * NODE}")
    parser.add_argument("--efficiency", type=float, default=PEAK_FRACTION, help="fraction of the peak that is reached")
    _, *arguments = insert_stored_config(["fit", *arguments])  # inserts the architecture of --weights
    options = parse(parser, arguments)
    check_data_arguments(options.data)
    require(0 < options.efficiency <= 1, "efficiency", options.efficiency, "a fraction of peak FLOP/s in (0, 1]")
    chips = {chip.name: chip for chip in CHIPS}
    for name in options.chips.split(","):
        require(name in chips, "chips", repr(name), f"some of {', '.join(chips)}")
    devices = [int(n) if n.isdecimal() else 0 for n in options.devices.split(",") if options.devices]
    require(0 not in devices, "devices", repr(options.devices), "numbers such as 1,8")
    logging.getLogger("kerple").setLevel(logging.WARNING)  # hides messages about the choice of attention
    for table in cost_tables(options, [chips[name] for name in options.chips.split(",")], devices, options.efficiency):
        print(table, end="\n\n")
    quotient = f"FLOPs / ({options.efficiency:.2f} × peak of the data sheet)"
    exchange = "the part of the gradient exchange that does not overlap with the backward pass"
    print(f"Hours are computed, not measured: {quotient}, plus {exchange}.")

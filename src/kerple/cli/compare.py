"""`python run.py compare`: trains and tests the missing runs of a comparison, and writes its report."""

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, Literal

from jsonargparse import ArgumentParser, Namespace

from kerple.base.errors import require
from kerple.compare.comparison_file import Comparison, comparison_parser
from kerple.compare.engines import Engine, LocalProcesses
from kerple.compare.ray_engine import RayRuns
from kerple.compare.run_discovery import find_runs
from kerple.compare.workflow import check_writable, compare_strategies, report_runs
from kerple.config.options import add_engine_arguments, add_switch, command_parser, refuse_ray_options
from kerple.config.parsing import parse


def main(arguments: list[str]) -> None:
    """Fit and test the missing runs and write a report of all runs, or write only a report of the finished runs.

    With ``--directories``, report the finished runs that these folders contain. No comparison file is read.

    Args:
        arguments: Arguments of the command.
    """
    if any(argument.startswith("--directories") for argument in arguments):
        options = parse(_directories_parser(), arguments)
        expected = "true, because --directories trains nothing"
        require(options.report_only, "compare: report_only", "false", expected)
        check_writable("output", Path(options.output))
        runs = find_runs(map(Path, options.directories), options.test_folder)
        titles = {"name": options.name, "baseline": options.baseline}
        report_runs(runs, Path(options.output), **titles, printed=_printed(options))
        return
    options = parse(_parser(), arguments)
    refuse_ray_options("compare", options)
    engine: Callable[[int], Engine[Any]] = LocalProcesses
    if options.engine == "ray":
        engine = partial(RayRuns, address=options.address, cpus=options.cpus, gpus=options.gpus)
    given = {name: options[name] for name in ("parallel", "report_only", "rerun_changed", "yes")}
    compare_strategies(Comparison.from_options(options), **given, printed=_printed(options), engine=engine)


def _printed(options: Namespace) -> list[str] | None:
    """Return the strategies in the figures for print: an empty list for all strategies, or None for no figures."""
    return options.figure_strategies or ([] if options.figure else None)


def _parser() -> ArgumentParser:
    about = "Train and test the missing runs of strategies × seeds, and write one report."
    about += " With --directories DIR ... --baseline NAME --output DIR: report the finished runs found in each DIR."
    parser = comparison_parser(about)
    parser.add_argument("--parallel", type=int, default=1, help="runs at a time, each with an equal part of the cores")
    add_engine_arguments(parser)
    parser.add_argument("--cpus", type=int | None, help="cores of a run on Ray; default: an equal part of the cluster")
    parser.add_argument("--gpus", type=int | None, help="GPUs of a run on Ray; default: one if the cluster has any")
    add_switch(parser, "yes", False, "do not ask before a training of more than half an hour")
    add_switch(parser, "rerun_changed", False, "train again the runs whose configuration has changed")
    _add_report_arguments(parser)
    return parser


def _directories_parser() -> ArgumentParser:
    parser = command_parser("compare --report_only")
    folders = "folders that are runs or contain runs; a run NAME/seed-<n> is named NAME, any other run like its folder"
    parser.add_argument("--directories", type=str, nargs="+", required=True, help=folders)
    tests = "name of the folder with the results of a test, inside the folder of its run"
    parser.add_argument("--test_folder", type=str, default="test", help=tests)
    label = "Label of the strategy with which the others are compared."
    parser.add_argument("--baseline", type=str, required=True, help=label)
    parser.add_argument("--output", type=str, required=True, help="folder of the report")
    parser.add_argument("--name", type=str, default="comparison", help="title of the report")
    _add_report_arguments(parser)
    parser.set_defaults(report_only=True)
    return parser


def _add_report_arguments(parser: ArgumentParser) -> None:
    add_switch(parser, "report_only", False, "report the finished runs, train nothing; --directories implies it")
    parser.add_argument("--figure", type=Literal["paper"] | None, help="also write figures for print, as PDFs")
    names = "strategies in these PDFs; default: all"
    parser.add_argument("--figure_strategies", type=str, nargs="+", help=names)

"""`python run.py compare`: its options. The comparison is run by `run_comparison`, imported once they are checked."""

from dataclasses import fields
from importlib import import_module
from typing import Any, Literal

from jsonargparse import ArgumentParser

from kerple.base.errors import UserError
from kerple.cli.reading import read
from kerple.compare.comparison import Comparison


def main(arguments: list[str]) -> None:
    """Fit and test the runs that are missing and report all; or report only the finished ones.

    Args:
        arguments: Arguments of the command.

    Raises:
        UserError: If the comparison cannot be run as asked; nothing was started then.
        SystemExit: With status 1 if runs failed, with status 130 if it was stopped. Finished runs are kept.
    """
    if any(argument.startswith("--directories") for argument in arguments):
        options = read(_directories_parser(), arguments)
        _work().report_directories(options)
        return
    parser = _parser()
    options = parser.instantiate_classes(read(parser, arguments))
    comparison = Comparison(**{field.name: options[field.name] for field in fields(Comparison)})
    if options.parallel < 1:
        raise UserError(f"compare: parallel: got {options.parallel}, expected at least 1 run at a time")
    if options.report_only:
        _work().report_finished(comparison)
    else:
        _work().run(comparison, options.parallel, options.engine, options.rerun_changed)


def _work() -> Any:
    return import_module("kerple.cli.run_comparison")


def _parser() -> ArgumentParser:
    parser = ArgumentParser(
        prog="run.py compare",
        exit_on_error=False,
        description="Fits and tests strategies × seeds, what is missing of them, and writes one report. "
        "With --report_only --directories DIR ... --baseline NAME --output DIR: of finished runs from anywhere.",
    )
    parser.add_argument("--config", action="config", help="the comparison; see configs/compare")
    parser.add_class_arguments(Comparison)
    parser.add_argument("--parallel", type=int, default=1, help="runs at a time, each with its share of the cores")
    parser.add_argument(
        "--engine", type=Literal["local", "ray"], default="local", help="this machine, or a Ray cluster"
    )
    parser.add_argument(
        "--rerun_changed", "--rerun-changed", action="store_true", help="start runs whose configuration changed afresh"
    )
    parser.add_argument(
        "--report_only", "--report-only", action="store_true", help="train nothing, report what is finished"
    )
    return parser


def _directories_parser() -> ArgumentParser:
    parser = ArgumentParser(
        prog="run.py compare --report_only",
        description="One report of finished runs from anywhere.",
        exit_on_error=False,
    )
    parser.add_argument("--report_only", "--report-only", action="store_true", help="implied")
    parser.add_argument(
        "--directories",
        type=str,
        nargs="+",
        required=True,
        help="folders with runs in or below them; a run is called by the class of its strategy, or, where a class has "
        "a seed twice, by the folder above seed-<n>",
    )
    parser.add_argument(
        "--test_folder", "--test-folder", type=str, default="test", help="of every run, where the test to report is"
    )
    parser.add_argument("--baseline", type=str, required=True, help="strategy the others are tested against")
    parser.add_argument("--output", type=str, required=True, help="folder of the report")
    parser.add_argument("--name", type=str, default="comparison", help="its title")
    return parser

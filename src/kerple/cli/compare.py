"""`python run.py compare`: trains and tests the missing runs of a comparison, and writes its report.

Lightning is imported in functions, because the import takes seconds and option errors are reported before it.
"""

import contextlib
import os
import sys
from dataclasses import fields
from importlib import import_module
from pathlib import Path
from typing import Any, Literal

from jsonargparse import ArgumentParser, Namespace
from rich.console import Console

from kerple.base.atomic import refuse_links_out
from kerple.base.errors import UserError
from kerple.base.run_progress import duration
from kerple.cli import compared_run
from kerple.cli.job_preparation import prepare_jobs
from kerple.compare import committed_records
from kerple.compare.comparison_file import Comparison, Strategy
from kerple.compare.comparison_report import write_comparison
from kerple.compare.config_resolution import resolve
from kerple.compare.execution import execute, interruptible
from kerple.compare.finished_runs import FinishedRun, read_runs
from kerple.compare.inconsistencies import inconsistencies
from kerple.compare.plan_deviations import deviations
from kerple.compare.planned_run import PlannedRun
from kerple.compare.progress_board import Board
from kerple.compare.run_discovery import find_runs
from kerple.config.files import config_path
from kerple.config.parsing import command_parser, parse

ASK_ABOVE = 1800.0  # seconds of training above which the command asks whether to start


def main(arguments: list[str]) -> None:
    """Fit and test the missing runs and write a report of all runs, or write only a report of the finished runs.

    With ``--directories``, report the finished runs that these folders contain. No comparison file is read.

    Args:
        arguments: Arguments of the command.

    Raises:
        UserError: If an option or a configuration is wrong, or no run is finished. The options of all runs are checked
            before any run is started.
        SystemExit: With status 1 if runs failed, with status 130 after a signal. Finished runs are kept.
    """
    if any(argument.startswith("--directories") for argument in arguments):
        options = parse(_directories_parser(), arguments)
        runs = find_runs(map(Path, options.directories), options.test_folder)
        output = Path(options.output)
        _write_report(runs, output, name=options.name, baseline=options.baseline, printed=_printed(options))
        return
    options, comparison = _read(arguments)
    if options.parallel < 1:
        raise UserError(f"compare: parallel: got {options.parallel}, expected at least 1 run at a time")
    jobs, refused = prepare_jobs(comparison, options.parallel, options.report_only, options.rerun_changed)
    to_do = [job for job in jobs if not committed_records.finished(job)]
    _check_writable("output", comparison.report_folder)
    refuse_links_out("output", comparison.report_folder)  # of the records, which are written before the report
    if to_do and not options.report_only:
        _check_writable("runs", comparison.runs_folder)
        for job in to_do:
            refuse_links_out("runs", job.directory)
    fits = [] if options.report_only else [job.config for job in to_do if job.config]
    seconds = import_module("kerple.cli.comparison_duration").training_seconds(fits, options.parallel) if fits else None
    time = "" if seconds is None else f"; to train {len(fits)} of them takes about {duration(seconds)}"
    print(f"{len(jobs)} runs: {len(jobs) - len(to_do)} finished, {len(to_do)} to do{time}", flush=True)
    if options.report_only and to_do:
        print(f"missing: {', '.join(job.name for job in to_do)}")
    ask = (seconds or 0) > ASK_ABOVE and sys.stdin.isatty() and not options.yes
    if ask and input("start? [y/N] ").strip().lower() not in ("y", "yes"):
        return
    if to_do and not options.report_only:
        print(f"the output of a run is in a file such as {to_do[0].sidecar('.log')}", flush=True)
        _run(comparison, jobs, to_do, options.parallel)
    _report(comparison, jobs, refused, _printed(options))


def _read(arguments: list[str]) -> tuple[Namespace, Comparison]:
    parser = _parser()
    options = parse(parser, arguments)
    # not instantiate_classes, which would also build the objects in `test` and `flags`, such as a user's own callback
    values = options.as_dict()
    strategies = {label: None if each is None else Strategy(**each) for label, each in values["strategies"].items()}
    names = [field.name for field in fields(Comparison)]
    return options, Comparison(**{name: values[name] for name in names} | {"strategies": strategies})


def _check_writable(key: str, folder: Path) -> None:
    existing = next(path for path in (folder, *folder.parents) if path.exists())
    if not existing.is_dir() or not os.access(existing, os.W_OK):
        raise UserError(f"compare: {key}: got {folder}, but {existing} is not a folder that can be written to")


def _run(comparison: Comparison, jobs: list[PlannedRun], to_do: list[PlannedRun], parallel: int) -> None:
    """Fit and test the runs ``to_do``, and show their progress.

    Raises:
        SystemExit: If runs failed, or after a signal.
    """
    board = Board(len(jobs), to_do, parallel, Console(soft_wrap=True, highlight=False))
    failed = 0
    running = execute(to_do, parallel, ["-m", compared_run.__name__])
    try:
        with interruptible(), board, contextlib.closing(running):
            for ended in running:
                board.tick()
                if ended is not None:
                    job, error = ended
                    board.unfinished.remove(job)
                    board.print(error or f"{job.name}: {_row(job.finished_run)}")
                    failed += error is not None
                    if error is None:
                        committed_records.write_record(job, comparison.records)
    except KeyboardInterrupt:
        left = [job for job in to_do if not committed_records.finished(job)]
        print(f"stopped: {len(jobs) - len(left)} of {len(jobs)} runs are done; to continue, run the command again")
        raise SystemExit(130) from None
    if failed:
        print(f"{failed} of {len(to_do)} runs failed; --report_only writes the report without them")
        raise SystemExit(1)


def _row(run: FinishedRun) -> str:
    """Return one line with the results of a run for its first metric and protocol, a number for each length."""
    results = read_runs([run]).results
    metric, protocol = results[["metric", "protocol"]].iloc[0]
    first = results[(results["metric"] == metric) & (results["protocol"] == protocol)].sort_values("length")
    cells = zip(first["value"], first["length"], strict=True)
    return f"{metric} ({protocol}) {', '.join(f'{value:.4g} at {length:,}' for value, length in cells)}"


def _report(comparison: Comparison, jobs: list[PlannedRun], refused: dict[str, str], printed: list[str] | None) -> None:
    """Write the report of the finished runs, and print its first table.

    With a plan, the report contains only the strategies whose runs are all finished, to prevent interim looks.
    """
    ready = {job.name: job for job in jobs if committed_records.finished(job)}
    unfinished = {job.label for job in jobs if comparison.plan and job.name not in ready}
    order = list(comparison.strategies)
    reported = [job for job in ready.values() if job.label not in unfinished]
    runs = [job.finished_run for job in sorted(reported, key=lambda job: (order.index(job.label), job.seed))]
    if not runs:
        what = "strategy with all its runs" if comparison.plan else "finished run"
        raise UserError(f"compare: runs: got no {what} of {comparison.name}; run it first, without --report_only")
    # until a run of the baseline is finished, the first strategy with a finished run takes its place
    baseline = comparison.baseline if comparison.baseline in (run.strategy for run in runs) else runs[0].strategy
    texts = {"missing": [job.name for job in jobs if job.name not in ready]}
    if comparison.plan:
        _, plan = _read(["--config", config_path(comparison.plan)])
        texts["deviations"] = deviations(plan, {job.name: resolve(job) for job in plan.jobs()}, ready, refused)
    _write_report(runs, comparison.report_folder, name=comparison.name, baseline=baseline, printed=printed, **texts)
    if not texts["missing"]:
        committed_records.pack(comparison.report_folder)


def _write_report(finished: list[FinishedRun], folder: Path, **options: Any) -> None:
    """Warn of inconsistencies between the runs, write their report, and print its first table.

    Args:
        finished: The finished runs.
        folder: Folder of the report.
        **options: Other arguments of `write_comparison`.
    """
    runs = read_runs(finished)
    for difference in inconsistencies(runs):
        print(f"warning: runs differ in more than strategy and seed: {difference}")
    report = write_comparison(runs, folder, **options)
    title, first, *_ = (folder / "table.md").read_text(encoding="utf-8").split("### ")
    print(f"{title}### {first}\nreport: {report}")


def _printed(options: Namespace) -> list[str] | None:
    """Return the strategies in the figures for print: an empty list for all strategies, or None for no figures."""
    return options.figure_strategies or ([] if options.figure else None)


def _parser() -> ArgumentParser:
    about = "Train and test the missing runs of strategies × seeds, and write one report."
    about += " With --directories DIR ... --baseline NAME --output DIR: report the finished runs found in each DIR."
    parser = command_parser("compare", about)
    parser.add_argument("--config", action="config", help="file that defines the comparison; see configs/compare")
    parser.add_class_arguments(Comparison)
    parser.add_argument("--parallel", type=int, default=1, help="runs at a time, each with an equal part of the cores")
    parser.add_argument("--yes", action="store_true", help="do not ask before a training of more than half an hour")
    changed = "train again the runs whose configuration has changed"
    parser.add_argument("--rerun_changed", "--rerun-changed", action="store_true", help=changed)
    _add_report_arguments(parser)
    return parser


def _directories_parser() -> ArgumentParser:
    parser = command_parser("compare --report_only")
    folders = "folders that are runs or contain runs; a run NAME/seed-<n> is named NAME, any other run like its folder"
    parser.add_argument("--directories", type=str, nargs="+", required=True, help=folders)
    tests = "name of the folder with the results of a test, inside the folder of its run"
    parser.add_argument("--test_folder", "--test-folder", type=str, default="test", help=tests)
    parser.add_argument("--baseline", type=str, required=True, help="strategy with which the others are compared")
    parser.add_argument("--output", type=str, required=True, help="folder of the report")
    parser.add_argument("--name", type=str, default="comparison", help="title of the report")
    _add_report_arguments(parser)
    return parser


def _add_report_arguments(parser: ArgumentParser) -> None:
    report_only = "report the finished runs, train nothing; --directories implies it"
    parser.add_argument("--report_only", "--report-only", action="store_true", help=report_only)
    parser.add_argument("--figure", type=Literal["paper"] | None, help="also write figures for print, as PDFs")
    names = "strategies in these PDFs; default: all"
    parser.add_argument("--figure_strategies", "--figure-strategies", type=str, nargs="+", help=names)

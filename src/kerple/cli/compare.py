"""`python run.py compare`: its options, and what it does: check the runs, take committed ones or run them, report.

Lightning, which takes seconds, is imported where it is used, so that option errors are reported first.
"""

import contextlib
import signal
import sys
from collections.abc import Iterator
from dataclasses import fields, replace
from importlib import import_module
from pathlib import Path
from typing import Any, Literal

from jsonargparse import ArgumentParser, Namespace
from rich.console import Console

from kerple.base.errors import UserError
from kerple.base.progress import duration
from kerple.base.shipped_configs import config_path
from kerple.cli import compared_run
from kerple.cli.arguments import command_parser, parse
from kerple.cli.resolve import prepare_and_checksum, resolve, with_inputs, with_precision
from kerple.compare import page, records
from kerple.compare.board import Board
from kerple.compare.comparison import Comparison, Job
from kerple.compare.engines import ENGINES
from kerple.compare.job import forget, hurry
from kerple.compare.plan import deviations, digests
from kerple.compare.runs import Run, locate, read_runs

ASK_ABOVE = 1800.0  # seconds
RUN = ["-m", compared_run.__name__]


def main(arguments: list[str]) -> None:
    """Fit and test the runs that are missing and report all; or report only the finished ones.

    Raises:
        UserError: If an option or a configuration is wrong; nothing was started then.
        SystemExit: With status 1 if runs failed, with status 130 if it was stopped. Finished runs are kept.
    """
    if any(argument.startswith("--directories") for argument in arguments):
        options = parse(_directories_parser(), arguments)
        runs = locate(map(Path, options.directories), options.test_folder)
        print(_report(runs, Path(options.output), options.name, options.baseline, printed=_printed(options)))
        return
    options = _options(arguments)
    comparison = _comparison(options)
    if options.parallel < 1:
        raise UserError(f"compare: parallel: got {options.parallel}, expected at least 1 run at a time")
    jobs, refused = _jobs(comparison, options)
    to_do = [job for job in jobs if not records.finished(job)]
    fits = [] if options.report_only else [job.config for job in to_do if job.config]
    seconds = import_module("kerple.cli.estimate").training_seconds(fits, options.parallel) if fits else None
    time = "" if seconds is None else f"; to train {len(fits)} of them takes about {duration(seconds)}"
    print(f"{len(jobs)} runs: {len(jobs) - len(to_do)} finished, {len(to_do)} to do{time}", flush=True)
    if options.report_only and to_do:
        print(f"missing: {', '.join(job.name for job in to_do)}")
    ask = (seconds or 0) > ASK_ABOVE and sys.stdin.isatty() and not options.yes
    if ask and input("start? [y/N] ").strip().lower() not in ("y", "yes"):
        return
    if to_do and not options.report_only:
        print(f"what a run prints goes to a file like {to_do[0].beside('.log')}", flush=True)
        _run(comparison, jobs, to_do, options.parallel, options.engine)
    _report_of(comparison, jobs, refused, _printed(options))


def _options(arguments: list[str]) -> Namespace:
    parser = _parser()
    return parser.instantiate_classes(parse(parser, arguments))


def _comparison(options: Namespace) -> Comparison:
    return Comparison(**{field.name: options[field.name] for field in fields(Comparison)})


def _jobs(comparison: Comparison, options: Namespace) -> tuple[list[Job], dict[str, str]]:
    """All runs of a comparison, resolved, and by name of a run why its record is not taken, if it has one.

    The results in a record of the same run are copied into the folder of the run.
    """
    report_only, console = options.report_only, Console(stderr=True)
    with console.status(f"reading the options of {comparison.name}'s runs"):
        plan = digests(comparison)
        resolved = [replace(with_inputs(resolve(job)), plan=plan) for job in comparison.jobs()]
    kept = comparison.records
    sums: dict[str, str | None] = {}
    for job in resolved:
        data = _data(job)
        if report_only:  # a report prepares nothing: the data is that of the first run, of which all others must be
            runs = map(records.described, [job.test_folder, *map(job.record, kept)])
            same = (run.get("data") for run in runs if run and not records.differences(run["config"], job.training))
            sums[str(data)] = sums.get(str(data)) or next(same, None)
        # without a checksum a finished run is believed, and its data is not read again
        elif str(data) not in sums and not records.finished(job):
            sums[str(data)] = prepare_and_checksum(data)
    jobs = [replace(job, data=sums.get(str(_data(job))), parallel=options.parallel) for job in resolved]
    refused = _check(jobs, report_only, options.rerun_changed)
    said: dict[str, list[Job]] = {}
    for job in jobs:
        if not records.finished(job) and not job.directory.joinpath("checkpoints").exists():
            for report, record in ((report, job.record(folder)) for folder, report in kept.items()):
                if not record.is_dir():
                    continue
                # a report reuses runs of any precision where it is `auto`; runs of this machine are to be like them
                objection = records.reuse(job if report_only else with_precision(job), record)
                what = f"not reused from {report}: {objection}" if objection else f"reused from {report}"
                said.setdefault(what, []).append(job)
                if objection is None:
                    break
                refused[job.name] = objection
        if records.finished(job):
            records.write_record(job, kept)
    for what, of_jobs in said.items():
        others = f" and {len(of_jobs) - 1} other run{'s' * (len(of_jobs) > 2)}" if of_jobs[1:] else ""
        print(f"{of_jobs[0].name}{others}: {what}")
    return jobs, refused


def _data(job: Job) -> dict[str, Any] | None:
    return (job.config or job.tested).get("data")


def _check(jobs: list[Job], report_only: bool, rerun_changed: bool) -> dict[str, str]:
    """Check for runs of other configurations, before anything is started or removed; describe them by name."""
    changed = {job: "; ".join(differences) for job in jobs if (differences := records.changes(job))}
    lines = [f"  {job.name}: {differences}" for job, differences in changed.items()]
    if changed and report_only:
        print("\n".join(["warning: runs were made otherwise and are left out:", *lines]))
    elif changed and not rerun_changed:
        raise UserError(
            "compare: runs that exist have another configuration; add --rerun_changed to start them afresh, or give "
            "this comparison another folder for its runs: --runs\n" + "\n".join(lines)
        )
    elif changed:
        for job in changed:
            forget(job)
    return {job.name: differences for job, differences in changed.items()}


def _run(comparison: Comparison, jobs: list[Job], to_do: list[Job], parallel: int, engine: str) -> None:
    """Finish the runs, showing their progress.

    Raises:
        SystemExit: If runs failed or it was stopped.
    """
    board = Board(len(jobs), to_do, parallel, Console(soft_wrap=True, highlight=False))
    failed = 0
    running = ENGINES[engine](to_do, parallel, RUN)
    try:
        with _interruptible(), board, contextlib.closing(running):
            for ended in running:
                board.tick()
                if ended is not None:
                    job, error = ended
                    board.open.remove(job)
                    board.print(error or f"{job.name}: {_row(job.as_run)}")
                    failed += error is not None
                    if error is None:
                        records.write_record(job, comparison.records)
    except KeyboardInterrupt:
        left = [job for job in to_do if not records.finished(job)]
        print(f"stopped: {len(jobs) - len(left)} of {len(jobs)} runs are done; the same command goes on from there")
        raise SystemExit(130) from None
    if failed:
        print(f"{failed} of {len(to_do)} runs failed; the report waits for them, or use --report_only")
        raise SystemExit(1)


@contextlib.contextmanager
def _interruptible() -> Iterator[None]:
    """Context in which SIGTERM, and SIGHUP without nohup, end a comparison as Ctrl-C does, and a second one at once."""
    handlers = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)}
    handlers = {number: handler for number, handler in handlers.items() if handler is not signal.SIG_IGN}
    hurry.clear()

    def stop(*_: Any) -> None:
        for number in handlers:
            signal.signal(number, lambda *_: hurry.set())
        raise KeyboardInterrupt

    for number in handlers:
        signal.signal(number, stop)
    try:
        yield
    finally:
        for number, handler in handlers.items():
            signal.signal(number, handler)


def _row(run: Run) -> str:
    """The results of a run's first protocol in one line, a number for each length."""
    results = read_runs([run]).results
    metric, protocol = results[["metric", "protocol"]].iloc[0]
    first = results[(results["metric"] == metric) & (results["protocol"] == protocol)].sort_values("length")
    cells = zip(first["value"], first["length"], strict=True)
    return f"{metric} ({protocol}) {', '.join(f'{value:.4g} at {length:,}' for value, length in cells)}"


def _report_of(comparison: Comparison, jobs: list[Job], refused: dict[str, str], printed: list[str] | None) -> None:
    ready = {job.name: job for job in jobs if records.finished(job)}
    if not ready:
        raise UserError(f"compare: runs: got no finished run of {comparison.name}; run it first")
    order = list(comparison.strategies)
    runs = [job.as_run for job in sorted(ready.values(), key=lambda job: (order.index(job.label), job.seed))]
    labels = [run.strategy for run in runs]
    baseline = comparison.baseline if comparison.baseline in labels else labels[0]  # until the baseline is finished
    texts = {"missing": [job.name for job in jobs if job.name not in ready]}
    if comparison.plan:
        plan = _comparison(_options(["--config", config_path(comparison.plan)]))
        planned = {job.name: resolve(job) for job in plan.jobs()}
        texts["deviations"] = deviations(plan, planned, ready, refused)
    events = comparison.runs_folder / "comparison"
    path = _report(runs, comparison.report_folder, comparison.name, baseline, **texts, printed=printed, events=events)
    if not texts["missing"]:
        records.pack(comparison.report_folder)
    title, first, *_ = (comparison.report_folder / "table.md").read_text(encoding="utf-8").split("### ")
    print(f"{title}### {first}\nreport: {path}")


def _report(runs: list[Run], folder: Path, name: str, baseline: str, **options: Any) -> Path:
    tables = read_runs(runs)
    for difference in page.inconsistencies(tables):
        print(f"warning: runs differ in more than strategy and seed: {difference}")
    return page.write(tables, folder, name=name, baseline=baseline, **options)


def _parser() -> ArgumentParser:
    parser = command_parser(
        "compare",
        "Fits and tests strategies × seeds, what is missing of them, and writes one report. "
        "With --report_only --directories DIR ... --baseline NAME --output DIR: of finished runs from anywhere.",
    )
    parser.add_argument("--config", action="config", help="the comparison; see configs/compare")
    parser.add_class_arguments(Comparison)
    parser.add_argument("--parallel", type=int, default=1, help="runs at a time, each with its share of the cores")
    parser.add_argument("--engine", type=Literal["local", "ray"], default="local", help="this machine or a Ray cluster")
    parser.add_argument("--yes", action="store_true", help="start without asking, however long it takes")
    changed, only = "start runs whose configuration changed afresh", "train nothing, report what is finished"
    parser.add_argument("--rerun_changed", "--rerun-changed", action="store_true", help=changed)
    parser.add_argument("--report_only", "--report-only", action="store_true", help=only)
    _add_figure(parser)
    return parser


def _add_figure(parser: ArgumentParser) -> None:
    parser.add_argument("--figure", type=Literal["paper"] | None, help="figures for print too: PDFs, a column wide")
    parser.add_argument(
        "--figure_strategies", "--figure-strategies", type=str, nargs="+", help="in them; all if left out"
    )


def _printed(options: Namespace) -> list[str] | None:
    """The strategies in figures for print: none stands for all, None for no such figures."""
    chosen = options.figure_strategies or []
    return chosen if chosen or options.figure else None


def _directories_parser() -> ArgumentParser:
    parser = command_parser("compare --report_only")
    parser.add_argument("--report_only", "--report-only", action="store_true", help="implied")
    parser.add_argument(
        "--directories",
        type=str,
        nargs="+",
        required=True,
        help="folders with runs in or below them; a run is called by the class of its strategy, or, where a class has "
        "a seed twice, by the folder above seed-<n>",
    )
    parser.add_argument("--test_folder", "--test-folder", type=str, default="test", help="in a run, with the test")
    parser.add_argument("--baseline", type=str, required=True, help="strategy the others are tested against")
    parser.add_argument("--output", type=str, required=True, help="folder of the report")
    parser.add_argument("--name", type=str, default="comparison", help="its title")
    _add_figure(parser)
    return parser

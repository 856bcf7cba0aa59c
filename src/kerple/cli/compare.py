"""The command: what to do with a comparison."""

from dataclasses import fields
from pathlib import Path
from typing import Any, Literal

from jsonargparse import ArgumentParser, Namespace

from kerple.compare import job as jobs
from kerple.compare.comparison import Comparison, Job
from kerple.compare.engines import ENGINES
from kerple.compare.flat import flat
from kerple.compare.resolve import prepare, resolve
from kerple.errors import UserError
from kerple.report import page as report
from kerple.report.runs import Run, Runs, locate, read


def main(arguments: list[str]) -> None:
    """Fit and test what is missing, then report; or report what is finished.

    Args:
        arguments: Of the command line, without the command itself.

    Raises:
        UserError: If the comparison cannot be run as asked; nothing was started then.
        SystemExit: With status 1, if runs failed; the others were finished and are kept.
    """
    if any(argument.startswith("--directories") for argument in arguments):
        _report_directories(arguments)
        return
    options = _parser().instantiate_classes(_parser().parse_args(arguments))
    comparison = Comparison(**{field.name: options[field.name] for field in fields(Comparison)})
    if options.parallel < 1:
        raise UserError(f"compare: parallel: got {options.parallel}, expected at least 1 run at a time")
    work = comparison.jobs()
    if options.report_only:
        _warn_of_changes(work)
    else:
        _run(work, options)
    _report(comparison, work)


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
        "--report_only", "--report-only", action="store_true", help="run nothing, report what is finished"
    )
    return parser


def _report_directories(arguments: list[str]) -> None:
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
    options = parser.parse_args(arguments)
    runs = read(locate(map(Path, options.directories), options.test_folder))
    print(report.write(runs, Path(options.output), name=options.name, baseline=options.baseline))
    _warn(runs)


def _run(work: list[Job], options: Namespace) -> None:
    configs = {job: resolve(job) for job in work}
    flattened = {job: flat(config) for job, config in configs.items()}
    _check(work, flattened, options.rerun_changed)
    open_jobs = [job for job in work if not jobs.finished(job)]
    print(f"{len(work)} runs: {len(work) - len(open_jobs)} finished, {len(open_jobs)} to do")
    if open_jobs:
        print(f"what a run prints goes to a file like {open_jobs[0].beside('.log')}")
    prepared: list[Any] = []
    for job in open_jobs:
        if (data := configs[job].get("data")) not in prepared:
            prepare(data)
            prepared.append(data)
    done = 0

    def say(message: str) -> None:
        nonlocal done
        done += message.endswith(": done")
        print(f"[{len(work) - len(open_jobs) + done}/{len(work)}] {message}", flush=True)

    failed = ENGINES[options.engine]([(job, flattened[job]) for job in open_jobs], options.parallel, say)
    if failed:
        print(f"{len(failed)} of {len(open_jobs)} runs failed; the report waits for them, or use --report_only")
        raise SystemExit(1)


def _check(work: list[Job], configs: dict[Job, dict[str, Any]], rerun_changed: bool) -> None:
    """Refuse to mix runs of different configurations, before anything is started, removed or taken over."""
    outdated, by_hand = {}, {}
    for job in work:
        if jobs.state(job):
            if changed := jobs.differences(job, configs[job]):
                outdated[job] = changed
        elif job.directory.exists():
            by_hand[job] = jobs.objections(job, configs[job])
    complaints = []
    if outdated and not rerun_changed:
        complaints.append("runs that exist have another configuration; add --rerun_changed to start them afresh")
        complaints += [f"  {job.name}: {'; '.join(changed)}" for job, changed in outdated.items()]
    if any(by_hand.values()):
        complaints.append("folders that compare did not make are in the way, and it does not remove them")
        complaints += [
            f"  {job.name}: {'; '.join(reasons)}; move or remove {job.directory}"
            for job, reasons in by_hand.items()
            if reasons
        ]
    if complaints:
        complaints.append("Or keep them, and give this comparison another folder for its runs: --runs")
        raise UserError("compare: " + "\n".join(complaints))
    for job in outdated:
        jobs.forget(job)
    for job in by_hand:
        jobs.adopt(job, configs[job])


def _warn_of_changes(work: list[Job]) -> None:
    """Of finished runs that the comparison, as it is now, would not have made: they are still reported."""
    for job in filter(jobs.finished, work):
        if changed := jobs.differences(job, flat(resolve(job))):
            print(f"warning: {job.name} was run with another configuration: {'; '.join(changed)}")


def _report(comparison: Comparison, work: list[Job]) -> None:
    ready = [job for job in work if jobs.finished(job)]
    missing = [job.name for job in work if job not in ready]
    if not ready:
        raise UserError(f"compare: no run of {comparison.name} in {comparison.runs_folder} is finished; run it first")
    found = read(
        Run(job.label, job.seed, job.directory, job.test_folder.name, job.part)
        for job in sorted(ready, key=_place(comparison))
    )
    path = report.write(
        found, comparison.report_folder, name=comparison.name, baseline=comparison.baseline, missing=missing
    )
    # the other tables are for the report
    title, first, *_ = (comparison.report_folder / "table.md").read_text().split("### ")
    print(f"{title}### {first}")
    for figure in sorted(comparison.report_folder.glob("*-against-length.png")):
        print(f"figure: {figure}")
    print(f"report: {path}")
    _warn(found)


def _warn(runs: Runs) -> None:
    for difference in report.mixed(runs):
        print(f"warning: runs differ in more than strategy and seed: {difference}")


def _place(comparison: Comparison) -> Any:
    order = list(comparison.strategies)
    return lambda job: (order.index(job.label), job.seed)

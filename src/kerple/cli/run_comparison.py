"""What `python run.py compare` does: it checks the runs, takes committed ones or runs them, and writes the report.

The options are in `compare`, which imports this module only when they are right.
"""

import contextlib
import json
import signal
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from jsonargparse import Namespace
from rich.console import Console

from kerple.base.errors import UserError
from kerple.cli.resolve import check_test, prepare, resolve
from kerple.compare import job as jobs
from kerple.compare import page, records
from kerple.compare.board import Board
from kerple.compare.collect import Run, Runs, locate, read
from kerple.compare.comparison import Comparison, Job
from kerple.compare.engines import ENGINES
from kerple.compare.flat import flat


@dataclass(frozen=True)
class Request:
    """The resolved configuration of a run, nested and flat."""

    nested: dict[str, Any]
    flat: dict[str, Any]

    @property
    def data(self) -> str:
        """The data section as a text, which serves as a key."""
        return json.dumps(self.nested.get("data"), sort_keys=True)


def run(comparison: Comparison, parallel: int, engine: str, rerun_changed: bool) -> None:
    """Finish all runs of a comparison and report them.

    Args:
        comparison: The comparison.
        parallel: Number of runs at a time.
        engine: Name of an engine, a key of `ENGINES`.
        rerun_changed: Whether runs of another configuration are removed and started again.

    Raises:
        UserError: If the comparison cannot be run as asked.
        SystemExit: With status 1 if runs failed, with status 130 if it was stopped.
    """
    work = comparison.jobs()
    asked = _asked(work)
    _check(work, {job: asked[job].flat for job in work}, rerun_changed)
    sums = _checksums(asked[job] for job in work if not _is_complete(comparison, job, asked[job]))
    _check_data(work, asked, sums, rerun_changed)
    taken = sum(_taken(comparison, job, asked[job], sums) for job in work if not jobs.finished(job))
    to_do = [job for job in work if not jobs.finished(job)]
    for job in work:
        if jobs.finished(job) and not _is_complete(comparison, job, asked[job]):
            _keep(comparison, job, asked[job], sums)
    committed = f" ({taken} of them were taken from committed runs)" if taken else ""
    print(f"{len(work)} runs: {len(work) - len(to_do)} finished{committed}, {len(to_do)} to do", flush=True)
    failed = 0
    if to_do:
        print(f"what a run prints goes to a file like {to_do[0].beside('.log')}", flush=True)
        running = ENGINES[engine]([(job, asked[job].flat, sums[asked[job].data]) for job in to_do], parallel)
        board = Board(work, to_do, parallel, Console(soft_wrap=True, highlight=False))
        try:
            with _interruptible(), board, contextlib.closing(running):
                failed = _watch(comparison, work, running, board, lambda job: _keep(comparison, job, asked[job], sums))
        except KeyboardInterrupt:
            print("\n".join(_stopped(work)), flush=True)
            raise SystemExit(130) from None
    if failed:
        print(f"{failed} of {len(to_do)} runs failed; the report waits for them, or use --report_only")
        raise SystemExit(1)
    _report(comparison, work)


def report_finished(comparison: Comparison) -> None:
    """Report the finished and the committed runs of a comparison, and warn of those with another configuration today.

    Raises:
        UserError: If no run is finished.
    """
    work = comparison.jobs()
    asked = _asked(job for job in work if jobs.finished(job) or any(_records(comparison, job)))
    absent = [job for job in asked if not jobs.finished(job)]
    sums = _checksums(asked[job] for job in absent)
    for job in absent:
        _taken(comparison, job, asked[job], sums)
    for job in filter(jobs.finished, asked):
        if changed := jobs.changes(job, asked[job].flat):
            print(f"warning: {job.name} was run with another configuration: {'; '.join(changed)}")
    _report(comparison, work)


def report_directories(options: Namespace) -> None:
    """Report finished runs in any folders; options are directories, test_folder, output, name and baseline."""
    runs = read(locate(map(Path, options.directories), options.test_folder))
    _warn(runs)
    print(page.write(runs, Path(options.output), name=options.name, baseline=options.baseline))


def _check(work: list[Job], configs: dict[Job, dict[str, Any]], rerun_changed: bool) -> None:
    """Check for runs of other configurations, before anything is started, removed or taken over."""
    outdated, by_hand = {}, {}
    for job in work:
        if jobs.state(job):
            if changed := jobs.changes(job, configs[job]):
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


def _check_data(work: list[Job], asked: dict[Job, Request], sums: dict[str, str | None], rerun_changed: bool) -> None:
    """Check for runs that were trained on other data than there is now, before anything is started."""
    other = [job for job in work if asked[job].data in sums and jobs.of_other_data(job, sums[asked[job].data])]
    if other and not rerun_changed:
        raise UserError(
            f"compare: {', '.join(job.name for job in other)}: began on data with other checksums than what is in "
            "data.directory now; put that back, add --rerun_changed to start them afresh, or give this comparison "
            "another folder for its runs: --runs"
        )
    for job in other:
        jobs.forget(job)


def _is_complete(comparison: Comparison, job: Job, asked: Request) -> bool:
    """Whether a run is finished and its record is beside the report."""
    return jobs.finished(job) and records.is_of(records.path_of(job, comparison.report_folder), job, asked.flat)


def _asked(work: Iterable[Job]) -> dict[Job, Request]:
    asked = {job: Request(config := resolve(job), flat(config)) for job in work}
    if fitted := next((job for job in asked if not job.pretrained), None):  # all have the same flags of their tests
        check_test(fitted, asked[fitted].nested)
    return asked


def _checksums(asked: Iterable[Request]) -> dict[str, str | None]:
    """Checksums of the data of these runs, by `Request.data`. Data that is missing is prepared."""
    sums: dict[str, str | None] = {}
    for one in asked:
        if one.data not in sums:
            sums[one.data] = records.fingerprint(prepare(one.nested.get("data")))
    return sums


def _taken(comparison: Comparison, job: Job, asked: Request, sums: dict[str, str | None]) -> bool:
    """Take a committed run for this one if possible, and print where it is from, or why it cannot be taken."""
    if (jobs.state(job) or job.directory.exists()) and not jobs.only_tested_otherwise(job):
        return False
    for path in _records(comparison, job):
        objection = records.take(job, asked.flat, sums[asked.data], path)
        done = f"taken from {path} ({records.describe(path)})" if objection is None else f"not from {path}: {objection}"
        print(f"{job.name}: {done}", flush=True)
        if objection is None:
            return True
    return False


def _records(comparison: Comparison, job: Job) -> Iterator[Path]:
    """The files of this run that are committed, of this comparison's report and of others."""
    return filter(Path.is_file, (records.path_of(job, folder) for folder in comparison.committed))


def _keep(comparison: Comparison, job: Job, asked: Request, sums: dict[str, str | None]) -> None:
    records.keep(job, asked.flat, sums[asked.data], records.path_of(job, comparison.report_folder))


def _watch(
    comparison: Comparison,
    work: list[Job],
    running: Iterator[tuple[Job, str | None] | None],
    board: Board,
    keep: Callable[[Job], None],
) -> int:
    """Show progress, print a row for each run that ends, and write the report again; return how many runs failed."""
    failed, pace = 0, Pace()
    for ended in running:
        board.tick()
        board.advise(comparison.minutes, comparison.smaller)
        if ended is None:
            continue
        job, error = ended
        board.ended(job, well=error is None)
        if error is not None:
            failed += 1
            board.say(error)
            continue
        keep(job)
        board.say(f"{job.name}: {_row(job)}")
        if board.open and pace.due():
            with pace:
                path, _ = _write(comparison, work)
            if pace.times == 1:
                board.say(f"a report of what is done, written anew while runs end: {path}")
    return failed


class Pace:
    """Says when something slow is due: at first, and then so seldom that it takes at most a tenth of the time."""

    def __init__(self) -> None:
        self.times, self._took, self._ended = 0, 0.0, 0.0

    def due(self) -> bool:
        return time.monotonic() - self._ended >= 9 * self._took

    def __enter__(self) -> None:
        self._began = time.monotonic()

    def __exit__(self, *_: object) -> None:
        self._ended = time.monotonic()
        self.times, self._took = self.times + 1, self._ended - self._began


@contextlib.contextmanager
def _interruptible() -> Iterator[None]:
    """Context in which SIGTERM, which clusters and CI jobs send, ends a comparison as Ctrl-C does."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGTERM, interrupt)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def _stopped(work: list[Job]) -> Iterator[str]:
    """Yield lines that say what is finished, and what the same command would do with the rest."""
    left = [job for job in work if not jobs.finished(job)]  # a run may have ended while a report was written
    yield f"stopped: {len(work) - len(left)} of {len(work)} runs are done"
    begun = [job for job in left if job.checkpoint.is_file()]
    for job in begun:
        yield f"{job.name}: will be {'tested' if jobs.state(job).get('fitted') else f'resumed from {job.checkpoint}'}"
    fresh = len(left) - len(begun)
    starts = f" and starts the other {fresh}" if fresh and begun else f" and starts the {fresh} that are left"
    yield f"the same command goes on from there{starts if fresh else ''}"


def _row(job: Job) -> str:
    """The results of a run's first protocol in one line, a number for each length."""
    results = read([_run_of(job)]).results
    metric, protocol = results[["metric", "protocol"]].iloc[0]
    first = results[(results["metric"] == metric) & (results["protocol"] == protocol)].sort_values("length")
    values = ", ".join(
        f"{value:.4g} at {length:,}" for value, length in zip(first["value"], first["length"], strict=True)
    )
    return f"{metric} ({protocol}) {values}"


def _write(comparison: Comparison, work: list[Job]) -> tuple[Path, Runs]:
    """Write the report of the finished runs; return its path, and the runs."""
    ready = [job for job in work if jobs.finished(job)]
    missing = [job.name for job in work if job not in ready]
    if not ready:
        raise UserError(
            f"compare: runs: got {comparison.runs_folder}, without a finished run of {comparison.name}; run it first"
        )
    order = list(comparison.strategies)
    found = read(_run_of(job) for job in sorted(ready, key=lambda job: (order.index(job.label), job.seed)))
    labels = [job.label for job in ready]
    baseline = comparison.baseline if comparison.baseline in labels else labels[0]  # until the baseline is finished
    path = page.write(found, comparison.report_folder, name=comparison.name, baseline=baseline, missing=missing)
    return path, found


def _report(comparison: Comparison, work: list[Job]) -> None:
    path, found = _write(comparison, work)
    _warn(found)
    # the other tables are for the report
    title, first, *_ = (comparison.report_folder / "table.md").read_text().split("### ")
    print(f"{title}### {first}")
    for figure in sorted(comparison.report_folder.glob("*-against-length.png")):
        print(f"figure: {figure}")
    print(f"report: {path}")


def _warn(runs: Runs) -> None:
    for difference in page.mixed(runs):
        print(f"warning: runs differ in more than strategy and seed: {difference}")


def _run_of(job: Job) -> Run:
    return Run(job.label, job.seed, job.directory, job.test_folder.name, job.part)

"""`compare_strategies`: resolves the runs of a comparison, executes the missing ones, and reports all."""

import contextlib
import os
import sys
from collections.abc import Callable, Collection, Container, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console

from kerple.base.atomic import refuse_links_out
from kerple.base.errors import UserError, require
from kerple.base.run_progress import duration
from kerple.compare import committed_records
from kerple.compare.comparison_file import Comparison, read_comparison
from kerple.compare.comparison_report import write_comparison
from kerple.compare.engines import Engine, LocalProcesses, interruptible
from kerple.compare.finished_runs import FinishedRun, read_runs
from kerple.compare.plan_deviations import deviations
from kerple.compare.planned_run import PlannedRun
from kerple.compare.progress_board import Board
from kerple.compare.resolution import (
    find_changed_runs,
    parents_without_weights,
    plan_runs,
    resolve,
    reuse_records,
)
from kerple.compare.run_process import delete_run
from kerple.measure.results_table import ABOUT

ASK_ABOVE = 1800.0  # seconds of training above which `compare_strategies` asks whether to start


def compare_strategies(
    comparison: Comparison,
    parallel: int = 1,
    report_only: bool = False,
    rerun_changed: bool = False,
    yes: bool = False,
    printed: Sequence[str] | None = None,
    engine: Callable[[int], Engine[Any]] = LocalProcesses,
) -> None:
    """Fit and test the missing runs of a comparison, and write a report of all runs.

    Args:
        comparison: The comparison.
        parallel: Number of runs at a time.
        report_only: Whether to train nothing, and to report only the finished runs.
        rerun_changed: Whether to train runs again whose configuration has changed.
        yes: Whether to start without a question if the training takes more than `ASK_ABOVE` seconds.
        printed: See `kerple.compare.comparison_report.write_comparison`.
        engine: Returns the engine that executes the runs, from the number of runs at a time.

    Raises:
        UserError: If an option or a configuration is wrong, or no run is finished. The options of all runs are checked
            before any run is started.
        SystemExit: With status 1 if runs failed, with status 130 after a signal. Finished runs are kept.
    """
    require(parallel > 0, "compare: parallel", parallel, "at least 1 run at a time")
    unknown = ", ".join(label for label in printed or () if label not in comparison.strategies)
    require(not unknown, "compare: figure_strategies", unknown, f"some of {', '.join(comparison.strategies)}")
    check_writable("output", comparison.report_folder)
    refuse_links_out("output", comparison.report_folder)  # of the records, which are written before the report
    if report_only:  # to read the options of all runs takes up to minutes
        planned = comparison.planned_runs()
        names = {run.name for run in planned if has_results(run, comparison.records)}
        reportable_runs(comparison, planned, names)
    runs = plan_runs(comparison, parallel, report_only)
    for run in runs:
        if not committed_records.finished(run):
            refuse_links_out("runs", run.directory)
    for other in comparison.reuse_from:
        if not Path(other).is_dir():
            print(f"warning: compare: reuse_from: {other} does not exist in {Path.cwd()}; no record is reused from it")
    changed = find_changed_runs(runs, report_only, rerun_changed)
    refused = {run.name: changes for run, changes in changed.items()}
    outdated = [run for run in changed if committed_records.finished(run)]  # only their parents have changed
    kept = [run for run in runs if run not in (outdated if report_only else changed)]
    refused |= reuse_records(kept, comparison, report_only)
    missing = [run for run in runs if run in outdated or not committed_records.finished(run)]
    without_weights = [] if report_only else parents_without_weights(missing, runs, changed)
    missing = [*without_weights, *missing]
    to_do = [] if report_only else missing
    if to_do:
        check_writable("runs", comparison.runs_folder)
    seconds: float | None = None
    if fits := list(remaining_fits(to_do, changed)):
        from kerple.compare.comparison_duration import training_seconds  # imports torch, which takes seconds

        seconds = training_seconds(fits, parallel)
    time = "" if seconds is None else f"; to train {len(fits)} of them takes about {duration(seconds)}"
    print(f"{len(runs)} runs: {len(runs) - len(missing)} finished, {len(missing)} to do{time}", flush=True)
    if report_only and missing:
        print(f"missing: {', '.join(run.name for run in missing)}")
    ask = (seconds or 0) > ASK_ABOVE and sys.stdin.isatty() and sys.stdout.isatty() and not yes
    if ask and not _is_confirmed("start? [y/N] "):
        return
    executor = engine(parallel) if to_do else None  # before a run is deleted, because an option may be refused
    if changed and not report_only:  # deleted only after the question
        # another command may have made some of these runs since the question
        again = [run for run in find_changed_runs(runs, report_only, rerun_changed) if run in changed]
        for run in again:
            delete_run(run)
        for run in runs:  # the weights of a parent that is trained again are not known
            if run.parent in {parent.name for parent in again}:
                run.inputs.pop(committed_records.PARENT, None)
        refused |= reuse_records(changed, comparison, report_only, runs)
    for run in without_weights:
        if not run.checkpoint.is_file():
            delete_run(run)
    to_do = [run for run in to_do if not committed_records.finished(run)]
    if executor and to_do:
        print(f"the output of a run is in a file such as {to_do[0].sidecar('.log')}", flush=True)
        _execute(comparison, to_do, len(runs), executor)
        _exclude_outdated_stages(runs, {run.name for run in without_weights})
    _report_comparison(comparison, runs, outdated if report_only else (), refused, printed)


def remaining_fits(runs: Iterable[PlannedRun], changed: Collection[PlannedRun]) -> Iterator[dict[str, Any]]:
    """Yield the configurations of the unfinished fits of runs, with the remaining steps as ``trainer.max_steps``.

    Args:
        runs: The runs.
        changed: Runs that start again, because their configuration has changed.
    """
    for run in runs:
        config = run.config
        if run not in changed and run.checkpoint.is_file():
            from kerple.config.untrusted_checkpoints import load  # imports torch, which takes seconds

            with contextlib.suppress(UserError, LookupError, TypeError):  # the run itself reports a damaged checkpoint
                steps = config["trainer"]["max_steps"] - load(run.checkpoint, "meta")["global_step"]
                config = config | {"trainer": config["trainer"] | {"max_steps": steps}} if steps else {}
        if config:
            yield config


def _is_confirmed(question: str) -> bool:
    """Ask a question on the terminal, and return whether the answer is yes."""
    try:
        return input(question).strip().lower() in ("y", "yes")
    except EOFError:  # Ctrl-D
        print()
        return False


def check_writable(key: str, folder: Path) -> None:
    """Raise a UserError that names the option ``key`` unless a folder, which may not exist, can be written to."""
    existing = next(path for path in (folder, *folder.parents) if path.exists())
    if not existing.is_dir() or not os.access(existing, os.W_OK):
        raise UserError(f"compare: {key}: got {folder}, but {existing} is not a folder that can be written to")


def _execute(comparison: Comparison, to_do: list[PlannedRun], total: int, engine: Engine[Any]) -> None:
    """Fit and test the runs ``to_do`` of ``total`` runs by an engine, and show their progress.

    Raises:
        SystemExit: If runs failed, or after a signal.
    """
    board = Board(total, to_do, engine.parallel, Console(soft_wrap=True, highlight=False))
    failed = 0
    try:
        with interruptible(), board, contextlib.closing(engine.run(to_do)) as running:
            for ended in running:
                board.tick()
                if ended is not None:
                    run, error = ended
                    board.ended(run, error or f"{run.name}: {_first_results(run.finished_run)}")
                    failed += error is not None
                    if error is None:
                        committed_records.write_record(run, comparison.report_folder, comparison.records)
    except KeyboardInterrupt:
        left = [run for run in to_do if not committed_records.finished(run)]
        print(f"stopped: {total - len(left)} of {total} runs are done; to continue, run the command again")
        raise SystemExit(130) from None
    if failed:
        print(f"{failed} of {len(to_do)} runs failed; --report_only true writes the report without them")
        raise SystemExit(1)


def _exclude_outdated_stages(runs: Iterable[PlannedRun], retrained: Container[str]) -> None:
    """Print the finished stages whose parents were trained again with other weights, and count them as unfinished.

    For this, the digest of the new weights is added to the inputs of each stage of these parents.

    Args:
        runs: All runs.
        retrained: Names of the parents that were trained again.
    """
    for run in runs:
        if run.parent in retrained and committed_records.finished(run):
            run.inputs.update(committed_records.parent_digest(run))
            if not committed_records.finished(run):
                reason = f"{run.parent} was trained again and has other weights; to train the stage again, add"
                print(f"warning: {run.name} is not in the report: {reason} --rerun_changed true")


def _first_results(run: FinishedRun) -> str:
    """Return one line with the results of a run for its first metric and protocol, a number for each length."""
    results = read_runs([run]).results
    metric, protocol = results[["metric", "protocol"]].iloc[0]
    first = results[(results["metric"] == metric) & (results["protocol"] == protocol)].sort_values("length")
    cells = zip(first["value"], first["length"], strict=True)
    return f"{metric} ({protocol}) {', '.join(f'{value:.4g} at {length:,}' for value, length in cells)}"


def has_results(run: PlannedRun, folders: Iterable[Path]) -> bool:
    """Whether the folder of a run, or its record in one of some folders, has results, which may be of other options."""
    return any((folder / ABOUT).is_file() for folder in (run.test_folder, *map(run.record, folders)))


def reportable_runs(comparison: Comparison, runs: list[PlannedRun], finished: Container[str]) -> list[PlannedRun]:
    """Return the finished runs that a report contains.

    With a plan, these are the runs of the strategies whose runs are all finished, to prevent interim looks.

    Args:
        comparison: The comparison.
        runs: All runs.
        finished: Names of the finished runs.

    Raises:
        UserError: If there is no such run.
    """
    incomplete = {run.label for run in runs if comparison.plan and run.name not in finished}
    reported = [run for run in runs if run.name in finished and run.label not in incomplete]
    what = "strategy with all its runs" if comparison.plan else "finished run"
    if not reported:
        raise UserError(f"compare: runs: got no {what} of {comparison.name}; run it first, without --report_only true")
    return reported


def _report_comparison(
    comparison: Comparison,
    runs: list[PlannedRun],
    outdated: Collection[PlannedRun],
    refused: dict[str, str],
    printed: Sequence[str] | None,
) -> None:
    """Report the finished runs of a comparison without the outdated ones. If none is missing, pack their records."""
    finished = {run.name: run for run in runs if run not in outdated and committed_records.finished(run)}
    order = list(comparison.strategies)
    reported = reportable_runs(comparison, runs, finished)
    reported = sorted(reported, key=lambda run: (order.index(run.label), run.seed))
    # until a run of the baseline is finished, the first strategy with a finished run takes its place
    baseline = comparison.baseline if comparison.baseline in (run.label for run in reported) else reported[0].label
    texts = {"missing": [run.name for run in runs if run.name not in finished]}
    if comparison.plan:
        plan = read_comparison(comparison.plan)
        planned = {run.name: resolve(run) for run in plan.planned_runs()}
        texts["deviations"] = deviations(plan, planned, finished, refused)
    options = {"name": comparison.name, "baseline": baseline, "printed": printed} | texts
    report_runs([run.finished_run for run in reported], comparison.report_folder, **options)
    if not texts["missing"]:
        committed_records.pack(comparison.report_folder)


def report_runs(finished: list[FinishedRun], folder: Path, **options: Any) -> None:
    """Write the report of finished runs, and print its title, warnings and first table.

    Args:
        finished: The finished runs.
        folder: Folder of the report.
        **options: Other arguments of `kerple.compare.comparison_report.write_comparison`.
    """
    runs = read_runs(finished)
    report = write_comparison(runs, folder, **options)
    title, first, *_ = (folder / "table.md").read_text(encoding="utf-8").split("\n### ")
    print(f"{title}\n### {first}\nreport: {report}")

"""`prepare_jobs`: resolves the configurations of a comparison's runs, prepares their data, and reuses records.

A record is a copy of a finished run's results that is committed with a report.
"""

from dataclasses import replace

from rich.console import Console

from kerple.base.errors import UserError
from kerple.compare import committed_records
from kerple.compare.comparison_file import Comparison
from kerple.compare.config_resolution import prepare_and_checksum, resolve, with_inputs, with_precision
from kerple.compare.plan_deviations import digests
from kerple.compare.planned_run import PlannedRun
from kerple.compare.run_process import delete_run
from kerple.config.flat_configuration import differences


def prepare_jobs(
    comparison: Comparison, parallel: int, report_only: bool, rerun_changed: bool
) -> tuple[list[PlannedRun], dict[str, str]]:
    """Resolve the configurations of all runs, prepare their data, and reuse records of equal runs.

    Args:
        comparison: The comparison.
        parallel: Number of runs at a time.
        report_only: Whether nothing is trained. Data is then not prepared, and existing runs with another configuration
            are left out of the report.
        rerun_changed: Whether existing runs with another configuration are removed, so that they are trained again.

    Returns:
        The runs, and the reasons why existing runs and records were refused, by the name of the run.

    Raises:
        UserError: If an option is wrong. With neither ``report_only`` nor ``rerun_changed``, also if runs with another
            configuration exist.
    """
    with Console(stderr=True).status(f"reading the options of {comparison.name}'s runs"):
        plan = digests(comparison)
        resolved = [replace(with_inputs(resolve(job)), plan=plan) for job in comparison.jobs()]
        data_of = {job: (job.config or job.test_config).get("data") for job in resolved}
    folders = comparison.records  # unpacks archives of records
    checksums: dict[str, str | None] = {}
    for job, data in data_of.items():
        if report_only:  # data is not read; the checksum is that of the first run with the same configuration
            runs = map(committed_records.read_run_entry, [job.test_folder, *map(job.record, folders)])
            equal = (run.get("data") for run in runs if run and not differences(run["config"], job.training))
            checksums[str(data)] = checksums.get(str(data)) or next(equal, None)
        elif str(data) not in checksums and not committed_records.finished(job):  # data of finished runs is not needed
            checksums[str(data)] = prepare_and_checksum(data)
    jobs = [replace(job, data=checksums.get(str(data)), parallel=parallel) for job, data in data_of.items()]
    refused = _check(jobs, report_only, rerun_changed)
    jobs_by_outcome: dict[str, list[PlannedRun]] = {}
    for job in jobs:
        if not committed_records.finished(job) and not job.directory.joinpath("checkpoints").exists():
            for folder, report in folders.items():
                record = job.record(folder)
                if not record.is_dir():
                    continue
                # With report_only, a run with trainer.precision `auto` accepts records of any precision. If runs are
                # trained, `auto` means the precision of this machine, and records must have the same precision.
                objection = committed_records.reuse(job if report_only else with_precision(job), record)
                outcome = f"not reused from {report}: {objection}" if objection else f"reused from {report}"
                jobs_by_outcome.setdefault(outcome, []).append(job)
                if objection is None:
                    break
                refused[job.name] = objection
        if committed_records.finished(job):
            committed_records.write_record(job, folders)
    for outcome, (first, *others) in jobs_by_outcome.items():
        number = f" and {len(others)} other run{'s' * (len(others) > 1)}" if others else ""
        print(f"{first.name}{number}: {outcome}")
    return jobs, refused


def _check(jobs: list[PlannedRun], report_only: bool, rerun_changed: bool) -> dict[str, str]:
    """Refuse, remove or report existing runs with another configuration. Return their differences by run."""
    changed = {job: "; ".join(changes) for job in jobs if (changes := committed_records.changes(job))}
    text = "\n".join(f"  {job.name}: {changes}" for job, changes in changed.items())
    if changed and report_only:
        print(f"warning: these runs have another configuration and are not in the report:\n{text}")
    elif changed and not rerun_changed:
        advice = "add --rerun_changed to train them again, or choose another folder with --runs"
        raise UserError(f"compare: runs: existing runs have another configuration; {advice}\n{text}")
    elif changed:
        for job in changed:
            delete_run(job)
    return {job.name: changes for job, changes in changed.items()}

"""Differences between the runs of a comparison and its plan, a comparison file that was committed before the runs."""

import hashlib
import sys
from collections import defaultdict
from collections.abc import Iterable, Mapping
from pathlib import Path
from statistics import median

from kerple.compare import committed_records
from kerple.compare.comparison_file import Comparison
from kerple.compare.planned_run import PlannedRun
from kerple.config.files import config_path
from kerple.config.flat_configuration import differences
from kerple.measure import results_table

DIVERGED = 1.5  # a run has diverged if its loss is more than this multiple of the median, see `diverged`


def digests(comparison: Comparison) -> dict[str, str]:
    """sha256 of the files ``plan`` and ``plan_page`` of a comparison, by path; empty if it has neither."""
    paths = [path for path in (comparison.plan, comparison.plan_page) if path]
    return {path: hashlib.sha256(Path(config_path(path)).read_bytes()).hexdigest() for path in paths}


def deviations(
    plan: Comparison, planned: Mapping[str, PlannedRun], finished: Mapping[str, PlannedRun], refused: Mapping[str, str]
) -> list[str]:
    """Describe the differences between the runs of a comparison and its plan. Each text names the runs concerned.

    Args:
        plan: The plan, which is a comparison too.
        planned: The resolved runs of the plan by name.
        finished: The finished runs of the comparison by name.
        refused: The reasons why existing results or records were refused, by name of the run.
    """
    runs: defaultdict[str, list[str]] = defaultdict(list)  # the names of runs by difference
    for name in (name for name in planned if name not in finished):
        reason = f" (results were refused: {refused[name]})" if name in refused else ""
        runs[f"missing{reason}"].append(name)
    for name, job in finished.items():
        run = committed_records.read_run_entry(job.test_folder) or {}
        then = run.get("plan", {})
        found = [f"another version of {path} at training" for path, now in job.plan.items() if then.get(path) != now]
        if name not in planned:
            found.append("not planned")
        else:
            found += differences(run["config"], planned[name].training)
            found += [f"test: {change}" for change in committed_records.changed_test(run, planned[name])]
        if plan.planned_data not in (None, run["data"]):
            found.append(f"other data, checksum {run['data']}")
        if plan.planned_code and run.get("code") != [plan.planned_code]:
            found.append(f"other code, digest {', '.join(run.get('code', ['unknown']))}")
        if job.seed in plan.seeds_seen_before_plan:
            found.append("results known before the plan")
        for difference in found:
            runs[difference].append(name)
    for name in diverged(finished.values()):
        runs[f"diverged, loss not finite or above {DIVERGED} times the median"].append(name)
    return [f"{difference}: {', '.join(names)}" for difference, names in runs.items()]


def diverged(jobs: Iterable[PlannedRun]) -> list[str]:
    """Names of the runs whose loss at the shortest length is not finite, or above `DIVERGED` times the median.

    The median is over the runs with the same strategy and part. The loss is that of the first protocol of the test.
    """
    losses: defaultdict[tuple[str, str], dict[str, float]] = defaultdict(dict)
    for job in jobs:
        totals = results_table.totals(results_table.read(job.test_folder)[0])
        first = totals[totals["metric"] == "ppl"].sort_values("length", kind="stable").head(1)
        for total, count in zip(first["sum"], first["count"], strict=True):
            losses[job.part, job.label][job.name] = total / count
    # a finite limit, which an infinite loss exceeds even if the median is infinite
    limits = {key: min(DIVERGED * median(of.values()), sys.float_info.max) for key, of in losses.items()}
    return [name for key, of in losses.items() for name, loss in of.items() if not loss <= limits[key]]

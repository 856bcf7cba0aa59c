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
    names_by_difference: defaultdict[str, list[str]] = defaultdict(list)
    for name in (name for name in planned if name not in finished):
        reason = f" (results were refused: {refused[name]})" if name in refused else ""
        names_by_difference[f"missing{reason}"].append(name)
    for name, run in finished.items():
        entry = committed_records.read_run_entry(run.test_folder)
        assert entry is not None, f"{name} is not finished"
        then = entry.get("plan", {}).values()  # the path of the same file may have been spelled differently
        found = [f"another version of {path} at training" for path, now in run.plan.items() if now not in then]
        if name not in planned:
            found.append("not planned")
        else:
            found += differences(entry["config"], planned[name].training)
            if plan.planned_data is None:  # with a planned checksum, the corpus may have another name
                found += committed_records.changed_corpus(entry["config"], planned[name].training)
            found += [f"test: {change}" for change in committed_records.changed_test(entry, planned[name])]
        if plan.planned_data not in (None, entry["data"]):
            found.append(f"other data, checksum {entry['data']}")
        if plan.planned_code and entry.get("code") != [plan.planned_code]:
            found.append(f"other code, digest {', '.join(entry.get('code', ['unknown']))}")
        if run.seed in plan.seeds_seen_before_plan:
            found.append("results known before the plan")
        for difference in found:
            names_by_difference[difference].append(name)
    for name in diverged(finished.values()):
        names_by_difference[f"diverged, loss not finite or above {DIVERGED} times the median"].append(name)
    return [f"{difference}: {', '.join(names)}" for difference, names in names_by_difference.items()]


def diverged(runs: Iterable[PlannedRun]) -> list[str]:
    """Names of the runs whose loss at the shortest length is not finite, or above `DIVERGED` times the median.

    The median is over the runs with the same strategy and part. The loss is that of the first protocol of the test.
    """
    losses: defaultdict[tuple[str, str], dict[str, float]] = defaultdict(dict)
    for run in runs:
        totals = results_table.totals(results_table.read(run.test_folder)[0])
        first = totals[totals["metric"] == "ppl"].sort_values("length", kind="stable").head(1)
        for total, count in zip(first["sum"], first["count"], strict=True):
            losses[run.part, run.label][run.name] = total / count
    # a finite limit, which an infinite loss exceeds even if the median is infinite
    limits = {key: min(DIVERGED * median(of.values()), sys.float_info.max) for key, of in losses.items()}
    return [name for key, of in losses.items() for name, loss in of.items() if not loss <= limits[key]]

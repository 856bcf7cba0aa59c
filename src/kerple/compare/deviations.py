"""Differences between the finished runs of a comparison and its plan."""

import hashlib
import sys
from collections.abc import Iterable, Mapping
from pathlib import Path
from statistics import median

from kerple.base.shipped_configs import config_path
from kerple.compare import records
from kerple.compare.comparison import Comparison
from kerple.compare.configuration import differences
from kerple.compare.job import Job
from kerple.measure import results

DIVERGED = 1.5  # ratio to the median loss of the strategy


def digests(plan: Comparison) -> dict[str, str]:
    """sha256 of the configuration and the page of a plan, by path."""
    paths = [path for path in (plan.plan, plan.plan_page) if path]
    return {path: hashlib.sha256(Path(config_path(path)).read_bytes()).hexdigest() for path in paths}


def deviations(
    plan: Comparison, planned: Mapping[str, Job], ready: Mapping[str, Job], refused: Mapping[str, str]
) -> list[str]:
    """Describe the differences between the finished runs and the plan, each with the names of its runs.

    Args:
        plan: The plan.
        planned: Its runs, resolved, by name.
        ready: The finished runs by name.
        refused: Reason why existing results of an unfinished run are left out, by its name.
    """
    found: dict[str, list[str]] = {}
    for name in (name for name in planned if name not in ready):
        reason = f", there is one that {refused[name]}" if name in refused else ""
        found.setdefault(f"missing{reason}", []).append(name)
    for name, job in ready.items():
        run = records.described(job.test_folder) or {}
        what = [f"{path} was another" for path, now in job.plan.items() if run.get("plan", {}).get(path) != now]
        if name not in planned:
            what.append("not planned")
        else:
            what += differences(run["config"], planned[name].training)
            what += [f"test: {change}" for change in records.changed_test(run, planned[name])]
        if plan.planned_data not in (None, run["data"]):
            what.append(f"other data, checksum {run['data']}")
        if plan.planned_code and run.get("code") != [plan.planned_code]:
            what.append(f"other code, digest {', '.join(run.get('code', ['unknown']))}")
        if job.seed in plan.looked_at:
            what.append("a seed that was looked at before")
        for difference in what:
            found.setdefault(difference, []).append(name)
    for name in diverged(ready.values()):
        found.setdefault(f"diverged, loss not finite or above {DIVERGED} times the median", []).append(name)
    return [f"{what}: {', '.join(names)}" for what, names in found.items()]


def diverged(jobs: Iterable[Job]) -> list[str]:
    """Runs whose loss at the shortest length is not finite, or above `DIVERGED` times their strategy's median."""
    losses: dict[tuple[str, str], dict[str, float]] = {}
    for job in jobs:
        totals = results.totals(results.read(job.test_folder)[0])
        first = totals[totals["metric"] == "ppl"].sort_values("length", kind="stable").head(1)
        for total, count in zip(first["sum"], first["count"], strict=True):
            losses.setdefault((job.part, job.label), {})[job.name] = total / count
    highest = {key: min(DIVERGED * median(of.values()), sys.float_info.max) for key, of in losses.items()}
    return [name for key, of in losses.items() for name, loss in of.items() if not loss <= highest[key]]

"""Whether a run is finished, and the copies of finished runs that are kept beside the report, small enough to commit.

A test that `compare` runs leaves in its folder all that a report reads of the run, and under ``run`` in results.json
what has to be the same for the run to be taken for another: configuration, checksum of the data, and test. A record is
a copy of these files.
"""

import json
import platform
import re
import shutil
from collections.abc import Iterable
from dataclasses import replace
from io import BytesIO
from pathlib import Path
from typing import Any
from zipfile import ZIP_DEFLATED, ZipFile, ZipInfo

import numpy as np
import pandas as pd

from kerple.base.atomic import write
from kerple.base.errors import UserError
from kerple.base.mapping import read_mapping
from kerple.base.sources import package_digest
from kerple.compare.comparison import Job
from kerple.compare.defaults import is_default
from kerple.compare.runs import LOCATIONS, PACKED, flat, read_runs, recorded_runs
from kerple.measure import results

PRECISION = "trainer.precision"
BEGUN = ".begun.json"  # beside a run's folder: digests of its inputs when it began, and of the code that fitted it
OF_TEST = "test "  # before the names of inputs that only the test has
MOST_ROWS = 10_000  # of an analysis that is kept
# what reading a record can raise; a stranger's may hold anything
UNREADABLE = (ValueError, LookupError, TypeError, AttributeError, ArithmeticError, RecursionError, OSError)


def described(folder: Path) -> dict[str, Any] | None:
    """How a run was trained and tested, according to the folder of its test; None if `compare` has not finished it."""
    try:
        run = read_mapping(folder / results.ABOUT).get("run")
    except UserError:
        return None
    return run if isinstance(run, dict) and isinstance(run.get("config"), dict) else None


def finished(job: Job) -> bool:
    """Whether the run was fitted and tested as the comparison describes it."""
    run = described(job.test_folder)
    if run is None or changed_test(run, job) or job.data not in (None, run["data"]):
        return False
    return not changed_inputs(run, job) and not differences(run["config"], job.training)


def changed_test(run: dict[str, Any], job: Job) -> list[str]:
    """Differences between the test of a run and that of the job. They are no reason to train it again."""
    now = {name: value for name, value in flat(job.tested).items() if value != {}}
    asked = dict.fromkeys([*run["test"], *flat(job.test)])
    return differences(run["test"], {name: now.get(name) for name in asked})


def changed_inputs(run: dict[str, Any], job: Job) -> list[str]:
    """Inputs of the job that had another content when the run was made. One without a digest counts as the same."""
    before = run.get("inputs", {})
    return [f"{name} has changed" for name, digest in job.inputs.items() if before.get(name, digest) != digest]


def changes(job: Job) -> list[str]:
    """Differences between how the run in the job's folder was begun and how the comparison describes it, if any."""
    if run := described(job.test_folder):
        other = ["its data has another checksum"] if job.data not in (None, run["data"]) else []
        other += [change for change in changed_inputs(run, job) if not change.startswith(OF_TEST)]
        return differences(run["config"], job.training) + other
    written = job.directory / "config.yaml"
    if written.is_file():
        return differences(flat(read_mapping(written)), job.training) + changed_inputs(_begun(job), job)
    if any(path.name != ".lock" for path in job.directory.glob("*")) and not job.checkpoint.is_file():
        return ["the folder has no config.yaml"]
    return []


def begin(job: Job, resumed: bool) -> None:
    """Note the inputs and the code of a fit, before it begins or resumes."""
    begun = _begun(job) if resumed else {"inputs": job.inputs}
    code = sorted({*begun.get("code", []), package_digest()})
    write(job.beside(BEGUN), json.dumps(begun | {"code": code}))


def _begun(job: Job) -> dict[str, Any]:
    return read_mapping(job.beside(BEGUN)) if job.beside(BEGUN).is_file() else {}


def differences(written: dict[str, Any], resolved: dict[str, Any]) -> list[str]:
    """Describe each option that differs between two configurations, with both values.

    Args:
        written: Configuration with which a run was made, with dotted keys. It may have options that are not resolved.
        resolved: Configuration that the comparison resolves now. An option that is ``auto`` in it may have any value.
    """
    before, now = _named(written), _named(resolved)
    keys = [*now, *(key for key in before if key.startswith("trainer.callbacks.") and key not in now)]
    return [
        f"{key}: {before.get(key)!r} -> {now.get(key)!r}"
        for key in keys
        if before.get(key) != now.get(key)
        and now.get(key) != "auto"
        and not LOCATIONS.fullmatch(key)
        and not (key not in before and is_default(resolved, key))  # an option that is newer than the run
    ]


def _named(config: dict[str, Any]) -> dict[str, Any]:
    """A configuration with the names of this package's classes in place of their paths, and text for infinity."""
    text = re.sub(r'"kerple\.(?:\w+\.)*(\w+)"', r'"\1"', json.dumps(config))
    return json.loads(text, parse_constant=str)


def checksum_of(data: Any) -> str | None:
    """A checksum of all data that a data module reads; None for a task, which reads nothing.

    Args:
        data: A data module that is set up.
    """
    return data.checksum() if hasattr(data, "checksum") else None


def complete(job: Job) -> None:
    """Add to the results of a test how its run was trained and tested; with this the run counts as finished.

    Raises:
        UserError: If the test left no results.
    """
    read_runs([job.as_run])
    _, about = results.read(job.test_folder)
    config, written, cost = job.training, job.directory / "config.yaml", job.directory / "cost.json"
    if written.is_file():  # the precision was chosen where the run began
        config = config | {PRECISION: flat(read_mapping(written))[PRECISION]}
    about["run"] = {
        "config": {key: value for key, value in _named(config).items() if value is not None},
        "cost": read_mapping(cost) | {"parallel": job.parallel} if cost.exists() else {},
        "data": job.data,
        "inputs": job.inputs,
        "test": flat(job.test),
        "plan": job.plan,
        "code": sorted({*_begun(job).get("code", []), package_digest()}),
    }
    results.write_about(job.test_folder, about)


def reuse(job: Job, record: Path) -> str | None:
    """Make a finished run from a record, if the record is of the same run.

    Args:
        job: The run, whose configuration has the precision that ``auto`` means here.
        record: Folder of the record.

    Returns:
        None if the run was made, else why the record does not fit.
    """
    try:
        run = results.read(record)[1]["run"]
        if changes_of_config := differences(run["config"], job.training):
            return f"has another configuration: {'; '.join(changes_of_config)}"
        if job.data not in (None, run["data"]):
            # the corpora that need no download are files of the installed Python
            python = run["cost"].get("environment", {}).get("python", "unknown")
            return f"was trained on other data; it was made with Python {python}, here is {platform.python_version()}"
        if changes_of_test := changed_test(run, job):
            return f"was tested otherwise: {'; '.join(changes_of_test)}"
        if changed := changed_inputs(run, job):
            return "; ".join(changed)
        read_runs([replace(job.as_run, folder=record)])  # all of it, so that a damaged one cannot spoil the report
        _copy(record, job.test_folder)
    except UNREADABLE as error:
        return f"cannot be read ({type(error).__name__}: {error})"
    return None


def write_record(job: Job, folders: Iterable[Path]) -> None:
    """Write the record of a finished run beside its report, unless it is there or beside another report.

    Args:
        job: The run.
        folders: Folders of records, the first of which is written to.
    """
    about = (job.test_folder / results.ABOUT).read_bytes()
    places = [job.record(folder) for folder in folders]
    if not any(path.is_file() and path.read_bytes() == about for path in (place / results.ABOUT for place in places)):
        shutil.rmtree(places[0], ignore_errors=True)  # of an earlier test, which may have had other analyses
        _copy(job.test_folder, places[0])


def pack(report: Path) -> None:
    """Move the records of a report's single runs into its archive; the same records give the same bytes."""
    if not (report / "runs").is_dir():
        return
    content = BytesIO()
    with ZipFile(content, "w") as archive:
        for run in recorded_runs(report):
            for path in sorted(run.folder.glob("[!.]*")):
                name = Path(run.part, run.strategy, f"seed-{run.seed}", path.name).as_posix()
                archive.writestr(ZipInfo(name), path.read_bytes(), ZIP_DEFLATED)
    write(report / PACKED, content.getvalue())
    shutil.rmtree(report / "runs")


def _copy(source: Path, target: Path) -> None:
    """Copy the files of a run that a report reads. The description is last, because a folder with it is complete."""
    for path in sorted([*source.glob("*.csv"), *source.glob("*.csv.gz")]):
        if path.name == results.TABLE:
            write(target / path.name, path.read_bytes())
        else:
            table = condensed(pd.read_csv(path))
            if len(table) <= MOST_ROWS:
                results.write_compressed(target / f"{path.name.split('.')[0]}.csv.gz", table)
    write(target / results.ABOUT, (source / results.ABOUT).read_bytes())


def condensed(table: pd.DataFrame) -> pd.DataFrame:
    """The table of an analysis; of more than 256 distances, only those nearest to 2^(n/4), 0 and the largest stay."""
    if "distance" not in table or table["distance"].nunique() <= 256:
        return table
    shown = {0, *np.unique(np.round(2 ** np.arange(0, 32, 0.25)).astype(np.int64)), table["distance"].max()}
    return table[table["distance"].isin(shown)]

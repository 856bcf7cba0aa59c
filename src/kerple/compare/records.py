"""Records of finished runs, which are committed with a report, and the check whether a run is finished.

The folder of a test that `compare` ran has all files of the run that a report reads. The entry ``run`` in its
results.json has the configuration, the checksum of the data and the options of the test. A run is reused for another
if these are equal. A record is a copy of these files.
"""

import json
import platform
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
from kerple.compare.configuration import differences, flat, with_class_names
from kerple.compare.job import Job
from kerple.compare.run_folders import PACKED, recorded_runs
from kerple.compare.runs import read_runs
from kerple.measure import results

PRECISION = "trainer.precision"
BEGUN = ".begun.json"  # suffix of a file next to a run's folder: digests of inputs and code of the fit
OF_TEST = "test "  # prefix of the names of inputs that only the test has
MOST_ROWS = 10_000  # of the table of an analysis in a record
# errors on reading a record, which may come from an untrusted person
UNREADABLE = (ValueError, LookupError, TypeError, AttributeError, ArithmeticError, RecursionError, OSError)


def described(folder: Path) -> dict[str, Any] | None:
    """The entry ``run`` of a test's results, which describes training and test; None if `compare` wrote none."""
    try:
        run = read_mapping(folder / results.ABOUT).get("run")
    except UserError:
        return None
    return run if isinstance(run, dict) and isinstance(run.get("config"), dict) else None


def finished(job: Job) -> bool:
    """Whether the folder of a run has results with the configuration, data, inputs and test of the job."""
    run = described(job.test_folder)
    if run is None or changed_test(run, job) or job.data not in (None, run["data"]):
        return False
    return not changed_inputs(run, job) and not differences(run["config"], job.training)


def changed_test(run: dict[str, Any], job: Job) -> list[str]:
    """Differences between the test of a run and that of the job. They do not require another fit."""
    now = {name: value for name, value in flat(job.test_config).items() if value != {}}
    asked = dict.fromkeys([*run["test"], *flat(job.test)])
    return differences(run["test"], {name: now.get(name) for name in asked})


def changed_inputs(run: dict[str, Any], job: Job) -> list[str]:
    """Inputs of the job that had another content in the run. An input without a digest counts as unchanged."""
    before = run.get("inputs", {})
    return [f"{name} has changed" for name, digest in job.inputs.items() if before.get(name, digest) != digest]


def changes(job: Job) -> list[str]:
    """Differences between the fit in the job's folder, finished or not, and the fit of the job."""
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
    """Write the digests of inputs and code of a fit before it starts or resumes."""
    begun = _begun(job) if resumed else {"inputs": job.inputs}
    code = sorted({*begun.get("code", []), package_digest()})
    write(job.beside(BEGUN), json.dumps(begun | {"code": code}))


def _begun(job: Job) -> dict[str, Any]:
    return read_mapping(job.beside(BEGUN)) if job.beside(BEGUN).is_file() else {}


def complete(job: Job) -> None:
    """Add the entry ``run`` to the results of a test, after which the run counts as finished.

    Raises:
        UserError: If the test has no results.
    """
    read_runs([job.as_run])
    _, about = results.read(job.test_folder)
    config, written, cost = job.training, job.directory / "config.yaml", job.directory / "cost.json"
    if written.is_file():  # has the precision of the machine on which the run started
        config = config | {PRECISION: flat(read_mapping(written))[PRECISION]}
    about["run"] = {
        "config": {key: value for key, value in with_class_names(config).items() if value is not None},
        "cost": read_mapping(cost) | {"parallel": job.parallel} if cost.exists() else {},
        "data": job.data,
        "inputs": job.inputs,
        "test": flat(job.test),
        "plan": job.plan,
        "code": sorted({*_begun(job).get("code", []), package_digest()}),
    }
    results.write_about(job.test_folder, about)


def reuse(job: Job, record: Path) -> str | None:
    """Copy a record into the folder of a run, if it is a record of the same run.

    Args:
        job: The run. Its precision is that of this machine instead of ``auto``.
        record: Folder of the record.

    Returns:
        None if the record was copied, otherwise the reason why it was not.
    """
    try:
        run = results.read(record)[1]["run"]
        if changes_of_config := differences(run["config"], job.training):
            return f"has another configuration: {'; '.join(changes_of_config)}"
        if job.data not in (None, run["data"]):
            # corpora without a download consist of files of the installed Python
            python = run["cost"].get("environment", {}).get("python", "unknown")
            return f"was trained on other data (with Python {python}; this is Python {platform.python_version()})"
        if changes_of_test := changed_test(run, job):
            return f"has another test: {'; '.join(changes_of_test)}"
        if changed := changed_inputs(run, job):
            return "; ".join(changed)
        read_runs([replace(job.as_run, folder=record)])  # reads all files, so that a damaged record is not copied
        _copy(record, job.test_folder)
    except UNREADABLE as error:
        return f"cannot be read ({type(error).__name__}: {error})"
    return None


def write_record(job: Job, folders: Iterable[Path]) -> None:
    """Write the record of a finished run, unless one of the folders has it.

    Args:
        job: The run.
        folders: Folders of records. A new record is written to the first.
    """
    about = (job.test_folder / results.ABOUT).read_bytes()
    places = [job.record(folder) for folder in folders]
    if not any(path.is_file() and path.read_bytes() == about for path in (place / results.ABOUT for place in places)):
        shutil.rmtree(places[0], ignore_errors=True)  # an earlier test may have other analyses
        _copy(job.test_folder, places[0])


def pack(report: Path) -> None:
    """Move the records of single runs of a report into its archive. The same records give the same bytes."""
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
    """Copy the files of a run that a report reads. The last file is results.json, which marks a complete folder."""
    for path in sorted([*source.glob("*.csv"), *source.glob("*.csv.gz")]):
        if path.name == results.TABLE:
            write(target / path.name, path.read_bytes())
        else:
            table = condensed(pd.read_csv(path))
            if len(table) <= MOST_ROWS:
                results.write_compressed(target / f"{path.name.split('.')[0]}.csv.gz", table)
    write(target / results.ABOUT, (source / results.ABOUT).read_bytes())


def condensed(table: pd.DataFrame) -> pd.DataFrame:
    """The table of an analysis. More than 256 distances are reduced to 0, those nearest to 2^(n/4), and the largest."""
    if "distance" not in table or table["distance"].nunique() <= 256:
        return table
    shown = {0, *np.unique(np.round(2 ** np.arange(0, 32, 0.25)).astype(np.int64)), table["distance"].max()}
    return table[table["distance"].isin(shown)]

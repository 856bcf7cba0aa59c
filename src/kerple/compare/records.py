"""Records of finished runs, which are kept beside the report and small enough to commit, so that runs can be reused.

``<report>/runs/[<part>/]<label>/seed-<seed>.json`` holds all that a report reads of a run (resolved configuration, cost
with commit and machine, sums and analyses of its test), and what has to be equal for a run to be taken from it:
configuration, data, test and version of the results.
"""

import hashlib
import json
import platform
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from kerple.base.atomic import write
from kerple.base.changes import differences
from kerple.base.precision import choose
from kerple.compare import job as jobs
from kerple.compare.collect import Run, read
from kerple.compare.comparison import Job
from kerple.compare.files import results_of, unpack
from kerple.data.datamodule import TokenShards
from kerple.evaluation.results import VERSION

# options of how data is read, which change nothing in it
_WORKERS = "data.init_args.workers"
# options of where data is and how it is prepared, in place of which the checksums of the data are compared
DATA_PLACES = {
    "data.init_args.corpus",
    "data.init_args.directory",
    "data.init_args.prepare_workers",
    "data.init_args.prepare_engine",
    "data.init_args.cache",
}


# what reading a record can raise; a stranger's may hold anything
UNREADABLE = (ValueError, LookupError, TypeError, AttributeError, ArithmeticError, RecursionError, OSError)


def path_of(job: Job, report_folder: Path) -> Path:
    """Path of the record of a run."""
    return report_folder / "runs" / job.part / job.label / f"seed-{job.seed}.json"


def fingerprint(data: Any) -> str | None:
    """A checksum of all data that a data module reads; None for a task, which reads nothing.

    Args:
        data: A data module that is set up.
    """
    return data.checksum() if isinstance(data, TokenShards) else None


def keep(job: Job, config: dict[str, Any], data: str | None, path: Path) -> None:
    """Write the record of a finished run.

    Args:
        job: The run.
        config: Its resolved configuration, flat.
        data: Checksum of its present data, see `fingerprint`; that with which the run began, if known, takes its place.
        path: Path of the record.
    """
    run = results_of(job.directory, job.test_folder.name)
    if config.get("trainer.precision") == "auto":  # it was chosen where the run began, which may be another machine
        config = config | {"trainer.precision": run["config.yaml"]["trainer"]["precision"]}
    identity, data = _settled(config, data), jobs.state(job).get("data", data)
    run["config.yaml"] = _strict(run["config.yaml"])
    record = {
        "version": _version(run["test"]),
        "data": data,
        "hash": hashlib.sha256(json.dumps(identity, sort_keys=True).encode()).hexdigest(),
        "config": identity,
        "test": jobs.asked_of_test(job),
        "run": run,
    }
    write(path, json.dumps(record, allow_nan=False, separators=(",", ":"), ensure_ascii=False) + "\n")


def take(job: Job, config: dict[str, Any], data: str | None, path: Path) -> str | None:
    """Make a finished run from a record, if it fits.

    Args:
        job: A run that does not exist.
        config: Its present configuration, resolved and flat.
        data: Checksum of its present data.
        path: Path of the record.

    Returns:
        None if the run was made, else why the record does not fit.
    """
    # made beside its folder, so that neither a record that cannot be read nor a kill leaves half a run
    job.directory.parent.mkdir(parents=True, exist_ok=True)
    with TemporaryDirectory(dir=job.directory.parent) as folder:
        made = Path(folder) / "run"
        try:
            record = json.loads(path.read_text())
            if objection := _objection(record, job, config, data):
                return objection
            unpack(record["run"], made, job.test_folder.name)
            read([Run(job.label, job.seed, made, job.test_folder.name, job.part)])
            describe(path)
        except UNREADABLE as error:
            return f"cannot be read ({type(error).__name__}: {error})"
        jobs.declare_finished(job, config, data, made)
    return None


def _objection(record: dict[str, Any], job: Job, config: dict[str, Any], data: str | None) -> str | None:
    """Why a record is not the run that is asked for, or None if it is."""
    written, version = record["config"], record["version"]
    text = record["run"]["test"].get("extrapolation.json", {})
    if text.get("documents") and "block_document" not in text:
        return "was tested by an earlier version, which did not say which blocks are of one document"
    if version != VERSION:
        return f"has results of version {version}, those of now have {VERSION}: their numbers do not belong together"
    if record["hash"] != hashlib.sha256(json.dumps(written, sort_keys=True).encode()).hexdigest():
        return "has a configuration that is not the one of its hash"
    if changed := differences(_settled(written, data), _settled(config, data)):
        return f"has another configuration: {'; '.join(changed)}"
    if record["data"] != data:
        # the corpora that need no download are files of the installed Python
        python = record["run"].get("cost.json", {}).get("environment", {}).get("python", "unknown")
        here = platform.python_version()
        return f"was trained on other data: its checksums (Python {python}) differ from those here (Python {here})"
    return None if record["test"] == jobs.asked_of_test(job) else "was tested otherwise"


def is_of(path: Path, job: Job, config: dict[str, Any]) -> bool:
    """Whether there is a record, and it has this configuration, in whatever precision, and this test."""
    try:
        record = json.loads(path.read_text())
        written, asked = (_settled(one, record["data"]) for one in (record["config"], config))
        if config.get("trainer.precision") == "auto":  # the run may be another machine's
            asked["trainer.precision"] = written.get("trainer.precision")
        return not differences(written, asked) and record["test"] == jobs.asked_of_test(job)
    except UNREADABLE:
        return False


def _version(test: dict[str, Any]) -> int:
    """Version of a test's results. Only those of perplexities have versions; the first had no number."""
    perplexities = test.get("extrapolation.json")
    return VERSION if perplexities is None else perplexities.get("version", 1)


def _settled(config: dict[str, Any], data: str | None) -> dict[str, Any]:
    """The configuration without options of places, and with the precision that ``auto`` means on this machine."""
    places = {_WORKERS} if data is None else {_WORKERS} | DATA_PLACES
    settled = {key: value for key, value in config.items() if key not in places}
    if settled.get("trainer.precision") == "auto":
        settled["trainer.precision"], _ = choose(config.get("trainer.accelerator", "auto"))
    return _strict(settled)


def _strict(config: dict[str, Any]) -> dict[str, Any]:
    """A configuration with text for infinity, which strict JSON does not have."""
    return json.loads(json.dumps(config), parse_constant=str)


def describe(path: Path) -> str:
    """The commit and the processor with which a record was made."""
    environment = json.loads(path.read_text())["run"].get("cost.json", {}).get("environment", {})
    return ", ".join(str(environment[key]) for key in ("commit", "processor") if environment.get(key))

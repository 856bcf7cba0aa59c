"""Records of finished runs, which are kept beside the report and small enough to commit, so that runs can be reused.

``<report>/runs/[<part>/]<label>/seed-<seed>.json`` holds all that a report reads of a run (resolved configuration, cost
with commit and machine, sums and analyses of its test), and what has to be equal for a run to be taken from it:
configuration, data, test and version of the results.
"""

import hashlib
import json
import platform
from pathlib import Path
from typing import Any

from kerple.compare import job as jobs
from kerple.compare.comparison import Job
from kerple.evaluation.results import VERSION
from kerple.report.files import results_of, unpack
from kerple.runs.atomic import write
from kerple.runs.changes import differences
from kerple.runs.precision import choose

# options of where data is and how it is prepared, in place of which the checksums of the data are compared
DATA_PLACES = ("corpus", "directory", "workers", "prepare_workers", "prepare_engine", "verify", "on_fault")


def path_of(job: Job, report_folder: Path) -> Path:
    """Path of the record of a run."""
    return report_folder / "runs" / job.part / job.label / f"seed-{job.seed}.json"


def fingerprint(data: Any) -> str | None:
    """A checksum of all data that a data module reads; None for a task, which reads nothing.

    Args:
        data: A data module that is set up.
    """
    manifest = getattr(data, "manifest", None)
    if manifest is None:
        return None
    folders = [manifest, *(folder.manifest for folder, _ in data._training_folders())]
    content = [
        [m.tokenizer, {name: [*split.checksums, split.offsets] for name, split in sorted(m.splits.items())}]
        for m in folders
    ]
    return hashlib.sha256(json.dumps(content).encode()).hexdigest()


def keep(job: Job, config: dict[str, Any], data: str | None, path: Path) -> None:
    """Write the record of a finished run.

    Args:
        job: The run.
        config: Its resolved configuration, flat.
        data: Checksum of its data, see `fingerprint`.
        path: Path of the record.
    """
    identity, run = _settled(config), results_of(job.directory, job.test_folder.name)
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
    try:
        record = json.loads(path.read_text())
        written, asked = record["config"], _settled(config)
        kept, version, test = record["run"], record["version"], record["test"]
        text = kept["test"].get("extrapolation.json", {})
        python = kept.get("cost.json", {}).get("environment", {}).get("python")
        untold = text.get("documents") and "block_document" not in text
        identity = hashlib.sha256(json.dumps(written, sort_keys=True).encode()).hexdigest()
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError, OSError) as error:
        return f"cannot be read ({type(error).__name__}: {error})"
    if untold:
        return "was tested by an earlier version, which did not say which blocks are of one document"
    if version != VERSION:
        return f"has results of version {version}, those of now have {VERSION}: their numbers do not belong together"
    if record.get("hash") != identity:
        return "has a configuration that is not the one of its hash"
    if changed := differences(written, asked):
        return f"has another configuration: {'; '.join(changed)}"
    if record.get("data") != data:
        # the corpora that need no download are files of the installed Python
        here = platform.python_version()
        return f"was trained on other data: its checksums (Python {python}) differ from those here (Python {here})"
    if test != jobs.asked_of_test(job):
        return "was tested otherwise"
    unpack(kept, job.directory, job.test_folder.name)
    jobs.declare_finished(job, config)
    return None


def _version(test: dict[str, Any]) -> int:
    """Version of a test's results. Only those of perplexities have versions; the first had no number."""
    perplexities = test.get("extrapolation.json")
    return VERSION if perplexities is None else perplexities.get("version", 1)


def _settled(config: dict[str, Any]) -> dict[str, Any]:
    """The configuration without options of places, and with the precision that ``auto`` means on this machine."""
    settled = {key: value for key, value in config.items() if not key.startswith(_places())}
    if settled.get("trainer.precision") == "auto":
        settled["trainer.precision"], _ = choose(config.get("trainer.accelerator", "auto"))
    return settled


def _places() -> tuple[str, ...]:
    return tuple(f"data.init_args.{name}" for name in DATA_PLACES)


def describe(path: Path) -> str:
    """The commit and the processor with which a record was made."""
    environment = json.loads(path.read_text())["run"].get("cost.json", {}).get("environment", {})
    return ", ".join(filter(None, (environment.get("commit", ""), environment.get("processor", ""))))

"""Records of finished runs, which are committed with a report, and the check whether a run is finished.

The folder of a test that `compare` ran contains all files of the run that a report reads. A record is a copy of these
files. The entry ``run`` of results.json contains the configuration of the fit, the checksum of the data, digests of
inputs, and the options of the test. Another comparison reuses the record if its own run agrees in all of these.
"""

import gzip
import hashlib
import platform
import shutil
from collections.abc import Iterable
from contextlib import AbstractContextManager, closing, suppress
from dataclasses import replace
from functools import cache
from io import BytesIO
from pathlib import Path
from typing import Any, TextIO, cast
from zipfile import ZipFile, ZipInfo, is_zipfile

import numpy as np
import pandas as pd
import yaml
import zstandard

from kerple.base.atomic import write
from kerple.base.errors import UserError
from kerple.base.run_folder import FIRST_FILES, LOCK, RUN_FILE, lock, weights_file
from kerple.compare.finished_runs import FinishedRun, analysis_name, read_runs
from kerple.compare.planned_run import PlannedRun
from kerple.compare.run_discovery import PACKED, recorded_runs
from kerple.compare.training_curves import TABLE, training_curves
from kerple.config.files import read_mapping
from kerple.config.flat_configuration import differences, flat, with_class_names
from kerple.config.user_code_digests import package_digest, source_digests
from kerple.measure import results_table

PRECISION = "trainer.precision"
CORPUS = ("data.corpus", "data.init_args.corpus")
OF_TEST = "test "  # prefix of the names of inputs that only the test reads
PARENT = "parent"  # name of the input that consists of the weights of a run's parent
MOST_ROWS = 10_000  # a record leaves out the table of an analysis if the table, after `condensed`, has more rows
# errors on reading a record, which may come from an untrusted person (WRONG) or be damaged
WRONG = (ValueError, LookupError, TypeError, AttributeError, ArithmeticError, RecursionError)
UNREADABLE = (OSError, *WRONG, *results_table.DAMAGED)


def read_run_entry(folder: Path) -> dict[str, Any] | None:
    """The entry ``run`` in the results of a test, which describes fit and test; None if `compare` did not run the test.

    Args:
        folder: Folder of the test.
    """
    try:
        entry = read_mapping(folder / results_table.ABOUT).get("run")
    except UserError:
        return None
    if not isinstance(entry, dict) or "data" not in entry:
        return None
    return entry if all(isinstance(entry.get(key), dict) for key in ("config", "test")) else None


def has_test_of_user(folder: Path) -> bool:
    """Whether a folder has the results of a test that `compare` did not run."""
    return (folder / results_table.ABOUT).exists() and read_run_entry(folder) is None


def finished(run: PlannedRun) -> bool:
    """Whether the folder of a run has the results of the fit and test that it describes, and they can be read."""
    entry = read_run_entry(run.test_folder)
    is_same = entry is not None and not changed_fit(entry, run) and not changed_test(entry, run)
    return is_same and _is_readable(run.finished_run)


def _is_readable(run: FinishedRun) -> bool:
    """Whether a report can read the results of a run. If not, a warning is printed, once for a state of the files."""
    states = ((path.name, path.stat().st_mtime_ns) for path in run.folder.glob("*"))
    return _can_be_read(run, tuple(sorted(states)))


@cache
def _can_be_read(run: FinishedRun, states: tuple[tuple[str, int], ...]) -> bool:
    """Whether a report can read the results of a run, whose files have these times of modification."""
    try:
        read_runs([run])
    except UNREADABLE as error:
        print(f"warning: {error if isinstance(error, UserError) else f'{run.folder}: cannot be read ({error!r})'}")
        return False
    return True


def changed_fit(entry: dict[str, Any], run: PlannedRun) -> list[str]:
    """Describe the differences between a finished fit and that of a run: options, data and inputs.

    Args:
        entry: The entry ``run`` of the finished test's results.
        run: The run.
    """
    return differences(entry["config"], run.training) + _changed_data(entry, run) + _changed_inputs(entry, run)


def changed_test(entry: dict[str, Any], run: PlannedRun) -> list[str]:
    """Describe the differences between a finished test and that of a run: options, and inputs of the test.

    Args:
        entry: The entry ``run`` of the finished test's results.
        run: The run.
    """
    now = {name: value for name, value in flat(run.test_config).items() if value != {}}
    names = dict.fromkeys([*entry["test"], *flat(run.test)])
    now = {name: now.get(name) for name in names}
    changed = differences(entry["test"], now)
    if run.config:  # unless the data of the test is that of the run
        changed += changed_corpus(entry["config"] | entry["test"], now)
    return changed + _changed_inputs(entry, run, of_test=True)


def _changed_data(entry: dict[str, Any], run: PlannedRun) -> list[str]:
    """Describe the difference between the data of an earlier fit and that of a run.

    Equal checksums are equal data. If the checksum of the run is not known, because its data is not prepared on this
    machine, only the names of the corpora are compared.

    Args:
        entry: A mapping with ``config`` and ``data`` of the earlier fit.
        run: The run.
    """
    if run.data == entry["data"] is not None:
        return []
    changed = changed_corpus(entry["config"], run.training)
    if changed or run.data is None:
        return changed
    # the corpus stdlib consists of files of the installed Python
    python = entry.get("cost", {}).get("environment", {}).get("python")
    versions = f" (with Python {python}, now {platform.python_version()})" if python else ""
    return [f"its data has another checksum{versions}"]


def changed_corpus(before: dict[str, Any], now: dict[str, Any]) -> list[str]:
    """Describe the difference between the corpora in two configurations with dotted keys.

    A corpus that one of them lacks is not compared, because earlier records have no options that are null.
    """
    keys = [key for key in CORPUS if key in before and key in now and before[key] != now[key]]
    return [f"its data has another corpus: {before[key]!r} -> {now[key]!r}" for key in keys]


def _changed_inputs(entry: dict[str, Any], run: PlannedRun, of_test: bool = False) -> list[str]:
    """Name the inputs of a run that had another content before. An input whose digest is missing counts as unchanged.

    Args:
        entry: A mapping with the earlier digests ``inputs``.
        run: The run.
        of_test: Whether to compare the inputs that only the test reads, instead of those of the fit.
    """
    before = entry.get("inputs", {})
    now = {name: digest for name, digest in run.inputs.items() if name.startswith(OF_TEST) == of_test}
    return [f"{name} has changed" for name, digest in now.items() if before.get(name, digest) != digest]


def current_inputs(run: PlannedRun) -> dict[str, str]:
    """Return the digests of the models and of the user's own classes that the configuration of a run names."""
    options = flat(run.config or run.test_config)
    models = {str(options[key]) for key in ("weights", "model.path") if options.get(key)}
    of_test = {f"{OF_TEST}{name}": digest for name, digest in source_digests(flat(run.test)).items()}
    return {path: _digest(path) for path in models} | parent_digest(run) | source_digests(run.training) | of_test


def parent_digest(run: PlannedRun) -> dict[str, str]:
    """Return the digest of the weights of a run's parent; empty if there is no parent, or no readable checkpoint."""
    if run.weights is None or not run.weights.is_file():
        return {}
    try:
        return {PARENT: _weights_digest(run.weights, run.weights.stat().st_mtime_ns)}
    except (UserError, LookupError, TypeError, AttributeError):  # the fit itself reports a damaged checkpoint
        return {}


@cache
def _weights_digest(path: Path, modified: int) -> str:
    """Return the sha256 of the weights in a checkpoint, without its other content, such as measured speeds."""
    import torch  # takes seconds

    from kerple.config.untrusted_checkpoints import load

    digest = hashlib.sha256()
    for name, weight in sorted(load(path)["state_dict"].items()):
        digest.update(name.encode() + weight.reshape(-1).view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()


@cache
def _digest(path: str) -> str:
    """Return the sha256 of a checkpoint, or of a model that `kerple.hf.pretrained_files.find_model` finds."""
    path = weights_file(path)
    if is_zipfile(path):  # a checkpoint of `fit`
        with Path(path).open("rb") as file:
            return hashlib.file_digest(file, "sha256").hexdigest()
    from kerple.hf.pretrained_files import find_model, source_digest  # needs optional packages

    return source_digest(find_model(path))


def changes(run: PlannedRun) -> list[str]:
    """Describe the differences between the fit in the run's folder, finished or not, and the fit of the run."""
    if entry := read_run_entry(run.test_folder):
        return changed_fit(entry, run)
    if (config := run.directory / "config.yaml").is_file():
        written = flat(read_mapping(config))
        # only LABEL/seed-N/checkpoints/last.ckpt of the path, because the folder of the runs may have been moved
        if run.weights and Path(written.get("weights") or "").parts[-4:] == run.weights.parts[-4:]:
            written["weights"] = run.training["weights"]
        begun = _begun(run)
        changed_data = _changed_data({"config": written, "data": begun.get("data") or run.data}, run)
        return differences(written, run.training) + changed_data + _changed_inputs(begun, run)
    # a process that was stopped during its start leaves some of `FIRST_FILES`
    others = any(not path.name.startswith(FIRST_FILES) for path in run.directory.glob("*"))
    if run.config and others and not run.checkpoint.is_file():
        return ["the folder has no config.yaml"]
    return []


def begin(run: PlannedRun, resumed: bool) -> None:
    """Write the description of a run into its folder, with the digests of the code of all processes that work on it.

    The digests of the plan are those of the first process, because the plan may be changed after the results are known.
    ``parallel`` is the largest of all processes, because the speed of the fit depends on it.

    Args:
        run: The run.
        resumed: Whether the run has a checkpoint of an earlier process.
    """
    earlier = _begun(run) if resumed else {}
    code = yaml.safe_dump({"code": sorted({*earlier.get("code", []), package_digest()})})
    parallel = max(run.parallel, earlier.get("parallel", 1))
    run = replace(run, plan=run.plan | earlier.get("plan", {}), parallel=parallel)
    write(run.directory / RUN_FILE, run.description() + code)


def _begun(run: PlannedRun) -> dict[str, Any]:
    """The content of the file that `begin` wrote; empty if there is none."""
    path = run.directory / RUN_FILE
    return read_mapping(path) if path.is_file() else {}


def complete(run: PlannedRun) -> None:
    """Add the entry ``run`` to the results of a test. The run then counts as finished.

    Raises:
        UserError: If the test has no results.
    """
    if (curves := training_curves(run.directory)) is not None:
        results_table.write_compressed(run.test_folder / f"{TABLE}.csv.gz", curves)
    read_runs([run.finished_run])
    _, about = results_table.read(run.test_folder)
    config = run.training
    cost = run.directory / "cost.json"
    if (stored := run.directory / "config.yaml").is_file():  # contains a precision in place of `auto`
        config = config | {PRECISION: flat(read_mapping(stored))[PRECISION]}
    about["run"] = {
        "config": with_class_names(config),
        "cost": read_mapping(cost) | {"parallel": _begun(run).get("parallel", run.parallel)} if cost.exists() else {},
        "data": run.data,
        "inputs": run.inputs,
        "test": with_class_names(flat(run.test)),
        "plan": _begun(run).get("plan", run.plan),
        "code": sorted({*_begun(run).get("code", []), package_digest()}),
    }
    results_table.write_about(run.test_folder, about)


def reuse(run: PlannedRun, record: Path) -> str | None:
    """Copy a record into the test folder of a run, if it is a record of the same run.

    Args:
        run: The run.
        record: Folder of the record.

    Returns:
        None if the record was copied, otherwise the reason why it was not.
    """
    try:
        entry = results_table.read(record)[1]["run"]
        for name, differing in (("fit", changed_fit(entry, run)), ("test", changed_test(entry, run))):
            if differing:
                return f"has another {name}: {'; '.join(differing)}"
        read_runs([replace(run.finished_run, folder=record)])  # reads all files, so that a damaged record is not copied
    except UNREADABLE as error:
        return f"cannot be read ({type(error).__name__}: {error})"
    _copy(record, run.test_folder)
    return None


def write_record(run: PlannedRun, report: Path, folders: Iterable[Path]) -> None:
    """Write the record of a finished run to the folder ``runs`` of a report, unless the newest record equals it.

    Args:
        run: The run.
        report: Folder of the report.
        folders: Folders of records, the newest first.
    """
    about = (run.test_folder / results_table.ABOUT).read_bytes()
    existing = (run.record(folder) for folder in folders)
    newest = next((record for record in existing if (record / results_table.ABOUT).is_file()), None)
    is_equal = newest and (newest / results_table.ABOUT).read_bytes() == about
    if not (newest and is_equal and _is_readable(replace(run.finished_run, folder=newest))):
        report.mkdir(parents=True, exist_ok=True)
        with _only_writer(report):
            _copy(run.test_folder, run.record(report / "runs"))


def pack(report: Path) -> None:
    """Move the records in the folder ``runs`` of a report into its archive. The archive is deterministic.

    The compressed tables of the records are stored as gzip files without compression, because zstd compresses what the
    tables of several runs have in common. Other files and folders stay where they are.

    Raises:
        UserError: If a record is damaged.
    """
    if (report / "runs").is_dir():
        with _only_writer(report):
            _pack(report)


def _only_writer(report: Path) -> AbstractContextManager[TextIO]:
    """Wait until no other `compare` writes records of this report, and lock them. To be used as a context manager."""
    return closing(cast(TextIO, lock(report / LOCK, wait=True)))


def _pack(report: Path) -> None:
    if not (report / "runs").is_dir():
        return
    content, packed = BytesIO(), list[Path]()
    with ZipFile(content, "w") as archive:
        for run in recorded_runs(report):
            read_runs([run])
            for path in sorted(path for path in run.folder.glob("[!.]*") if path.is_file()):
                data = path.read_bytes()
                data = gzip.compress(gzip.decompress(data), 0, mtime=0) if path.suffix == ".gz" else data
                archive.writestr(ZipInfo(Path(run.part, run.strategy, f"seed-{run.seed}", path.name).as_posix()), data)
                if path.is_relative_to(report / "runs"):  # and not in the unpacked archive
                    packed.append(path)
    write(report / PACKED, zstandard.compress(content.getvalue(), 19))  # the highest level with usual memory
    # results.json first, because a half-removed record with it would replace that in the archive
    for path in sorted(packed, key=lambda path: path.name != results_table.ABOUT):
        path.unlink()
    folders = [path for path in (report / "runs").rglob("*") if path.is_dir()]
    for folder in (*sorted(folders, reverse=True), report / "runs"):
        with suppress(OSError):  # another file is in it
            folder.rmdir()


def _copy(source: Path, target: Path) -> None:
    """Copy the files of a run that a report reads. results.json is copied last, because it marks a complete folder.

    Tables of analyses are `condensed`. A table that then has more than `MOST_ROWS` rows is not copied. The target is
    removed first, because an earlier test may have written tables of other analyses.
    """
    shutil.rmtree(target, ignore_errors=True)
    for path in sorted([*source.glob("*.csv"), *source.glob("*.csv.gz")]):
        if path.name == results_table.TABLE:
            write(target / path.name, path.read_bytes())
        else:
            table = condensed(pd.read_csv(path))
            if len(table) <= MOST_ROWS:
                results_table.write_compressed(target / f"{analysis_name(path)}.csv.gz", table)
    write(target / results_table.ABOUT, (source / results_table.ABOUT).read_bytes())


def condensed(table: pd.DataFrame) -> pd.DataFrame:
    """Leave out rows from the table of an analysis if the table has more than 256 distances.

    The rows of distance 0, of the integers nearest to 2^(n/4) with n = 0, 1, …, and of the largest distance are kept.
    """
    if "distance" not in table or table["distance"].nunique() <= 256:
        return table
    kept = {0, *np.unique(np.round(2 ** np.arange(0, 32, 0.25)).astype(np.int64)), table["distance"].max()}
    return table[table["distance"].isin(kept)]

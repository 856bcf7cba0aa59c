"""Folders of finished runs: the records of a report, and runs in any folder.

A record is a copy of a run's results that is committed with a report, see `kerple.compare.committed_records`.
"""

import atexit
import re
import shutil
import tempfile
from collections.abc import Iterable
from functools import cache
from glob import escape
from io import BytesIO
from lzma import LZMAError
from pathlib import Path
from zipfile import BadZipFile, ZipFile

import zstandard

from kerple.base.errors import UserError, require
from kerple.base.run_folder import versions
from kerple.compare.finished_runs import FinishedRun
from kerple.measure import results_table

FOLDER_NAME = "the name of a folder, without / and without a leading dot"
PACKED = "records.zip.zst"  # name of the archive of records in the folder of a report


def is_folder_name(name: str) -> bool:
    """Return whether a name is a `FOLDER_NAME`."""
    return Path(name).name == name and name[:1] not in ("", ".")


def record_folders(report: Path) -> list[Path]:
    """The folders that contain the records of a report: ``runs``, then the unpacked archive if the report has one.

    The record of a run is the folder ``[PART/]LABEL/seed-N`` in one of them. ``runs`` may not exist.

    Raises:
        UserError: If the archive is damaged.
    """
    archive = report / PACKED
    return [report / "runs", *([_unpacked(archive, archive.read_bytes())] if archive.is_file() else [])]


@cache
def _unpacked(path: Path, content: bytes) -> Path:
    """Unpack an archive into a temporary folder, which is removed when the process ends. Return the folder.

    Names in the archive cannot lead out of the folder, because zipfile removes ``..`` and leading slashes.

    Args:
        path: Path of the archive, for the error message.
        content: Content of the archive.
    """
    folder = Path(tempfile.mkdtemp())
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    try:
        ZipFile(BytesIO(zstandard.decompress(content))).extractall(folder)
    except (BadZipFile, ValueError, RuntimeError, LZMAError, zstandard.ZstdError, MemoryError) as error:
        raise UserError(f"{path}: damaged ({error}); restore it, or delete it and run again") from error
    return folder


def recorded_runs(report: Path) -> list[FinishedRun]:
    """The runs with records in a report. If a run is in ``runs`` and in the archive, the record in ``runs`` is used."""
    folders = record_folders(report)[::-1]
    found = {path.relative_to(folder): path.parent for folder in folders for path in folder.rglob(results_table.ABOUT)}
    runs = []
    for about, folder in sorted(found.items()):
        valid = len(about.parts) > 2 and re.fullmatch(r"seed-\d+", about.parts[-2]) is not None
        require(valid, str(report), f"a record in {about.parent}", "[PART/]LABEL/seed-N; move or remove it")
        *part, label, seed, _ = about.parts
        runs.append(FinishedRun(label, int(seed.removeprefix("seed-")), folder, "/".join(part)))
    return runs


def find_runs(folders: Iterable[Path], test: str = "test") -> list[FinishedRun]:
    """Find the runs in or below some folders.

    The label of a run in ``LABEL/seed-N`` is LABEL, and its seed is N. The label of any other run is the name of its
    folder, and its seed is 0. The folder of a run needs no content except the folder of the test. If a run has several
    versions of this folder (``test``, ``test_v1``, …), the newest is used, and a line is printed.

    Args:
        folders: Folders to search.
        test: Name of the test's folder in the folder of each run.

    Raises:
        UserError: If a folder contains no run, ``test`` is not the name of a folder, or the newest test of a run lacks
            a measurement of an earlier one. Such a test was stopped, or had other options.
    """
    require(is_folder_name(test), "compare: test_folder", repr(test), FOLDER_NAME)
    runs = []
    for folder in folders:
        found = {path.parent.parent for path in folder.rglob(f"{escape(test)}*/{results_table.ABOUT}")}
        tests = [newest for run in sorted(found) if (newest := _newest_test(run, test))]
        expected = f"a folder with runs that have {test}/{results_table.ABOUT}"
        require(bool(tests), "compare: directories", folder, expected)
        for path in tests:
            run = path.parent.resolve()
            seed = re.fullmatch(r"seed-(\d+)", run.name)
            runs.append(FinishedRun(run.parent.name if seed else run.name, int(seed[1]) if seed else 0, path))
    return list(dict.fromkeys(runs))


def _newest_test(run: Path, name: str) -> Path | None:
    """Return the newest version of a test's folder that has results, or None. `find_runs` describes the errors."""
    tests = [path for path in versions(run / name) if (path / results_table.ABOUT).is_file()]
    if len(tests) < 2:
        return next(iter(tests), None)
    *earlier, newest = tests
    measured = results_table.read(newest)[1]["evaluations"]
    for path in earlier:
        if lacking := [each for each in results_table.read(path)[1]["evaluations"] if each not in measured]:
            given = f"got {newest}, which lacks the measurement {lacking[0]} of {path.name}"
            raise UserError(f"compare: directories: {given}; test the run again, or remove one of the two folders")
    print(f"{newest}: the newest of {len(tests)} tests of this run; to report an earlier one, remove the later ones")
    return newest

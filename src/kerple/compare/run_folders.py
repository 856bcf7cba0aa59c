"""Folders of finished runs: the records of a report (single runs and an archive), and runs in any folder."""

import atexit
import re
import shutil
import tempfile
import zlib
from collections.abc import Iterable
from functools import cache
from io import BytesIO
from pathlib import Path
from zipfile import BadZipFile, ZipFile

from kerple.base.errors import UserError
from kerple.compare.runs import Run
from kerple.measure import results

PACKED = "records.zip"  # in the folder of a report: the records of its runs


def record_folders(report: Path) -> list[Path]:
    """The folders with records of a report: first the folder ``runs``, then the unpacked archive if it exists.

    The records in a folder are ``[PART/]LABEL/seed-N``.

    Raises:
        UserError: If the archive is damaged.
    """
    archive = report / PACKED
    packed = [_unpacked(archive, archive.read_bytes())] if archive.is_file() else []
    return [report / "runs", *packed]


@cache
def _unpacked(path: Path, content: bytes) -> Path:
    """A temporary folder with the files of an archive. zipfile writes only inside of it, whatever the names are."""
    folder = Path(tempfile.mkdtemp())
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    try:
        ZipFile(BytesIO(content)).extractall(folder)
    except (BadZipFile, zlib.error, EOFError) as error:
        raise UserError(f"{path}: damaged ({error}); restore it, or delete it and run again") from error
    return folder


def recorded_runs(report: Path) -> list[Run]:
    """The runs with records in a report. A run in ``runs`` is newer than the same run in the archive."""
    folders = record_folders(report)[::-1]
    found = {path.relative_to(folder): path.parent for folder in folders for path in folder.rglob(results.ABOUT)}
    runs = []
    for (*part, label, seed, _), folder in ((about.parts, found[about]) for about in sorted(found)):
        runs.append(Run(label, int(seed.removeprefix("seed-")), folder, "/".join(part)))
    return runs


def find_runs(folders: Iterable[Path], test: str = "test") -> list[Run]:
    """Find the runs in or below some folders.

    The label of a run in ``LABEL/seed-N`` is LABEL, and its seed is N. Any other run is labelled by the name of its
    folder and has seed 0. The files of the training may be missing.

    Args:
        folders: Folders to search.
        test: Name of the folder of the test in each run.

    Raises:
        UserError: If a folder has no run.
    """
    runs = []
    for folder in folders:
        tests = sorted({path.parent for path in folder.rglob(f"{test}/{results.ABOUT}")})
        if not tests:
            expected = f"a folder with runs that have {test}/{results.ABOUT}"
            raise UserError(f"compare: directories: got {folder}, expected {expected}")
        for path in tests:
            run = path.parent.resolve()
            seed = re.fullmatch(r"seed-(\d+)", run.name)
            runs.append(Run(run.parent.name if seed else run.name, int(seed[1]) if seed else 0, path))
    return list(dict.fromkeys(runs))

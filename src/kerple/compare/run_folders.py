"""The folders of a report's finished runs: its records, which are packed into an archive."""

import atexit
import shutil
import tempfile
import zlib
from functools import cache
from io import BytesIO
from pathlib import Path
from zipfile import BadZipFile, ZipFile

from kerple.base.errors import UserError
from kerple.compare.runs import Run
from kerple.measure import results

PACKED = "records.zip"  # beside a report: the records of its runs


def record_folders(report: Path) -> list[Path]:
    """The folders with a report's records, in ``[PART/]LABEL/seed-N``: single runs, then those of its archive if any.

    Raises:
        UserError: If the archive is damaged.
    """
    archive = report / PACKED
    packed = [_unpacked(archive, archive.read_bytes())] if archive.is_file() else []
    return [report / "runs", *packed]


@cache
def _unpacked(path: Path, content: bytes) -> Path:
    """A temporary folder with the files of an archive; zipfile writes none outside of it, whatever their names are."""
    folder = Path(tempfile.mkdtemp())
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    try:
        ZipFile(BytesIO(content)).extractall(folder)
    except (BadZipFile, zlib.error, EOFError) as error:
        raise UserError(f"{path}: damaged ({error}); restore it, or delete it and run again") from error
    return folder


def recorded_runs(report: Path) -> list[Run]:
    """The runs whose records are kept beside a report; a single run is newer than the archive's."""
    folders = record_folders(report)[::-1]
    found = {path.relative_to(folder): path.parent for folder in folders for path in folder.rglob(results.ABOUT)}
    runs = []
    for (*part, label, seed, _), folder in ((about.parts, found[about]) for about in sorted(found)):
        runs.append(Run(label, int(seed.removeprefix("seed-")), folder, "/".join(part)))
    return runs

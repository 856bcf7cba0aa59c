"""Downloads by an external program, such as pip or apt, which may fail or be interrupted at any time."""

import re
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from filelock import FileLock

from kerple.base.atomic import refuse_links
from kerple.base.errors import UserError


@contextmanager
def download_folder(folder: Path) -> Iterator[Path]:
    """Yield a new empty folder inside ``folder``. At the end of the context, its files are moved to ``folder``.

    Only files whose names have an extension (``*.*``) are moved; other files and subfolders are deleted. After an error
    no file is moved, so that ``folder`` has no incomplete file. A second process that calls this function for the same
    ``folder`` waits until the context of the first process ends.

    Raises:
        UserError: The folder has a link in place of the lock or of the new folder.
    """
    folder.mkdir(parents=True, exist_ok=True)
    unfinished = folder.absolute() / ".arriving"
    refuse_links("data.source", folder / ".lock", unfinished)
    with FileLock(folder / ".lock"):
        shutil.rmtree(unfinished, ignore_errors=True)  # left by a call that failed or was killed
        unfinished.mkdir()
        yield unfinished
        for path in unfinished.glob("*.*"):
            path.replace(folder / path.name)
        shutil.rmtree(unfinished)


def run_downloader(command: list[str], folder: Path, advice: str) -> None:
    """Run a program that downloads files.

    Args:
        command: The program and its arguments.
        folder: Working folder of the program.
        advice: What the user can do if there is no network, for the error message.

    Raises:
        UserError: The exit status is not 0. The message has the program's first error, or else the last line of stderr.
    """
    process = subprocess.run(command, cwd=folder, capture_output=True, encoding="utf-8", errors="replace")
    if process.returncode:
        errors = re.findall("^E(?:RROR)?: (.*)", process.stderr, re.M) or process.stderr.splitlines()[-1:]
        reason = (errors or ["no error message"])[0][:300]
        raise UserError(f"data.corpus: the download failed ({reason}); start again when the network works, or {advice}")

"""Fetching of files by a program, which may fail or be interrupted at any time."""

import re
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from filelock import FileLock

from kerple.base.errors import UserError


@contextmanager
def arriving(folder: Path) -> Iterator[Path]:
    """Make an empty folder inside ``folder``. At the end of the context, its files ``*.*`` are moved to ``folder``.

    After an error, no file is moved. Other processes wait until the context ends.
    """
    folder.mkdir(parents=True, exist_ok=True)
    with FileLock(folder / ".lock"):
        fresh = folder.absolute() / ".arriving"
        shutil.rmtree(fresh, ignore_errors=True)  # left by a killed process
        fresh.mkdir()
        yield fresh
        for path in fresh.glob("*.*"):
            path.replace(folder / path.name)
        shutil.rmtree(fresh)


def call(command: list[str], advice: str, folder: Path) -> None:
    """Run a program that fetches files.

    Args:
        command: The program and its arguments.
        advice: Alternative for the user, which the error names.
        folder: Working folder of the program.

    Raises:
        UserError: The program has failed; the message has the first line of its errors.
    """
    ended = subprocess.run(command, cwd=folder, capture_output=True, encoding="utf-8", errors="replace")
    if ended.returncode:
        reasons = re.findall("^E(?:RROR)?: (.*)", ended.stderr, re.M) or ended.stderr.splitlines()[-1:]
        reason = (reasons or ["no error message"])[0][:300]
        advice = f"completed downloads are kept: start again when the network works, or {advice}"
        raise UserError(f"data.corpus: its files cannot be fetched ({reason}); {advice}")

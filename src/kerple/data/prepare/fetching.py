"""A folder into which a program fetches files; the program may fail or be stopped at any time."""

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
    """Make an empty folder inside ``folder``; when the context ends, its files with an ending move to ``folder``.

    After an error no file is moved. Other processes wait for the end of the context.
    """
    folder.mkdir(parents=True, exist_ok=True)
    with FileLock(folder / ".lock"):
        fresh = folder.absolute() / ".arriving"
        shutil.rmtree(fresh, ignore_errors=True)  # a kill may have left it
        fresh.mkdir()
        yield fresh
        for path in fresh.glob("*.*"):
            path.replace(folder / path.name)
        shutil.rmtree(fresh)


def call(command: list[str], advice: str, folder: Path) -> None:
    """Run a program that fetches.

    Args:
        command: The program and its arguments.
        advice: What else the user may do, for the error.
        folder: Working folder of the program.

    Raises:
        UserError: It failed; the message has the first line in which it says why.
    """
    ended = subprocess.run(command, cwd=folder, capture_output=True, encoding="utf-8", errors="replace")
    if ended.returncode:
        reasons = re.findall("^E(?:RROR)?: (.*)", ended.stderr, re.M) or ended.stderr.splitlines()[-1:] or ["silent"]
        raise UserError(
            f"data.corpus: its files cannot be fetched ({reasons[0][:300]}); what came is kept: start again to go on "
            f"when the network is there, or {advice}"
        )

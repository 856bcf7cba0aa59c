"""Folders of runs: a run locks the folder that it writes to, and never overwrites an earlier run."""

import errno
import fcntl
import os
import platform
import shutil
import time
from contextlib import suppress
from glob import escape
from itertools import chain, count
from os.path import abspath, realpath
from pathlib import Path
from typing import TextIO

from kerple.base.atomic import no_follow, read_json, refuse_links, refuse_links_out
from kerple.base.errors import NO_FOLDER, UserError

LOCK = ".lock"
RUN_FILE = "run.yaml"  # written by `compare` before a fit starts: the fit and the test of the run
LAST = Path("checkpoints", "last.ckpt")  # path in the folder of a fit: the checkpoint from which the fit resumes
# beginnings of the names of files and folders that a run writes before its first step
FIRST_FILES = (LOCK, RUN_FILE, "config.yaml", "hparams.yaml", "provenance", "events.out.tfevents.")
# launchers set one or more of these variables to the number of the process
RANKS = ("RANK", "LOCAL_RANK", "GROUP_RANK", "NODE_RANK", "SLURM_PROCID", "JSM_NAMESPACE_RANK")

_lock_files: list[TextIO] = []  # the lock files of the folders that this process has locked
_new_folders: set[Path] = set()  # the folders that this process has made


def last_checkpoint(preferred: Path) -> Path | None:
    """Return the path of ``last.ckpt`` in the newest of a folder's versions (``…_v1``, …) that contains it, or None."""
    return next(filter(Path.is_file, (path / LAST for path in reversed(versions(preferred)))), None)


def weights_file(path: str) -> str:
    """Return the last checkpoint of a run if ``path`` is the folder of one, else ``path``."""
    last = Path(path, LAST)
    return str(last) if last.is_file() else path


def fit_directory(preferred: Path, ckpt_path: str | None) -> Path:
    """Choose and lock the folder that a fit writes to.

    If a run has several processes, only the first process chooses and locks a folder. `AutoTrainer.log_dir` sends the
    path to the others.

    Args:
        preferred: The folder. If it is not empty, a new run gets a new version of it: ``…_v1``, ``…_v2``, …
        ckpt_path: ``last`` resumes in the newest version that has a last checkpoint. The path of a checkpoint inside
            a version resumes in that version. In all other cases the folder is new, even if the fit resumes from a
            checkpoint outside all versions.

    Returns:
        The folder to resume in, or a folder to which no run has written. It stays locked until `unlock`.

    Raises:
        UserError: If another process has locked the folder to resume in, this folder contains a link to a place outside
            it, or a new folder cannot be made.
    """
    checkpoint = (last_checkpoint(preferred) if ckpt_path == "last" else ckpt_path) or ""
    for path in versions(preferred) if checkpoint else []:
        # the folder or a folder above it may be a link, so paths are compared with and without following links
        if any(Path(absolute(checkpoint)).is_relative_to(absolute(path)) for absolute in (abspath, realpath)):
            return resume_directory(path)
    return _new_version(preferred)


def test_directory(output: str | None, ckpt_path: str, command: str) -> Path:
    """Choose and lock the folder that a test or validation writes to.

    Args:
        output: The preferred folder, or None for the folder ``command`` inside the run's folder.
        ckpt_path: Path of the checkpoint, which is in the run's folder or in its folder ``checkpoints``.
        command: ``test`` or ``validate``.

    Returns:
        The preferred folder, or a new version of it (``test_v1``, …) if it is not empty.

    Raises:
        UserError: If the folder cannot be made, or ``output`` is None and a folder ``command`` of the run is a link.
    """
    if output:
        return _new_version(Path(output))
    checkpoints = Path(ckpt_path).parent
    run = checkpoints.parent if checkpoints.name == "checkpoints" else checkpoints
    refuse_links("output", *versions(run / command))
    return _new_version(run / command)


def report_directory(preferred: Path, report: str, sources: list[str]) -> Path:
    """Choose and lock the folder of a report, so that it replaces only an earlier report on the same sources.

    Args:
        preferred: The preferred folder.
        report: Name of the JSON file of the report, which has an entry ``sources``.
        sources: Paths or names of the models of the report.

    Returns:
        The version of the folder with a report on these sources, or else a new version of it.

    Raises:
        UserError: If the folder cannot be made or written to, or another process has locked it.
    """
    for path in versions(preferred):
        if read_json(path / report).get("sources") == sources:
            return resume_directory(path)
    return _new_version(preferred)


def unlock(remove_new: bool = False) -> None:
    """Unlock the folders that this process has locked, and remove those that it has made and left empty.

    Args:
        remove_new: Whether to also remove the folders that this process has made if they contain only what a run writes
            before its first step (`FIRST_FILES`).
    """
    for folder in _new_folders:
        if _is_empty(folder) or (remove_new and all(path.name.startswith(FIRST_FILES) for path in folder.glob("*"))):
            shutil.rmtree(folder, ignore_errors=True)
    _new_folders.clear()
    _lock_files.clear()


# a child process, such as a worker of a loader, may outlive this one and must not keep the folders locked
os.register_at_fork(after_in_child=_lock_files.clear)
os.register_at_fork(after_in_child=_new_folders.clear)


def _named(folder: Path) -> Path:
    """Return a path that ends with the folder's name, which `Path(".")` does not, so that versions can be named."""
    return folder if folder.name not in ("", "..") else Path(abspath(folder))


def versions(preferred: Path) -> list[Path]:
    """Return the folder and its versions ``…_v1``, ``…_v2``, … as far as they exist, oldest first."""
    preferred = _named(preferred)
    prefix = f"{preferred.name}_v"
    numbers = [path.name.removeprefix(prefix) for path in preferred.parent.glob(f"{escape(prefix)}*")]
    later = (preferred.with_name(prefix + n) for n in sorted(filter(str.isdecimal, numbers), key=int))
    return [*filter(Path.exists, [preferred]), *later]


def resume_directory(path: Path, *skipped: str) -> Path:
    """Make a folder if it is missing, and lock it. Do nothing in other processes than the first one of a run.

    Args:
        path: The folder.
        *skipped: Name of a folder inside it that may contain links to places outside it.

    Raises:
        UserError: If another process has locked the folder, the folder cannot be made, or it contains a link to a place
            outside it.
    """
    if _is_first_process() and (holder := _make_and_lock(path, *skipped)):
        raise UserError(f"output: {path} is in use by {holder}; wait for its end or stop it, then resume")
    return path


def _new_version(preferred: Path) -> Path:
    """Make and lock the first of a folder's versions that is empty and that no other process has locked."""
    if not _is_first_process():
        return preferred
    preferred = _named(preferred)
    for path in chain([preferred], (preferred.with_name(f"{preferred.name}_v{n}") for n in count(1))):
        if (existed := path.exists()) and not _is_empty(path):
            continue
        with suppress(FileNotFoundError):  # another run has removed the folder
            if _make_and_lock(path) is None:
                # another run may have written to the folder or removed its lock file before this process locked it
                if _is_empty(path) and os.fstat(_lock_files[-1].fileno()).st_nlink:
                    if not existed:
                        _new_folders.add(path.absolute())
                    return path
                _lock_files.pop().close()
    raise AssertionError("unreachable")


def _is_empty(path: Path) -> bool:
    return path.is_dir() and all(entry.name in (LOCK, RUN_FILE) for entry in path.iterdir())


def _make_and_lock(path: Path, *skipped: str) -> str | None:
    """Make a folder if it is missing, and lock it. Return None, or the process that already holds the lock."""
    made = False
    try:
        os.fspath(path).encode()
        path.mkdir(parents=True, exist_ok=True)
        made = True
        refuse_links_out("output", path, *skipped)
        file = lock(path.absolute() / LOCK)
    except UnicodeError as error:
        raise UserError(f"output: got {str(path)!r}, expected a UTF-8 path; choose another folder") from error
    except OSError as error:
        removed = made and error.errno == errno.ENOENT  # by another run
        if removed or (error.errno not in {*NO_FOLDER, errno.ENOENT} and path.parent.is_dir()):
            error.filename = str(path)
            raise
        raise UserError(f"output: {path} cannot be written to ({error.strerror}); choose another folder") from error
    if isinstance(file, str):
        return file
    _lock_files.append(file)
    return None


def is_locked(folder: Path) -> bool:
    """Return whether another process has locked a folder."""
    try:
        with open(folder / LOCK, opener=no_follow) as file:
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    except OSError:  # there is no lock file, or the file system has no locks
        pass
    return False


def lock(path: Path, wait: bool = False) -> TextIO | str:
    """Lock a file, and write the id of this process into it. A missing file is created. Closing the file unlocks it.

    The package `filelock` is not used, because it empties the file before it has the lock. A link is not followed.

    Args:
        path: Path of the file.
        wait: Whether to wait until another process releases the lock.

    Returns:
        The open file; without ``wait``, a description of the other process that holds the lock, if there is one.
    """
    file = open(path, "a+", encoding="utf-8", errors="replace", opener=no_follow)  # noqa: SIM115
    try:
        fcntl.flock(file, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))
    except BlockingIOError:
        file.seek(0)
        return file.read().strip() or "another process"
    except OSError:  # the file system has no locks, see docs/decisions.md
        pass
    file.truncate(0)
    file.write(f"process {os.getpid()} on {platform.node()}, since {time.strftime('%Y-%m-%d %H:%M:%S')}\n")
    file.flush()
    return file


def _is_first_process() -> bool:
    """Return whether this is the first process of a run. It chooses the folder for all processes of the run."""
    return all(os.environ.get(name, "0") == "0" for name in RANKS)

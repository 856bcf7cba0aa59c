"""Reading and atomic writing of files, and the place of notes about folders that are only read."""

import errno
import hashlib
import json
import os
import shutil
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from glob import escape
from pathlib import Path
from typing import Any, BinaryIO
from uuid import uuid4

from kerple.base.errors import UserError

STALE_AFTER = 3600.0  # seconds without a change after which a temporary file counts as abandoned


@contextmanager
def writing(path: Path, durable: bool = True) -> Iterator[BinaryIO]:
    """Open a temporary file for writing. It replaces ``path`` at the end of the context, or is removed on an error.

    If the process is killed at any time, ``path`` is either the previous file or the new one.

    Args:
        path: Path of the file. Its folder is made if it is missing.
        durable: Whether the file also survives a power cut. If true, the function waits twice for the disk.

    Raises:
        OSError: If the file cannot be written. ``path`` is then unchanged. Only if the final synchronisation of the
            folder failed, ``path`` is already the complete new file.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    # remove temporary files of killed processes, but no recent file, because another process may still be writing it
    for other in path.parent.glob(f".{escape(path.name)}.*.part"):
        with suppress(FileNotFoundError):
            if time.time() - other.stat().st_mtime > STALE_AFTER:
                other.unlink()
    temporary = path.with_name(f".{path.name}.{uuid4().hex}.part")
    try:
        with temporary.open("wb") as file:
            yield file
            file.flush()
            if durable:
                os.fsync(file.fileno())
        os.replace(temporary, path)
        if durable:
            _sync_folder(path.parent)  # a rename changes the folder, so the folder is synced too
    except BaseException as error:
        temporary.unlink(missing_ok=True)
        if isinstance(error, OSError):
            error.filename = str(path)  # report the path of the file, not of the temporary file
        raise


def _sync_folder(path: Path) -> None:
    folder = os.open(path, os.O_RDONLY)
    try:
        os.fsync(folder)
    except OSError as error:
        if error.errno not in (errno.EINVAL, errno.ENOTSUP):  # some network file systems cannot sync a folder
            raise
    finally:
        os.close(folder)


@contextmanager
def new_folder(option: str, folder: Path) -> Iterator[Path]:
    """Make a temporary folder inside a new or empty folder, to which its files are moved at the end of the context.

    On an error, all files are removed. If the process is killed, the folder has no config.json, because this file is
    moved last.

    Args:
        option: Name of the option with which the user has selected the folder.
        folder: A folder that is empty or does not exist.

    Raises:
        UserError: If the folder is not empty or cannot be made.
    """
    existed, moved = folder.exists(), list[Path]()
    temporary = folder / f".{uuid4().hex}.part"
    try:
        if existed and any(folder.iterdir()):
            raise UserError(f"{option}: got {folder}, which is not empty; name a new folder")
        temporary.mkdir(parents=True)
    except OSError as error:
        raise UserError(f"{option}: got {folder}, which cannot be made ({error}); name a new folder") from error
    try:
        yield temporary
        for path in sorted(temporary.iterdir(), key=lambda path: path.name == "config.json"):
            moved.append(path.rename(folder / path.name))
    except BaseException as error:
        for path in moved:
            path.unlink()
        shutil.rmtree(temporary, ignore_errors=True)
        if not existed:
            folder.rmdir()
        if isinstance(error, OSError):
            error.filename = str(folder)  # report the path of the folder, not of the temporary one
        raise
    temporary.rmdir()


def write(path: Path, content: bytes | str, durable: bool = True) -> None:
    """Write ``content`` to a file, a string as UTF-8. See `writing` for the other arguments and errors."""
    with writing(path, durable) as file:
        file.write(content.encode() if isinstance(content, str) else content)


def read_json(path: Path) -> dict[str, Any]:
    """Return the mapping in a JSON file, or an empty mapping if the file cannot be read or contains anything else."""
    with suppress(OSError, ValueError, RecursionError):
        content = json.loads(path.read_text(encoding="utf-8"))
        return content if isinstance(content, dict) else {}
    return {}


def refuse_links(option: str, *paths: Path) -> None:
    """Raise a UserError that names the option of the folder if a path, to which something is written, is a link."""
    for path in filter(Path.is_symlink, paths):
        raise UserError(f"{option}: {path} is a link; delete it, or choose another folder")


def refuse_links_out(option: str, folder: Path, skipped: str = "wandb") -> None:
    """Raise a UserError if an entry in or below a folder is a link to a place outside it. The folder may be a link.

    The folder may come from somebody else, so that a file written through such a link could replace one of the user.

    Args:
        option: Name of the option with which the user has selected the folder.
        folder: The folder.
        skipped: Name of folders below it that are not searched. The package wandb makes links to its cache.
    """
    root = os.path.realpath(folder)
    for parent, folders, files in os.walk(folder):
        for path in (os.path.join(parent, name) for name in folders + files):
            if os.path.islink(path) and not Path(os.path.realpath(path)).is_relative_to(root):
                advice = "replace the link by a copy of its target, or choose another folder"
                raise UserError(f"{option}: {path} is a link out of {folder}, which is not written through; {advice}")
        folders[:] = [name for name in folders if name != skipped]


def no_follow(path: str, flags: int) -> int:
    """Open a file that is not a link. It is an ``opener`` for `open`."""
    return os.open(path, flags | os.O_NOFOLLOW, 0o666)


def note_path(kind: str, path: Path) -> Path:
    """Return the path of a note about a file or folder that is only read. Such a note is never written beside it.

    A folder that somebody sent may contain links, through which a file written in it would replace one of the user's
    files. Notes are in ``$XDG_CACHE_HOME/kerple``, by default in ``~/.cache/kerple``.

    Args:
        kind: Name of the kind of notes.
        path: The file or folder. Notes differ for different real paths.
    """
    cache = os.path.expanduser(os.environ.get("XDG_CACHE_HOME") or "~/.cache")
    root = cache if os.path.isabs(cache) else os.devnull  # writing fails below the null device
    return Path(root, "kerple", kind, hashlib.sha256(os.fsencode(os.path.realpath(path))).hexdigest()[:32])

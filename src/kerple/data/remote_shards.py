"""Folders of shards at a URL: their files are copied to a cache of this machine when they are needed.

The cache is webdataset's `FileCache`, with three replacements. Its own openers start programs, its file names consist
of the last part of a URL, and its clean-up deletes files that are in use. Here fsspec opens a URL, the name of a copy
is a hash of its URL and checksum, and a copy is deleted only if no process has it open.
"""

import fcntl
import hashlib
import os
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from io import BytesIO
from pathlib import Path
from typing import Any, BinaryIO, TypeVar

from filelock import FileLock, Timeout

from kerple.base.atomic import note_path, write
from kerple.base.errors import UserError, require
from kerple.data.file_opening import filesystem, without_query

SCHEME = "fsspec"  # webdataset opens the URL fsspec:URL with `_open_url`
VERIFIED = "verified"  # kind of the notes with the ctime and sha256 of each file whose checksum was correct
TIMEOUT = 60.0  # seconds without a byte after which a connection counts as broken
PATIENCE = 120.0  # seconds after which no other attempt begins
PASSING = (408, 425, 429)  # status codes from 400 to 499 with which a server asks to try again

Result = TypeVar("Result")


class UnreachableShards(UserError):
    """A file at a URL cannot be read, after several attempts."""


def is_url(location: str) -> bool:
    """Return whether the location of a folder is a URL. Files at ``file://…`` are copied, as from a slow disk."""
    return "://" in location


def is_intact(path: Path, sha256: str, recheck: bool = False) -> bool:
    """Return whether a file has a checksum.

    The checksum of a file is compared once, and again after the file has changed. A file with the correct checksum is
    recorded in a note (`note_path`). If the note cannot be written, the next call compares again.

    Args:
        path: The file.
        sha256: The checksum.
        recheck: Whether to compare the checksum even if the file has not changed.
    """
    # unlike the time of modification, the time of change (ctime) cannot be copied or set
    note = note_path(VERIFIED, path.parent) / path.name
    state = f"{path.stat().st_ctime_ns} {sha256}".encode()
    if not recheck:
        with suppress(OSError):
            if note.read_bytes() == state:
                return True
    with path.open("rb") as file:
        if hashlib.file_digest(file, "sha256").hexdigest() != sha256:
            return False
    with suppress(OSError):
        write(note, state, durable=False)
    return True


class RemoteFiles:
    """The files of a folder at a URL, and their copies in a cache, which several processes and runs may share.

    Args:
        url: URL of the folder.
        cache: Folder of the cache.
        gigabytes: Size of the cache in 10⁹ bytes, above which the copies that were not used for the longest time are
            deleted. Files that several processes fetch at the same moment may exceed it.

    Raises:
        UserError: The URL has a query or a fragment, after which no name of a file can be appended.
    """

    def __init__(self, url: str, cache: str, gigabytes: float) -> None:
        given = f"{without_query(url)} with a query"  # which may be a secret
        expected = "a URL without one; give credentials by the environment"
        require(without_query(url) == url, "data.directory", given, expected)
        self.url, self.directory, self.gigabytes = url.rstrip("/"), Path(cache, "shards"), gigabytes

    def read(self, name: str) -> bytes:
        """Return the content of a file without a copy, such as the manifest, which has no checksum.

        Raises:
            UserError: The file cannot be read.
        """
        return self._retry(lambda: _open_url(f"{self.url}/{name}").read(), name)

    def open(self, name: str, sha256: str, size: int = 0, patience: float = PATIENCE) -> BinaryIO:
        """Open the copy of a file, after fetching it if it is missing. Other processes wait for it.

        The copy is locked, so that it is not deleted, until the returned file and all memory maps of it are closed.

        Args:
            name: Name of the file.
            sha256: Its checksum.
            size: Its number of bytes; 0 if it is small.
            patience: Seconds in which to try again after an error that may pass; 0 to try once.

        Raises:
            UserError: The file cannot be read, differs from its checksum, or does not fit into the cache.
        """
        key = hashlib.sha256(f"{self.url}\0{sha256}".encode()).hexdigest()[:32]
        copy = self.directory / f"{key}-{name}"
        lock = _lock_of(copy)
        self.directory.mkdir(parents=True, exist_ok=True)
        with FileLock(lock):
            os.utime(lock)  # not of the copy, whose ctime would change
            if copy.exists() and not is_intact(copy, sha256):
                copy.unlink()  # damaged on this machine
            if not copy.exists():
                self._fetch(name, copy, sha256, size, patience)
            file = copy.open("rb")
            fcntl.flock(file, fcntl.LOCK_SH)
            return file

    def _fetch(self, name: str, copy: Path, sha256: str, size: int, patience: float) -> None:
        """Write the copy of a file. See `open` for the arguments and errors."""
        from webdataset.cache import FileCache  # imports torch, which takes seconds
        from webdataset.gopen import gopen_schemes

        def is_intact_copy(path: str) -> bool:
            if not is_intact(Path(path), sha256):
                os.unlink(path)
                given = f"{self.url}/{name}: its sha256 differs from the manifest"
                raise UserError(f"{given}; upload the folder again, or start again if it was just replaced")
            return True  # for other values, FileCache starts a program that describes the file

        self._remove_parts(copy)  # of a process that was killed
        self._make_room(size)
        gopen_schemes[SCHEME] = lambda url, *_: _open_url(url.removeprefix(f"{SCHEME}:"))
        cache = FileCache(str(self.directory), url_to_name=lambda _: copy.name, validator=is_intact_copy)

        def write_copy() -> None:
            try:
                cache.get_file(f"{SCHEME}:{self.url}/{name}")
            except OSError as error:
                error.filename = error.filename or str(copy)  # missing if a write fails, for example on a full disk
                raise
            finally:
                self._remove_parts(copy)

        self._retry(write_copy, name, patience)

    def _retry(self, read: Callable[[], Result], name: str, patience: float = PATIENCE) -> Result:
        """Call a function that reads a file, again after an error that may pass. See `open` for the arguments."""
        pause, end = 1.0, time.monotonic() + patience
        while True:
            try:
                return read()
            except UnreachableShards as error:
                if time.monotonic() + pause > end or not _may_pass(error.__cause__):
                    raise
                print(f"{self.url}/{name}: {_describe(error.__cause__)}; trying again", file=sys.stderr, flush=True)
                time.sleep(pause)
                pause *= 1.5

    def _remove_parts(self, copy: Path) -> None:
        """Delete the incomplete files of a copy."""
        for part in self.directory.glob(f"{copy.name}.temp*"):
            part.unlink()

    def _make_room(self, size: int) -> None:
        """Delete files that no process has open or fetches until a file of ``size`` bytes fits into the cache."""
        with FileLock(self.directory / ".room.lock"):
            sizes = dict[Path, int]()
            for path in self.directory.glob("[!.]*"):
                with suppress(FileNotFoundError):  # a process has just renamed or deleted it
                    sizes[path] = path.stat().st_size
            excess = sum(sizes.values()) + size - self.gigabytes * 1e9

            def last_use(path: Path) -> float:
                return _lock_of(path).stat().st_mtime if _lock_of(path).exists() else 0.0

            for path in sorted(sizes, key=last_use) if excess > 0 else ():
                busy = (FileNotFoundError, BlockingIOError, Timeout)
                with suppress(*busy), FileLock(_lock_of(path), timeout=0), path.open("rb") as file:
                    fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    path.unlink()
                    excess -= sizes[path]
                if excess <= 0:
                    return
            expected = f"{excess / 1e9:.3g} more, because the other files in {self.directory} are in use"
            advice = "increase it, or set data.sections, with which fewer shards are in use"
            require(excess <= 0, "data.cache_gb", self.gigabytes, f"{expected}; {advice}")


def _lock_of(copy: Path) -> Path:
    """Return the lock of a copy, whose time of modification is the time of the last use."""
    return copy.with_name(f".{copy.name.partition('-')[0]}.lock")


def _may_pass(error: BaseException | None) -> bool:
    """Return whether a request that raised this error may succeed when it is repeated."""
    status = getattr(error, "status", None) or getattr(error, "code", None)  # of aiohttp; of gcsfs
    refused = status in range(400, 500) and status not in PASSING
    forbidden = str(error).startswith("Forbidden")  # 403 of gcsfs, whose error has no status
    missing = isinstance(error, FileNotFoundError | PermissionError)
    return not (refused or forbidden or missing or "Credentials" in type(error).__name__)


def _describe(error: BaseException | None) -> str:
    return " ".join(f"{type(error).__name__}: {error}".split()).rstrip(": ")[:300]


def _open_url(url: str) -> BytesIO:
    """Return the content of the file at a URL, which is read by one request.

    Raises:
        UserError: The URL has another protocol than `PROTOCOLS`, needs a package, or redirects to another server.
        UnreachableShards: The file cannot be read. The cause is the error of fsspec.
        MemoryError: The file does not fit into memory.
    """
    options = {"get_client": _http_client} if url.startswith(("http://", "https://")) else {}
    try:
        system, path = filesystem(url, "data.directory", **options)
        return BytesIO(system.cat_file(path))
    except (UserError, MemoryError):
        raise
    except Exception as error:  # each file system raises other errors
        advice = "check the address, the server and your credentials, then run the same command again"
        raise UnreachableShards(f"data.directory: {url} cannot be read ({_describe(error)}); {advice}") from error


async def _http_client(**options: Any) -> Any:
    """Return a client that follows redirects only within a server. It is called by fsspec."""
    import aiohttp  # imported by fsspec only if a URL needs it
    from yarl import URL

    async def check_redirect(session: Any, context: Any, redirect: Any) -> None:
        target = redirect.url.join(URL(redirect.response.headers["Location"]))
        expected = "no redirect to another server; give the final address"
        require(target.origin() == redirect.url.origin(), "data.directory", f"{redirect.url} -> {target}", expected)

    trace = aiohttp.TraceConfig()
    trace.on_request_redirect.append(check_redirect)
    timeout = aiohttp.ClientTimeout(total=None, sock_connect=TIMEOUT, sock_read=TIMEOUT)
    return aiohttp.ClientSession(trace_configs=[trace], timeout=timeout, **options)

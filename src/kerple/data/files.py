"""Files from anywhere fsspec reaches, read from front to back, which survive a bad connection.

fsspec's own HTTP files give up at the first error.
"""

import asyncio
import contextlib
import gzip
import io
import random
import time
from collections.abc import Callable
from typing import IO, Any, BinaryIO, TypeVar, cast

import fsspec
import zstandard

from kerple.errors import UserError

ATTEMPTS = 8  # in a row without a single byte; 0.5 + 1 + 2 + … = a minute of patience
FIRST_PAUSE = 0.5  # seconds
STALL = 30.0  # seconds without a byte before a connection counts as dead
SAFE_PROTOCOLS = {"file", "local", "http", "https", "s3", "s3a", "gs", "gcs", "az", "abfs", "memory", "hf"}
TEMPORARY = (OSError, EOFError, asyncio.TimeoutError, TimeoutError)
T = TypeVar("T")


def is_remote(path: str) -> bool:
    """Whether a path is a URL that fsspec reads, not a file of this machine."""
    return "://" in path and not path.startswith("file://")


def check_protocol(path: str) -> None:
    """Refuse what is no plain file: chained URLs, shell pipes, protocols that run programs.

    Raises:
        UserError: Names the path.
    """
    protocol = path.partition("://")[0] if "://" in path else "file"
    if protocol not in SAFE_PROTOCOLS or "::" in path or path.startswith("pipe:"):
        raise UserError(f"{path}: expected a local path or a URL of {', '.join(sorted(SAFE_PROTOCOLS))}")


def filesystem(path: str) -> tuple[Any, str]:
    """The fsspec file system of a path and the path in it.

    Raises:
        UserError: The protocol is not a plain one, or its package is not installed.
    """
    check_protocol(path)
    options: dict[str, Any] = {}
    if path.startswith(("http://", "https://")):
        import aiohttp

        timeout = aiohttp.ClientTimeout(total=None, sock_connect=STALL, sock_read=STALL)
        options = {"client_kwargs": {"timeout": timeout}}
    try:
        return fsspec.core.url_to_fs(path, **options)
    except ImportError as error:
        raise UserError(f"{path}: {error}") from error


def retry(attempt: Callable[[], T], what: str, attempts: int = ATTEMPTS, pause: float = FIRST_PAUSE) -> T:
    """Call until it does not fail, waiting twice as long each time, with jitter so that many ranks do not come at once.

    Raises:
        UserError: It failed `attempts` times, or because there is no such file.
    """
    for failures in range(attempts):
        try:
            return attempt()
        except FileNotFoundError as error:
            raise UserError(f"{what}: there is no such file") from error
        except TEMPORARY + _client_errors() as error:
            if failures + 1 == attempts:
                raise UserError(f"{what}: {attempts} attempts failed, the last with {error!r}") from error
            time.sleep(pause * 2**failures * (0.5 + random.random()))
    raise AssertionError("unreachable")


def _client_errors() -> tuple[type[BaseException], ...]:
    try:
        import aiohttp
    except ImportError:
        return ()
    return (aiohttp.ClientError,)


class ResumingStream(io.RawIOBase):
    """A remote file read from front to back; after a failure it is opened again and goes on at the same byte.

    Args:
        path: URL for fsspec.
        size: Bytes the file must have, where that is known; a connection that closes before is a failure.
        attempts: Failures in a row, without a byte in between, that are endured.
        pause: Seconds before the first new attempt; doubled after each.

    Raises:
        UserError: While reading, once the attempts are used up.
    """

    def __init__(
        self, path: str, size: int | None = None, attempts: int = ATTEMPTS, pause: float = FIRST_PAUSE
    ) -> None:
        self.path, self.attempts, self.pause = path, attempts, pause
        self.position = 0
        self.file: IO[bytes] | None = None
        self.size = size if size is not None else retry(self._size, path, attempts, pause)

    def _size(self) -> int | None:
        system, path = filesystem(self.path)
        return cast("int | None", system.info(path).get("size"))

    def readable(self) -> bool:
        return True

    def tell(self) -> int:
        return self.position

    def readinto(self, buffer: Any) -> int:
        view = memoryview(buffer)
        count = retry(lambda: self._read(view), self.path, self.attempts, self.pause)
        self.position += count
        return count

    def _read(self, view: memoryview) -> int:
        if self.size is not None and self.position >= self.size:
            return 0
        try:
            if self.file is None:
                self.file = self._open()
            chunk = self.file.read(len(view))
            if not chunk and self.size is not None:
                raise ConnectionError(f"ended after {self.position} of {self.size} bytes")
        except BaseException:
            self._drop()
            raise
        view[: len(chunk)] = chunk
        return len(chunk)

    def _open(self) -> IO[bytes]:
        system, path = filesystem(self.path)
        file = system.open(path, "rb", block_size=1 << 20, cache_type="readahead")
        if self.position:
            try:
                file.seek(self.position)
            except (
                OSError,
                ValueError,
                NotImplementedError,
            ):  # a server that knows no ranges: read up to where we were
                left = self.position
                while left and (skipped := file.read(min(left, 1 << 20))):
                    left -= len(skipped)
        return cast("IO[bytes]", file)

    def _drop(self) -> None:
        if self.file is not None:
            with contextlib.suppress(Exception):  # a connection that is gone cannot say goodbye
                self.file.close()
            self.file = None

    def close(self) -> None:
        self._drop()
        super().close()


def open_bytes(path: str) -> BinaryIO:
    """A local or remote file for reading from front to back, as it lies; `tell` counts its bytes.

    Raises:
        UserError: It does not exist or cannot be reached.
    """
    check_protocol(path)
    if is_remote(path):
        return io.BufferedReader(ResumingStream(path), 1 << 20)  # type: ignore[return-value]
    try:
        return open(path.removeprefix("file://"), "rb")
    except OSError as error:
        raise UserError(f"{path}: cannot be read ({error.strerror})") from error


def decompress(file: BinaryIO, name: str) -> IO[bytes]:
    """Undo what the name's ending says: .zst (all frames of it), .gz, anything else as it is."""
    if name.endswith(".zst"):
        return cast("IO[bytes]", io.BufferedReader(ZstdFrames(file), 1 << 20))
    if name.endswith(".gz"):
        return cast("IO[bytes]", gzip.GzipFile(fileobj=file))
    return cast("IO[bytes]", file)


class ZstdFrames(io.RawIOBase):
    """Decompresses frame after frame, and fails where a file ends inside one: the library's own reader just ends there.

    Args:
        file: The compressed bytes.

    Raises:
        EOFError, zstandard.ZstdError: While reading, for a file that is cut off or damaged.
    """

    FEED = 1 << 12  # at zstd's largest ratio these become 128 MiB

    def __init__(self, file: BinaryIO) -> None:
        self.file, self.frame, self.ready = file, None, memoryview(b"")
        self.left = b""

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        while not self.ready:
            fed = self.left or self.file.read(self.FEED)
            self.left = b""
            if not fed:
                if self.frame is not None:
                    raise EOFError("the file ends inside a compressed frame")
                return 0
            if self.frame is None:
                self.frame = zstandard.ZstdDecompressor().decompressobj()
            self.ready = memoryview(self.frame.decompress(fed))
            if self.frame.eof:
                self.left, self.frame = self.frame.unused_data, None
        part = self.ready[: len(buffer)]
        buffer[: len(part)] = part
        self.ready = self.ready[len(part) :]
        return len(part)

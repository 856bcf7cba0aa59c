"""Files of a corpus, local or remote, read from front to back by fsspec; an interrupted connection is resumed.

Prepared shards at a URL are read by `remote`. fsspec's own HTTP files give up at the first error.
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

from kerple.base.errors import UserError

ATTEMPTS = 8  # failures in a row, without a byte in between; the pauses add up to about a minute
FIRST_PAUSE = 0.5  # seconds
STALL = 30.0  # seconds without a byte before a connection counts as dead
SAFE_PROTOCOLS = {"file", "local", "http", "https", "s3", "s3a", "gs", "gcs", "az", "abfs", "memory", "hf"}
TEMPORARY = (OSError, EOFError, asyncio.TimeoutError, TimeoutError)
T = TypeVar("T")


def is_remote(path: str) -> bool:
    """Whether a path is a URL that fsspec reads, not a file of this machine."""
    return "://" in path and not path.startswith("file://")


def bare(path: str) -> str:
    """A path or URL whose end is that of its file's name, without what a web address asks the server beside it."""
    return path.partition("?")[0].partition("#")[0] if path.startswith(("http://", "https://")) else path


def check_protocol(path: str) -> None:
    """Refuse a path that is more than a plain file: a chained URL, a shell pipe, a protocol that runs programs.

    Raises:
        UserError: The path is refused; the message names it.
    """
    protocol = path.partition("://")[0] if "://" in path else "file"
    if protocol not in SAFE_PROTOCOLS or "::" in path or path.startswith("pipe:"):
        raise UserError(f"{path}: expected a local path or a URL of {', '.join(sorted(SAFE_PROTOCOLS))}")


def filesystem(path: str) -> tuple[Any, str]:
    """The fsspec file system that a path or URL belongs to, and the path within it.

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
    """Call `attempt` until it succeeds, and return its value.

    The pause doubles after each failure, and is random by half, so that many ranks do not come back at the same time.

    Args:
        attempt: What to call; a failure is an exception of the network or the file system.
        what: What messages call it, a path or URL.
        attempts: Largest number of calls.
        pause: Seconds before the second call.

    Raises:
        UserError: All attempts failed, or the file does not exist.
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
    """A remote file read from front to back. After a failure it is opened again and read on from the same byte.

    Args:
        path: URL of the file.
        size: Bytes of the file; a connection that closes earlier has failed. With None, the server is asked.
        attempts: Number of failures in a row, without a byte in between, after which reading gives up.
        pause: Seconds before the first new attempt; doubled before each further one.

    Raises:
        UserError: The file does not exist, or all attempts failed; also while reading.
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
            except (OSError, ValueError, NotImplementedError):
                # the server cannot start in the middle of a file: read up to the same byte
                left = self.position
                while left and (skipped := file.read(min(left, 1 << 20))):
                    left -= len(skipped)
        return cast("IO[bytes]", file)

    def _drop(self) -> None:
        if self.file is not None:
            with contextlib.suppress(Exception):  # closing a broken connection may fail too
                self.file.close()
            self.file = None

    def close(self) -> None:
        self._drop()
        super().close()


def open_bytes(path: str) -> BinaryIO:
    """Open a local or remote file for reading from front to back, without decompressing it.

    Raises:
        UserError: The file does not exist or cannot be reached.
    """
    check_protocol(path)
    if is_remote(path):
        return io.BufferedReader(ResumingStream(path), 1 << 20)
    try:
        return open(path.removeprefix("file://"), "rb")
    except OSError as error:
        raise UserError(f"{path}: cannot be read ({error.strerror})") from error


def decompress(file: IO[bytes], name: str) -> IO[bytes]:
    """Decompress a file by the ending of its name: .zst (all frames), .gz; any other file is returned as it is."""
    if bare(name).endswith(".zst"):
        return cast("IO[bytes]", io.BufferedReader(ZstdFrames(file), 1 << 20))
    if bare(name).endswith(".gz"):
        return cast("IO[bytes]", gzip.GzipFile(fileobj=file))
    return file


class ZstdFrames(io.RawIOBase):
    """Decompresses a file of zstd frames. A file that ends inside a frame is an error; zstandard's reader just stops.

    Args:
        file: The compressed bytes.

    Raises:
        EOFError: While reading, if the file is cut off.
        zstandard.ZstdError: While reading, if the file is damaged.
    """

    FEED = 1 << 12  # compressed bytes read at once; at zstd's largest ratio they become 128 MiB

    def __init__(self, file: IO[bytes]) -> None:
        self.file, self.ready, self.left = file, memoryview(b""), b""
        self.frame: zstandard.ZstdDecompressionObj | None = None

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

"""Files on this machine or at a URL, opened by fsspec and decompressed according to the file extension."""

import contextlib
import gzip
import io
from collections.abc import Iterator
from typing import IO, Any, cast

import fsspec
import zstandard

from kerple.base.errors import UserError

PROTOCOLS = {"file", "http", "https", "s3", "s3a", "gs", "gcs", "az", "abfs", "memory", "hf"}


def is_remote(path: str) -> bool:
    """Whether a path is a URL, and not a file on this machine."""
    return "://" in path and not path.startswith("file://")


def without_query(path: str) -> str:
    """Remove the query and the fragment of a web address, so that it ends with the name of its file."""
    return path.partition("?")[0].partition("#")[0] if path.startswith(("http://", "https://")) else path


def filesystem(path: str) -> tuple[Any, str]:
    """The fsspec file system of a path or URL, and the path within it.

    Raises:
        UserError: The URL contains ``::``, has an unsupported protocol (some protocols run programs), or needs a
            package that is not installed.
    """
    protocol = path.partition("://")[0] if "://" in path else "file"
    if protocol not in PROTOCOLS or "::" in path:
        raise UserError(f"{path}: expected a local path, or a URL without :: of {', '.join(sorted(PROTOCOLS))}")
    try:
        return cast("tuple[Any, str]", fsspec.core.url_to_fs(path))
    except ImportError as error:
        raise UserError(f"{path}: {error}") from error


@contextlib.contextmanager
def open_bytes(path: str) -> Iterator[IO[bytes]]:
    """Open a local or remote file to read its bytes; the context closes it.

    Raises:
        UserError: The file does not exist or cannot be read.
    """
    system, inner = filesystem(path)
    try:
        file = system.open(inner, "rb")
    except Exception as error:  # each file system raises other errors
        raise UserError(f"{path}: cannot be read ({error!r})") from error
    with file:
        yield file


def decompress(file: IO[bytes], name: str) -> IO[bytes]:
    """Decompress a file whose name ends in .zst (any number of frames), .gz or .tgz; return other files unchanged.

    Reading a truncated or damaged file raises an error of the decompressing library.
    """
    if without_query(name).endswith(".zst"):
        return cast("IO[bytes]", io.BufferedReader(_ZstdFrames(file), 1 << 20))
    if without_query(name).endswith((".gz", ".tgz")):
        return cast("IO[bytes]", gzip.GzipFile(fileobj=file))
    return file


class _ZstdFrames(io.RawIOBase):
    """The decompressed content of a file of zstd frames.

    zstandard's reader accepts a file that ends inside a frame, such as an incomplete download. This one raises an
    EOFError.
    """

    def __init__(self, file: IO[bytes]) -> None:
        self.file, self.content, self.compressed = file, b"", b""
        self.frame: Any = None  # the decompressor of an unfinished frame

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        while not self.content:
            self.compressed = self.compressed or self.file.read(1 << 16)
            if not self.compressed:
                if self.frame is not None:
                    raise EOFError("the file ends inside a compressed frame")
                return 0
            self.frame = self.frame or zstandard.ZstdDecompressor().decompressobj()
            self.content, self.compressed = self.frame.decompress(self.compressed), self.frame.unused_data
            self.frame = None if self.frame.eof else self.frame
        count = min(len(buffer), len(self.content))
        buffer[:count], self.content = self.content[:count], self.content[count:]
        return count

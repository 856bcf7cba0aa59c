"""Opening of the files of a corpus by fsspec, at a path or URL, and decompression according to the file extension."""

import gzip
import io
from typing import IO, Any, cast

import fsspec
import zstandard

from kerple.base.errors import UserError

PROTOCOLS = {"file", "http", "https", "s3", "s3a", "gs", "gcs", "az", "abfs", "memory", "hf"}


def is_remote(path: str) -> bool:
    """Return whether a path is a URL other than ``file://…``, which is a file on this machine."""
    return "://" in path and not path.startswith("file://")


def without_query(path: str) -> str:
    """Return a web address without its query and fragment, so that it ends with the file extension.

    Other paths are returned unchanged.
    """
    return path.partition("?")[0].partition("#")[0] if path.startswith(("http://", "https://")) else path


def has_extension(path: str, extensions: str | tuple[str, ...]) -> bool:
    """Return whether a path or URL ends with an extension, in lower or upper case."""
    return without_query(path).lower().endswith(extensions)


def filesystem(path: str) -> tuple[Any, str]:
    """Return the fsspec file system of a path or URL, and the path within it.

    Raises:
        UserError: The protocol of the URL is not in `PROTOCOLS`, or needs a package that is not installed. Also if the
            URL contains ``::``, with which fsspec combines several protocols. Protocols that run programs are not in
            `PROTOCOLS`.
    """
    protocol = path.partition("://")[0] if "://" in path else "file"
    if protocol not in PROTOCOLS or "::" in path:
        expected = f"a local path, or a URL without `::` and with one of the protocols {', '.join(sorted(PROTOCOLS))}"
        raise UserError(f"data.corpus: got {path}, expected {expected}")
    try:
        return cast("tuple[Any, str]", fsspec.core.url_to_fs(path))
    except ImportError as error:
        raise UserError(f"data.corpus: got {path}, which needs a package that is not installed: {error}") from error


def open_bytes(path: str) -> IO[bytes]:
    """Open the file at a path or URL to read its bytes.

    Raises:
        UserError: The file does not exist or cannot be read.
    """
    system, inner = filesystem(path)
    try:
        return cast("IO[bytes]", system.open(inner, "rb"))
    except Exception as error:  # each file system raises other errors
        raise UserError(f"data.corpus: {path} cannot be read ({error!r}); check its address and permissions") from error


def decompress(file: IO[bytes], name: str) -> IO[bytes]:
    """Return a file object that reads the decompressed content of a .zst, .gz or .tgz file.

    A .zst file may have several frames. A file whose name has another extension is returned unchanged. Reading a
    truncated or damaged file raises EOFError or an error of the decompressing library.
    """
    if has_extension(name, ".zst"):
        return cast("IO[bytes]", io.BufferedReader(_ZstdFrames(file), 1 << 20))
    if has_extension(name, (".gz", ".tgz")):
        return cast("IO[bytes]", gzip.GzipFile(fileobj=file))
    return file


class _ZstdFrames(io.RawIOBase):
    """The decompressed content of a file of zstd frames.

    The reader of the zstandard package accepts a file that ends inside a frame, such as an incomplete download. This
    class raises an EOFError for it.
    """

    def __init__(self, file: IO[bytes]) -> None:
        self.file = file
        self.compressed = self.content = b""  # bytes that are not yet decompressed, and bytes that are not yet read
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

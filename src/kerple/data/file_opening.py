"""Listing and opening of the files of a corpus, at paths or URLs, and decompression according to their extensions."""

import glob
import gzip
import hashlib
import io
import os
from collections.abc import Iterable, Iterator
from contextlib import suppress
from itertools import filterfalse
from pathlib import Path
from typing import IO, Any, cast

import fsspec
import zstandard
from braceexpand import braceexpand

from kerple.base.errors import UserError

PACKED = ("", ".zst", ".gz")
LINES = tuple(f".{kind}{packed}" for kind in ("jsonl", "ndjson") for packed in PACKED)
JSON = tuple(f".json{packed}" for packed in PACKED)  # JSON lines, as in C4 and Dolma, or one document
SAMPLE_TEXTS = tuple(f".{kind}{packed}" for kind in ("txt", "text") for packed in PACKED)
TARS = (".tar", ".tar.gz", ".tgz", ".tar.zst")
PARQUET = ".parquet"
CONTAINERS = (*LINES, *TARS, PARQUET)  # extensions of files with several documents; other files are text files
PROTOCOLS = {"file", "http", "https", "s3", "s3a", "gs", "gcs", "az", "abfs", "memory", "hf"}


def is_remote(path: str) -> bool:
    """Return whether a path is a URL other than ``file://…``, which is a file on this machine."""
    return "://" in path and not path.startswith("file://")


def without_query(path: str) -> str:
    """Return a web address without its query and fragment, so that it ends with the file extension.

    Other paths are returned unchanged.
    """
    return path.partition("?")[0].partition("#")[0] if path.startswith(("http://", "https://")) else path


def hide_query(path: str) -> str:
    """Return a web address with a hash in place of its query and fragment, which may contain a secret.

    Other paths are returned unchanged.
    """
    address = without_query(path)
    return path if address == path else f"{address}?{hashlib.sha256(os.fsencode(path)).hexdigest()[:8]}"


def has_extension(path: str, extensions: str | tuple[str, ...]) -> bool:
    """Return whether a path or URL ends with an extension, in lower or upper case."""
    return without_query(path).lower().endswith(extensions)


def filesystem(path: str, option: str = "data.corpus", **options: Any) -> tuple[Any, str]:
    """Return the fsspec file system of a path or URL, and the path within it.

    Args:
        path: The path or URL.
        option: Name of its option in messages.
        **options: Options of the file system.

    Raises:
        UserError: The protocol of the URL is not in `PROTOCOLS`, or needs a package that is not installed. Also if the
            URL contains ``::``, with which fsspec combines several protocols. Protocols that run programs are not in
            `PROTOCOLS`.
    """
    protocol = path.partition("://")[0] if "://" in path else "file"
    if protocol not in PROTOCOLS or "::" in path:
        expected = f"a local path, or a URL without `::` and with one of the protocols {', '.join(sorted(PROTOCOLS))}"
        raise UserError(f"{option}: got {path}, expected {expected}")
    try:
        return cast("tuple[Any, str]", fsspec.core.url_to_fs(path, **options))
    except ImportError as error:
        raise UserError(f"{option}: got {path}, which needs a package that is not installed: {error}") from error


def list_files(corpus: str) -> list[str]:
    """Return the sorted paths or URLs of the files of a corpus.

    They are the files in a folder and its subfolders, the files that match a pattern, or a single file. Files and
    folders whose names begin with a dot are left out. In a folder, symbolic links to other folders are not followed.

    Args:
        corpus: Path or URL of a file or folder, or a glob pattern. ``{a,b}`` in a pattern stands for a and b.

    Raises:
        UserError: A folder cannot be read, a link leads out of the folder (for a pattern: out of the last folder named
            before the first ``*``, ``?`` or ``[``), or a file is not a regular file.
    """
    root = corpus.removeprefix("file://")
    patterns = [corpus]
    with suppress(ValueError):  # unbalanced braces are part of a name
        patterns = [corpus] if os.path.lexists(root) else [*braceexpand(corpus, escape=False)]
    if patterns != [corpus]:
        return sorted({path for pattern in patterns for path in list_files(pattern)})
    if not is_remote(corpus):
        if os.path.isdir(root):
            paths = _check_links(root, _walk(root))
        elif os.path.lexists(root):  # checked before patterns, because a file's name may contain * ? or [
            paths = [root]
        else:
            found = (path for path in glob.glob(root, recursive=True) if not os.path.isdir(path))
            paths = _check_links(os.path.dirname(root.partition("*")[0].partition("?")[0].partition("[")[0]), found)
        for path in filterfalse(os.path.isfile, paths):  # reading a FIFO or a device may never end
            raise UserError(f"data.corpus: {path} is not a regular file; remove it from the corpus")
        return sorted(paths)
    system, inner = filesystem(corpus)
    pattern = any(mark in without_query(corpus) for mark in "*?[")
    if not pattern and has_extension(corpus, (*CONTAINERS, *JSON)):
        return [corpus]  # most web servers cannot list folders, so that `find` fails
    try:
        entries = system.glob(inner, detail=True) if pattern else system.find(inner, detail=True)
    except Exception as error:  # each file system raises other errors
        raise UserError(f"data.corpus: {corpus} cannot be read ({error!r}); check its address") from error
    files = [path for path, entry in entries.items() if entry.get("type") != "directory"]
    # the index of a folder on a web server may link to itself, sorted in another order, by a query
    paths = [path for path in files if path in (inner, without_query(path))]
    root_length = len(inner.rpartition("/")[0]) if pattern else len(inner)  # folders above the corpus may be hidden
    return [system.unstrip_protocol(path) for path in sorted(paths) if "/." not in f"/{path[root_length:]}"]


def _walk(root: str) -> Iterator[str]:
    """Yield the paths of the files in a folder and its subfolders, except hidden ones."""

    def refuse(error: OSError) -> None:
        given = f"{error.filename} cannot be read ({error.strerror})"
        raise UserError(f"data.corpus: {given}; make it readable, or move it away") from error

    for folder, subfolders, names in os.walk(root, onerror=refuse):
        subfolders[:] = [name for name in subfolders if not name.startswith(".")]  # os.walk skips the removed ones
        _check_links(root, (os.path.join(folder, name) for name in subfolders))
        yield from (os.path.join(folder, name) for name in names if not name.startswith("."))


def _check_links(root: str, paths: Iterable[str]) -> list[str]:
    """Return the paths, after checking that neither they nor their folders are links to places outside ``root``."""
    paths = list(paths)
    target = Path(root).resolve()
    for path in {os.path.dirname(path) for path in paths} | set(filter(os.path.islink, paths)):
        if not Path(path).resolve().is_relative_to(target):
            raise UserError(f"data.corpus: {path} is a link out of {root}; copy its target into the corpus")
    return paths


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

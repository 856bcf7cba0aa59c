"""Corpora as sequences of raw documents, each of which has a place to resume from.

A corpus is a list of sources in a fixed order, and a source is a sequence of records. A record is the raw bytes of one
document. Workers parse it (`encode`), because parsing takes as much time as one core has.
"""

import random
import sysconfig
import tarfile
from abc import ABC, abstractmethod
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Self

from kerple.data.files import check_protocol, decompress, filesystem, is_remote, open_bytes
from kerple.errors import UserError

STANDARD_LIBRARY = "stdlib"
LIBRARY_MODULES = "modules"
HUB = "hf:"
LINE_ENDINGS = (".jsonl", ".ndjson", ".jsonl.zst", ".jsonl.gz", ".ndjson.zst", ".ndjson.gz")
TAR_ENDINGS = (".tar", ".tar.gz", ".tgz", ".tar.zst")
PARQUET_ENDINGS = (".parquet",)
DATA_ENDINGS = LINE_ENDINGS + TAR_ENDINGS + PARQUET_ENDINGS
CHUNK = 1 << 20  # bytes read at once

Place = tuple[int, int]  # number of a member of an archive (0 outside one), and of the records before in that member


@dataclass(frozen=True)
class Record:
    """One document before parsing.

    Args:
        raw: A line of JSON if `json`, else UTF-8 text. It is empty if the record has a `fault`.
        name: File and line, for messages.
        next: The place after this record.
        json: Whether `raw` is JSON.
        consumed: Bytes of the source that were read so far, before decompression; the progress bar shows them.
        fault: Why the record could not be read, or None.
        lost: Number of bytes that the fault costs. A file that breaks off counts as a whole, because it is not known
            how much is missing.
    """

    raw: bytes
    name: str
    next: Place
    json: bool
    consumed: int
    fault: str | None = None
    lost: int = 0


class Source(ABC):
    """A sequence of records in a fixed order: a file, a folder of texts, a remote dataset.

    Args:
        name: What messages call it.
        paths: Its files.
        size: Bytes of the files, before decompression; None if that is unknown.
    """

    def __init__(self, name: str, paths: list[str], size: int | None) -> None:
        self.name, self.paths, self.size = name, paths, size

    @abstractmethod
    def records(self, start: Place, limit: int) -> Iterator[Record]:
        """Yield the records from the place `start` on. One of more than `limit` bytes becomes a record with a fault.

        Raises:
            UserError: The source cannot be read at all.
        """


class TextFiles(Source):
    """Files of which each is one document.

    Args:
        name: What messages call them.
        paths: The files.
        sizes: Bytes of each file.
    """

    def __init__(self, name: str, paths: list[str], sizes: list[int]) -> None:
        super().__init__(name, paths, sum(sizes))
        self.sizes = sizes

    def records(self, start: Place, limit: int) -> Iterator[Record]:
        consumed = sum(self.sizes[: start[1]])
        for number in range(start[1], len(self.paths)):
            path = self.paths[number]
            with open_bytes(path) as file:
                try:
                    raw, fault = decompress(file, path).read(limit + 1), None
                except UserError:
                    raise
                except Exception as error:  # gzip, zlib and zstandard each raise kinds of their own
                    raw, fault = b"", f"damaged file: {error}"
            consumed += self.sizes[number]
            fault = f"more than {limit} bytes" if len(raw) > limit else fault
            lost = max(len(raw), self.sizes[number]) if fault else 0
            yield Record(b"" if fault else raw, path, (0, number + 1), False, consumed, fault, lost)


class JsonLines(Source):
    """A file with one JSON object per line: .jsonl, which may be compressed as .zst or .gz."""

    def records(self, start: Place, limit: int) -> Iterator[Record]:
        with open_bytes(self.name) as file:
            yield from lines(decompress(file, self.name), self.name, 0, start[1], limit, file, self.size or 0)


END = tarfile.EOFHeaderError  # type: ignore[attr-defined]  # what tarfile makes of the zeros at the end


class _Header(tarfile.TarInfo):
    """A tar header that fails if it is damaged; tarfile takes a damaged header for the end of the archive."""

    @classmethod
    def fromtarfile(cls, archive: tarfile.TarFile) -> Self:
        try:
            return super().fromtarfile(archive)
        except tarfile.HeaderError as error:
            if archive.offset and not isinstance(error, END):
                raise tarfile.ReadError(f"{error} at byte {archive.offset}") from error
            raise


class Tar(Source):
    """A tar file of JSON lines and text files, read in one pass. Members other than regular files are passed over."""

    def records(self, start: Place, limit: int) -> Iterator[Record]:
        with open_bytes(self.name) as file:
            outer = self.name.replace(".tgz", ".tar.gz")
            try:
                with tarfile.open(fileobj=decompress(file, outer), mode="r|", tarinfo=_Header) as archive:
                    for number, member in enumerate(archive):
                        if number >= start[0] and member.isreg() and (content := archive.extractfile(member)):
                            skip = start[1] if number == start[0] else 0
                            yield from self._member(member, content, number, skip, limit, file)
            except UserError:
                raise
            except Exception as error:  # tarfile and each kind of compression raise errors of their own
                raise UserError(f"{self.name}: is not a tar file that can be read to its end ({error})") from error

    def _member(
        self, member: tarfile.TarInfo, content: IO[bytes], number: int, skip: int, limit: int, file: IO[bytes]
    ) -> Iterator[Record]:
        name = f"{self.name}: {member.name}"
        if member.name.endswith(LINE_ENDINGS):
            yield from lines(decompress(content, member.name), name, number, skip, limit, file, member.size)
        elif not skip:
            fault = f"more than {limit} bytes" if member.size > limit else None
            raw = b"" if fault else content.read()
            yield Record(raw, name, (number, 1), False, file.tell(), fault, member.size if fault else 0)


def lines(
    content: IO[bytes], name: str, member: int, skip: int, limit: int, file: IO[bytes], size: int
) -> Iterator[Record]:
    """Yield a record for each line of JSON lines, without ever holding a line of more than `limit` bytes.

    Args:
        content: The decompressed bytes. If they break off (a damaged frame, an early end), one last record says so.
        name: What messages call the file.
        member: Number of the file in its archive.
        skip: Number of lines to leave out at the beginning.
        limit: Largest number of bytes in a line.
        file: The file before decompression, whose position is the progress.
        size: Bytes of the compressed file.
    """
    number, pieces, length, read = 0, list[bytes](), 0, 0

    def record() -> Record:
        fault = f"more than {limit} bytes" if length > limit else None
        raw = b"" if fault else b"".join(pieces)
        return Record(raw, f"{name}:{number}", (member, number), True, file.tell(), fault, length if fault else 0)

    while True:
        try:
            chunk = content.read(CHUNK)
        except UserError:
            raise
        except Exception as error:  # gzip, zlib and zstandard each raise kinds of their own
            if number >= skip:
                fault, lost = f"damaged file: {error}", max(read, size)
                yield Record(b"", f"{name}:{number + 1}", (member, number + 1), True, file.tell(), fault, lost)
            return
        if not chunk:
            break
        read += len(chunk)
        first, *rest = chunk.split(b"\n")
        length += len(first)
        if length <= limit:
            pieces.append(first)
        else:
            pieces.clear()
        for line in rest:
            number += 1
            if number > skip:
                yield record()
            pieces, length = [line] if len(line) <= limit else [], len(line)
    if length:
        number += 1
        if number > skip:
            yield record()


def sources(corpus: str, text_field: str = "text") -> list[Source]:
    """List the sources of a corpus in the order in which they are read.

    Args:
        corpus: `stdlib`, `modules`, `packages`, `hf:NAME[:CONFIG[:SPLIT]]` (a Hugging Face dataset, which is streamed),
            or a file, folder, glob pattern or URL. Files may be JSON lines (.jsonl, .jsonl.zst, .jsonl.gz), tar files
            of those, or Parquet. If none of the files is of these kinds, each is one document.
        text_field: Column of Parquet files and Hugging Face datasets that holds the text.

    Raises:
        UserError: The corpus has no files.
    """
    if corpus == STANDARD_LIBRARY:
        return [standard_library()]
    if corpus == LIBRARY_MODULES:
        return [top_modules()]
    if corpus == "packages":
        from kerple.data.prepare.packages import installed_packages

        return [installed_packages()]
    if corpus.startswith(HUB):
        from kerple.data.prepare.record_tables import HubDataset

        return [HubDataset(corpus.removeprefix(HUB), text_field)]
    files = _files(corpus)
    if not files:
        raise UserError(
            f"data.corpus: {corpus!r} holds no files; expected {STANDARD_LIBRARY!r}, {LIBRARY_MODULES!r}, 'packages', "
            "a file, a folder, a URL or hf:NAME"
        )
    if not any(path.endswith(DATA_ENDINGS) for path, _ in files):
        return [TextFiles(corpus, [path for path, _ in files], [size or 0 for _, size in files])]
    found: list[Source] = []
    for path, size in files:
        if path.endswith(LINE_ENDINGS):
            found.append(JsonLines(path, [path], size))
        elif path.endswith(TAR_ENDINGS):
            found.append(Tar(path, [path], size))
        elif path.endswith(PARQUET_ENDINGS):
            from kerple.data.prepare.record_tables import Parquet

            found.append(Parquet(path, size, text_field))
    return found


def standard_library(seed: int = 0) -> TextFiles:
    """The .py files of the running Python's standard library: about 30 MB of source code that every machine has.

    The files are sorted, then shuffled by `seed`, so that files of one package are not neighbours in the token stream.
    """
    root = Path(sysconfig.get_paths()["stdlib"])
    beside = {"site-packages", "dist-packages", "__pycache__"}
    paths = sorted(p for p in root.rglob("*.py") if p.is_file() and not beside & set(p.relative_to(root).parts))
    random.Random(seed).shuffle(paths)
    return TextFiles(STANDARD_LIBRARY, [str(p) for p in paths], [p.stat().st_size for p in paths])


def top_modules() -> TextFiles:
    """The modules at the top of the standard library (`argparse.py`) in alphabetical order, about 5 MB: a text whose
    beginning does not depend on hashes or seeds."""
    root = Path(sysconfig.get_paths()["stdlib"])
    paths = sorted(root.glob("*.py"))
    return TextFiles(LIBRARY_MODULES, [str(p) for p in paths], [p.stat().st_size for p in paths])


def _files(corpus: str) -> list[tuple[str, int | None]]:
    """Paths and sizes of the files in a folder, of those that match a pattern, or of one file.

    They are sorted, and hidden files are left out. A size is None if it is unknown.
    """
    check_protocol(corpus)
    if is_remote(corpus) and not any(mark in corpus for mark in "*?[") and corpus.endswith(DATA_ENDINGS):
        return [(corpus, None)]  # web servers seldom list folders, so a single file is not looked for
    system, root = filesystem(corpus)
    if any(mark in corpus for mark in "*?["):
        found = system.glob(root, detail=True)
    elif system.isdir(root):
        found = system.find(root, detail=True)
    elif system.exists(root):
        found = {root: system.info(root)}
    else:
        found = {}
    result = []
    for path in sorted(found):
        below = path.removeprefix(root).lstrip("/") if not any(mark in corpus for mark in "*?[") else Path(path).name
        if found[path].get("type") == "file" and not any(part.startswith(".") for part in below.split("/")):
            url = system.unstrip_protocol(path) if is_remote(corpus) else path
            result.append((url, found[path].get("size")))
    return result

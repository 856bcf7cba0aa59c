"""Sources of documents: text files, JSON lines, and tar files of both, each with a place to resume from.

A source is a sequence of records, and a record is the raw bytes of one document. Workers parse it (`encode`), because
parsing takes as much time as one core has.
"""

import tarfile
from abc import ABC, abstractmethod
from collections.abc import Iterator
from dataclasses import dataclass
from typing import IO, Self

from kerple.base.errors import UserError
from kerple.data.files import bare, decompress, open_bytes

LINE_ENDINGS = (".jsonl", ".ndjson", ".jsonl.zst", ".jsonl.gz", ".ndjson.zst", ".ndjson.gz")
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
            outer = bare(self.name).replace(".tgz", ".tar.gz")
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
        if member.issparse():  # a few bytes of which may claim any size, and are read as so many zeros
            if not skip:
                yield Record(b"", name, (number, 1), False, file.tell(), "sparse file", member.size)
        elif member.name.endswith(LINE_ENDINGS):
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

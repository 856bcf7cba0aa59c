"""Readers of documents: text files, JSON lines, tar files of both, Parquet files and Hugging Face datasets.

A reader yields a `Document`, or a `Fault` for a document that cannot be used. It raises a UserError for a file that
cannot be opened.
"""

import codecs
import io
import json
import os
import tarfile
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from itertools import chain, groupby
from pathlib import Path
from typing import IO, Any, cast

import numpy as np

from kerple.base.errors import UserError
from kerple.data.file_opening import (
    CONTAINERS,
    JSON,
    LINES,
    PACKED,
    PARQUET,
    SAMPLE_TEXTS,
    TARS,
    decompress,
    has_extension,
    is_remote,
    open_bytes,
    without_query,
)

MARKS = (codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE, codecs.BOM_UTF32_BE)  # that of UTF-32 LE begins like the first one
IDS = ".npy"  # extension of token ids in a tar file
PACKED_IDS = tuple(f"{IDS}{packed}" for packed in PACKED)
LONGEST_LINE = 1 << 26  # bytes that are read to find out whether the first line of a file is JSON


@dataclass(frozen=True)
class Document:
    """A document of a corpus.

    Args:
        name: Name of the document in messages, such as its file and line.
        text: The text; empty if the document consists of token ids, until `CorpusReader` decodes them.
        group: Name of a group of related documents, such as the files of a package; empty if there is none.
        split: ``train``, ``validation`` or ``test``; empty if a hash of the group or the text determines the split.
        ids: Token ids of the tokenizer ``data.tokenizer``; empty for a document that is to be tokenised.
    """

    name: str
    text: str
    group: str = ""
    split: str = ""
    ids: tuple[int, ...] = ()


@dataclass(frozen=True)
class Fault:
    """A document that cannot be used.

    Args:
        name: Name of the document in messages.
        reason: The reason in a few words. `CorpusReader.lost_bytes` does not count documents with the reason ``empty``.
        bytes: Number of bytes of the document; for a damaged file, those read from it; for a generated file, 0.
        details: Details for the message.
    """

    name: str
    reason: str
    bytes: int
    details: str = ""


def read_files(paths: list[str], text_field: str, encoding: str = "utf-8") -> Iterator[Document | Fault]:
    """Yield the documents of text files (one document each), and of JSON lines, tar files and Parquet files.

    The extensions of `CONTAINERS` have several documents. A .json file has JSON lines (`is_json_lines`) or is a text.

    Args:
        paths: Paths or URLs of the files, which may be compressed.
        text_field: Key of the text in JSON lines, or name of its column in Parquet files.
        encoding: Encodings of text files, see `ShardOptions.encoding`.

    Raises:
        UserError: Two files may have the same text (`_refuse_copies`), or a file cannot be read.
    """
    containers = {path for path in paths if has_extension(path, CONTAINERS) or _has_json_lines(path, text_field)}
    _refuse_copies([path for path in paths if path not in containers], sorted(containers))
    for path in paths:
        if path not in containers:
            yield read_text(path, encoding)
        elif has_extension(path, PARQUET):
            yield from read_parquet(path, text_field)
        else:
            name = without_query(path)  # names are written to the folder of the shards
            with open_bytes(path) as file:
                content = decompress(file, name)
                if has_extension(name, TARS):
                    yield from read_tar(content, name, text_field, encoding)
                else:
                    yield from read_lines(content, name, text_field)


def _refuse_copies(texts: Iterable[str], containers: Iterable[str], archive: str = "") -> None:
    """Raise a UserError if a text file is beside its compressed copy, or a container has the name of another file.

    Args:
        texts: Paths of text files.
        containers: Paths of files with several documents.
        archive: Path of the tar file with these files; empty for files on the disk.
    """
    place, packed, stems = f" in {archive}" if archive else "", dict[str, str](), dict[str, str]()
    for path in texts:  # gzip -k and zstd keep the file
        if (other := packed.setdefault(_uncompressed(path), path)) != path:
            given = f"got {other} and {path}{place}, which may have the same text"
            raise UserError(f"data.corpus: {given}; remove one")
        stems[_stem(path)] = path
    for path in containers:
        if (other := stems.setdefault(_stem(path), path)) != path:
            given = f"got {other} and {path}{place}, which may have the same text"
            pattern = os.path.join(os.path.dirname(path), "*" + "".join(Path(without_query(path)).suffixes))
            advice = "" if archive else f", or give a pattern, such as '{pattern}'"
            raise UserError(f"data.corpus: {given}; rename or remove one{advice}")


def _stem(path: str) -> str:
    """Return a path without its extension and that of its compression."""
    return os.path.splitext(_uncompressed(path))[0]


def _uncompressed(path: str) -> str:
    """Return a path without the extension of its compression."""
    path = without_query(path)
    return os.path.splitext(path)[0] if has_extension(path, (".gz", ".zst")) else path


def read_text(path: str, encoding: str) -> Document | Fault:
    """Return the document in a text file, which may be compressed."""
    name = without_query(path)
    with open_bytes(path) as file:
        try:
            return as_document(decompress(file, name).read(), name, encoding)
        except Exception as error:  # gzip, zlib and zstandard raise different errors
            return _damaged_file(name, file.tell(), error)


def _has_json_lines(path: str, text_field: str, content: bytes | None = None) -> bool:
    """Return whether a file is named .json, which may be compressed, and has JSON lines.

    Args:
        path: Path of the file, or name of a member of a tar file.
        text_field: Key of the text.
        content: Bytes of the member; None to read the file.
    """
    if not has_extension(path, JSON):
        return False
    with open_bytes(path) if content is None else io.BytesIO(content) as file:
        try:
            return is_json_lines(decompress(file, path), text_field)
        except Exception:  # a damaged file is reported when it is read
            return False


def is_json_lines(file: IO[bytes], text_field: str) -> bool:
    """Return whether a file has JSON lines: its first line is a JSON object with a text, or its first two are objects.

    A JSON document of several lines, and a document without ``text_field``, such as a configuration, is not.
    """
    entries = list[Any]()
    for line in (file.readline(LONGEST_LINE), file.readline(LONGEST_LINE)):
        try:
            entries.append(json.loads(line))
        except (ValueError, RecursionError):
            break
    first, *second = (isinstance(entry, dict) for entry in entries or [None])
    return first and (second == [True] or isinstance(entries[0].get(text_field), str))


def _damaged_file(name: str, size: int, error: Exception) -> Fault:
    """Return the fault of a file of which ``size`` bytes were read before an error.

    Raises:
        UserError: The file is at a URL, so that the network may be the reason, or a document does not fit into memory.
    """
    if isinstance(error, MemoryError):
        raise UserError(f"data.corpus: {name} does not fit into memory; split it into smaller documents") from error
    if is_remote(name):
        raise UserError(f"data.corpus: {name} cannot be read to its end ({error!r}); run the command again") from error
    return Fault(name, "damaged file", max(size, 1), f"{error}")


def as_document(content: bytes | Any, name: str, encoding: str = "utf-8") -> Document | Fault:
    """Return the document with this content; return a fault for other content.

    Args:
        content: A string, or bytes in the first of the encodings in which they can be read.
        name: Name of the document.
        encoding: Names of encodings, separated by commas.
    """
    if not isinstance(content, bytes | str):
        return Fault(name, "no text", 0)
    try:
        text = content if isinstance(content, str) else _decode(content, encoding.split(","))
        text = text.removeprefix("\ufeff")  # byte order mark, with which Windows begins UTF-8 files
        size = len(text.encode())  # an error if the string has half a surrogate pair
    except UnicodeError:
        advice = f"it is not {encoding}; set data.encoding" if isinstance(content, bytes) else ""
        if has_extension(name, PACKED_IDS):
            advice = "token ids are only read from .npy files inside a tar file, not from compressed ones; repack them"
        return Fault(name, "not Unicode", len(content), advice)
    return Document(name, text) if text.strip() else Fault(name, "empty", size)


def _decode(content: bytes, encodings: list[str]) -> str:
    """Return the text of bytes in the first of the encodings in which they can be read, or raise a UnicodeError."""
    marked, nulls = content.startswith(MARKS), content.count(0)
    for encoding in encodings:
        name, is_last = codecs.lookup(encoding).name, encoding == encodings[-1]
        # without its mark, most text of another encoding with an even number of bytes can be read as UTF-16
        if name in ("utf-16", "utf-32") and not (marked or is_last):
            continue
        # no text of an encoding such as latin-1 has null characters, but latin-1 can read binary files; and many null
        # characters in UTF-8 are UTF-16 without its mark
        allowed = len(content) // 10 if name.startswith("utf-8") else 0
        if nulls > allowed and not name.startswith(("utf-16", "utf-32")):
            continue
        with suppress(UnicodeError):
            return content.decode(encoding)
    raise UnicodeError


def as_ids(content: bytes, name: str) -> Document | Fault:
    """Return the document of a .npy file with token ids, (n,) integers. Pickled objects are not read."""
    try:
        ids = np.lib.format.read_array(io.BytesIO(content), allow_pickle=False)
    except Exception as error:  # NumPy evaluates the header, and reserves the memory that it declares
        return Fault(name, "damaged file", len(content), str(error))
    if ids.ndim != 1 or not np.issubdtype(ids.dtype, np.integer) or (len(ids) and ids.min() < 0):
        return Fault(name, "no token ids", len(content), f"{ids.dtype} of shape {ids.shape}")
    return Document(name, "", ids=tuple(ids.tolist())) if len(ids) else Fault(name, "empty", 0)


def read_lines(file: IO[bytes], name: str, text_field: str) -> Iterator[Document | Fault]:
    """Yield the document in each line. A line is a JSON object. If the file is damaged, the last item is a fault."""
    number = size = 0
    try:
        for number, line in enumerate(file, 1):
            size += len(line)
            yield _from_json(line, f"{name}:{number}", text_field)
    except Exception as error:  # gzip, zlib and zstandard raise different errors
        yield _damaged_file(f"{name}:{number + 1}", size, error)


def _from_json(line: bytes, name: str, text_field: str) -> Document | Fault:
    """Return the document of a line of JSON."""
    if not line.strip():
        return Fault(name, "empty", 0)
    try:
        entry = json.loads(line)
    except (ValueError, RecursionError):
        return Fault(name, "broken JSON", len(line))
    text = entry.get(text_field) if isinstance(entry, dict) else None
    if not isinstance(text, str):
        keys = f"the keys are {', '.join(entry)}" if isinstance(entry, dict) else "it is not an object"
        return Fault(name, "no text", len(line), f"{text_field!r} is not a string; {keys[:200]}")
    return as_document(text, name)


def read_tar(file: IO[bytes], name: str, text_field: str, encoding: str = "utf-8") -> Iterator[Document | Fault]:
    """Yield the documents of the members of a tar file: JSON lines and text files, which may be compressed.

    Consecutive members whose names differ only in their extensions are a sample of WebDataset. If one of them is a
    .txt or .text file, the others, such as .json files, are its metadata and are left out. Without a text, .npy files
    with token ids take its place, and without these, .json files with JSON lines. A .jsonl or .ndjson file is never
    metadata.

    Members are not extracted to the disk. Members that are not regular files, such as links, are skipped.

    Raises:
        UserError: The file cannot be read to its end, has two members of one name, or two of a sample that may have the
            same text (`_refuse_copies`).
    """
    names = set[str]()
    try:
        with tarfile.open(fileobj=file, mode="r|") as archive:
            for _, members in groupby(filter(tarfile.TarInfo.isreg, archive), _sample):
                sample, lines = list[tuple[str, bytes]](), list[str]()
                for member in members:
                    if member.name in names:
                        raise UserError(f"data.corpus: got {member.name} twice in {name}; remove one")
                    names.add(member.name)
                    content = cast("IO[bytes]", archive.extractfile(member))
                    if has_extension(member.name, LINES):
                        lines.append(member.name)
                        yield from read_lines(decompress(content, member.name), f"{name}: {member.name}", text_field)
                    else:
                        sample.append((member.name, content.read()))
                yield from _read_sample(sample, lines, name, text_field, encoding)
    except (UserError, MemoryError):
        raise
    except Exception as error:  # tarfile and the decompressing libraries raise different errors
        raise UserError(f"data.corpus: {name} cannot be read as a tar file to its end ({error}); repair it") from error


def _sample(member: tarfile.TarInfo) -> str:
    """Return the name of a member without its extensions, which all members of a sample of WebDataset share."""
    folder, _, base = member.name.rpartition("/")
    return f"{folder}/{base.partition('.')[0]}"


def _read_sample(
    sample: list[tuple[str, bytes]], lines: list[str], name: str, text_field: str, encoding: str
) -> Iterator[Document | Fault]:
    """Yield the documents of members of a tar file, which are given as names and contents, and belong to one sample.

    ``lines`` has the names of its .jsonl and .ndjson files, which are read already.
    """
    candidates = [[member for member, _ in sample if has_extension(member, kind)] for kind in (SAMPLE_TEXTS, IDS)]
    candidates.append([member for member, packed in sample if _has_json_lines(member, text_field, packed)])
    texts = next(filter(None, candidates), [member for member, _ in sample])
    _refuse_copies(texts, lines, name)
    for member, packed in sample:
        if member not in texts:
            yield Fault(f"{name}: {member}", "metadata", 0, f"its name is that of {texts[0]}, which has the text")
            continue
        if has_extension(member, TARS):
            yield Fault(f"{name}: {member}", "tar file inside a tar file", len(packed))
            continue
        try:
            content = decompress(io.BytesIO(packed), member).read()
        except Exception as error:  # gzip, zlib and zstandard raise different errors
            yield _damaged_file(f"{name}: {member}", len(packed), error)
            continue
        if has_extension(member, IDS):
            yield as_ids(content, f"{name}: {member}")
        elif has_extension(member, JSON) and is_json_lines(io.BytesIO(content), text_field):
            yield from read_lines(io.BytesIO(content), f"{name}: {member}", text_field)
        else:
            yield as_document(content, f"{name}: {member}", encoding)


def read_parquet(path: str, text_field: str) -> Iterator[Document | Fault]:
    """Yield the documents in a column of a Parquet file.

    Args:
        path: Path or URL of the file.
        text_field: Name of the column.

    Raises:
        UserError: The file cannot be read or has no such column.
        ModuleNotFoundError: `pyarrow` is not installed.
    """
    from pyarrow import parquet  # an optional package

    with open_bytes(path) as file:
        try:
            batches = parquet.ParquetFile(file).iter_batches(256, columns=[text_field])
            # as bytes, because pyarrow raises an error for a string that is not UTF-8
            texts = chain.from_iterable(batch.column(0).cast("binary").to_pylist() for batch in batches)
            for number, text in enumerate(texts, 1):
                yield as_document(text, f"{without_query(path)}:{number}")
        except (OSError, ValueError, LookupError, NotImplementedError) as error:  # base classes of pyarrow's errors
            given = f"{path} cannot be read as Parquet with a column {text_field!r} ({error})"
            raise UserError(f"data.corpus: {given}; set data.text_field, or repair the file") from error


def dataset(name: str, text_field: str) -> Callable[[], Iterator[Document | Fault]]:
    """Open a dataset of the Hugging Face hub, and return a function that streams its documents.

    Args:
        name: `NAME`, `NAME:CONFIG` or `NAME:CONFIG:SPLIT`. Without `SPLIT`, the dataset's split `train` is read.
        text_field: Name of the column with the text.

    Raises:
        UserError: The dataset cannot be opened. The returned function raises a UserError if the dataset cannot be read
            or has no such column.
        ModuleNotFoundError: `datasets` is not installed.
    """
    import datasets  # an optional package

    path, config, split = (*name.split(":"), "", "")[:3]
    with _dataset_errors(name):
        rows = datasets.load_dataset(path, config or None, split=split or "train", streaming=True)

    def documents() -> Iterator[Document | Fault]:
        with _dataset_errors(name):
            for number, row in enumerate(rows, 1):
                if text_field not in row:
                    raise UserError(f"data.text_field: got {text_field!r}, but hf:{name} has {', '.join(row)}")
                yield as_document(row[text_field], f"hf:{name}:{number}")

    return documents


@contextmanager
def _dataset_errors(dataset: str) -> Iterator[None]:
    """Replace errors of the library `datasets` within the context by a UserError with the name of the dataset."""
    try:
        yield
    except (OSError, RuntimeError, ValueError) as error:
        raise error if isinstance(error, UserError) else UserError(f"data.corpus: hf:{dataset}: {error}") from error

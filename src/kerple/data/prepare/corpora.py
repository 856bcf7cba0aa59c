"""Corpora: sources of documents, built-in or named by a path.

A corpus has a function that yields its documents, in the same order in every call. To add a built-in corpus, write such
a function, and add an entry to `CORPORA`.
"""

import hashlib
import os
import random
import sysconfig
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

from kerple.base.errors import require
from kerple.data.file_opening import has_extension, is_remote, list_files
from kerple.data.prepare.readers import Document, Fault, dataset, read_files
from kerple.data.prepare.rfc import read_rfcs
from kerple.data.prepare.wheels import read_list, read_wheels
from kerple.data.shard_options import HUB, ShardOptions

# checksums of the texts of built-in corpora, as in `Manifest.text`
CODE = "1971f33401c2326b7f4f6e6ba1fb21a1e7c153cf5ce7e266b4d138eda863d7d4"
CODE_DEMO = "55b3706fbfcbb02bdd667a48f6756ba6e9a345801b65ef62e5c38a0e59628491"
RFC = "00aa37f481a0dc9ac567be82780beac040b1b56dc29ce51a2fa07741896b9f20"
STDLIB = Path(sysconfig.get_paths()["stdlib"])
COMPRESSED = (".zst", ".gz", ".tgz", ".parquet")  # extensions of files whose size is not the size of their text


class Corpus(NamedTuple):
    """A source of documents.

    Attributes:
        documents: Yields the documents, and a `Fault` for each document that cannot be used.
        files: Paths or URLs of the files of the corpus; empty for downloaded corpora and datasets.
        text: Checksum that the text of a downloaded corpus must have (`Manifest.text`); None for other corpora.
        text_bytes: Number of bytes of this text.
        drop_duplicates: Whether documents with the text of an earlier document are dropped even if the option
            `ShardOptions.drop_duplicates` is false.
    """

    documents: Callable[[], Iterator[Document | Fault]]
    files: list[str]
    text: str | None = None
    text_bytes: int | None = None
    drop_duplicates: bool = False

    def state(self) -> str | None:
        """Return the number of files, their bytes, and a checksum of their names and sizes.

        A change of a file that keeps its size does not change the state. For a corpus without local files, the state is
        the expected checksum of its text, or None.
        """
        if not self.files or is_remote(self.files[0]):
            return self.text
        sizes = [os.stat(path).st_size for path in self.files]
        names = "".join(f"{os.path.basename(path)}\0{size}\0" for path, size in zip(self.files, sizes, strict=True))
        return f"{len(sizes)} files, {sum(sizes)} bytes, {hashlib.sha256(os.fsencode(names)).hexdigest()[:16]}"

    def size(self) -> int | None:
        """Return the number of bytes of text for the progress bar; None if it is not known before reading."""
        if not self.files or any(is_remote(path) or has_extension(path, COMPRESSED) for path in self.files):
            return self.text_bytes
        return sum(os.stat(path).st_size for path in self.files)


def file_corpus(files: list[str], text_field: str = "", encoding: str = "utf-8") -> Corpus:
    """Return the corpus of the documents that `read_files` yields for these arguments."""
    return Corpus(lambda: read_files(files, text_field, encoding), files)


def standard_library() -> Corpus:
    """Return the corpus of the .py files of the standard library of the running Python, about 30 MB.

    The files are sorted and then shuffled with a fixed seed, so that files of one package are rarely neighbours.
    """
    excluded = {"site-packages", "dist-packages", "__pycache__"}
    paths = [p for p in sorted(STDLIB.rglob("*.py")) if p.is_file() and not excluded & set(p.relative_to(STDLIB).parts)]
    random.Random(0).shuffle(paths)
    return file_corpus(list(map(str, paths)))


# The argument is the folder for the downloaded files. A corpus is downloaded when its documents are first read.
CORPORA: dict[str, Callable[[Path], Corpus]] = {
    "code": lambda folder: Corpus(lambda: read_wheels(read_list(False), folder), [], CODE, 183271102, True),
    "code-demo": lambda folder: Corpus(lambda: read_wheels(read_list(True), folder), [], CODE_DEMO, 29953133, True),
    "rfc": lambda folder: Corpus(lambda: read_rfcs(folder), [], RFC, 462315088),
    "stdlib": lambda _: standard_library(),
    "modules": lambda _: file_corpus(list(map(str, sorted(STDLIB.glob("*.py"))))),  # about 5 MB
}


def find_corpus(options: ShardOptions) -> Corpus:
    """Return the corpus that the options name: one of `CORPORA`, a dataset, or files.

    Raises:
        UserError: No file is found, or the files, the folder or the dataset cannot be read.
    """
    name = options.corpus
    assert name is not None
    if name in CORPORA:
        return CORPORA[name](Path(options.source_folder))
    if name.startswith(HUB):
        return Corpus(dataset(name.removeprefix(HUB), options.text_field), [])
    files = list_files(name)
    expected = f"a file, folder, pattern, URL, hf:NAME or {', '.join(CORPORA)}"
    require(bool(files), "data.corpus", f"{name!r}, where no file was found", expected)
    return file_corpus(files, options.text_field, options.encoding)

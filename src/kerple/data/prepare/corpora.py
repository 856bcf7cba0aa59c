"""Corpora: where the documents of a corpus come from, and the built-in ones.

A corpus is a function that yields documents, in an order that is the same on every call. A new built-in corpus is one
more such function and its name in `CORPORA`.
"""

import hashlib
import os
import random
import sysconfig
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import NamedTuple

from kerple.base.errors import UserError
from kerple.data.files import is_remote
from kerple.data.options import HUB
from kerple.data.prepare.readers import Document, Fault, dataset, list_files, read_files, read_text
from kerple.data.prepare.rfc import read_rfcs
from kerple.data.prepare.wheels import read_list, read_wheels

FILE_ORDER = 0  # seed of the shuffle of files
# checksums of the texts of the corpora that are the same on every machine, see `Manifest`
CODE = "1971f33401c2326b7f4f6e6ba1fb21a1e7c153cf5ce7e266b4d138eda863d7d4"
CODE_DEMO = "55b3706fbfcbb02bdd667a48f6756ba6e9a345801b65ef62e5c38a0e59628491"
RFC = "00aa37f481a0dc9ac567be82780beac040b1b56dc29ce51a2fa07741896b9f20"
PACKED = (".zst", ".gz", ".tgz", ".parquet")


class Corpus(NamedTuple):
    """A corpus.

    Attributes:
        documents: Yields its documents, and a `Fault` in place of what cannot be read.
        files: Paths of the files that it is read from, for `state`; empty if they are not on this machine.
        text: Checksum that its text has on every machine, see `Manifest`, of those that are fetched.
        text_bytes: Bytes of this text.
        drop_duplicates: Whether only the first of several documents with equal text is part of it.
    """

    documents: Callable[[], Iterator[Document | Fault]]
    files: list[str]
    text: str | None = None
    text_bytes: int | None = None
    drop_duplicates: bool = False

    def state(self) -> str | None:
        """Number, bytes and a checksum of names and sizes of the files, by which a change of the corpus is noticed."""
        if not self.files or is_remote(self.files[0]):
            return self.text
        sizes = [os.stat(path).st_size for path in self.files]
        digest = hashlib.sha256()
        for path, size in zip(self.files, sizes, strict=True):
            digest.update(os.fsencode(f"{os.path.basename(path)}\0{size}\0"))
        return f"{len(sizes)} files, {sum(sizes)} bytes, {digest.hexdigest()[:16]}"

    def size(self) -> int | None:
        """Bytes of text, for progress; None if nobody knows before it is read."""
        if not self.files or any(is_remote(path) or path.endswith(PACKED) for path in self.files):
            return self.text_bytes
        return sum(os.stat(path).st_size for path in self.files)


def text_files(paths: Iterable[str]) -> Corpus:
    """A corpus of files of which each is one document, in this order."""
    paths = list(paths)
    return Corpus(lambda: map(read_text, paths), paths)


def standard_library() -> Corpus:
    """The .py files of the running Python's standard library: about 30 MB of source code that every machine has.

    They are sorted, then shuffled in the same way everywhere, so that files of one package are not neighbours in the
    token stream.
    """
    root = Path(sysconfig.get_paths()["stdlib"])
    beside = {"site-packages", "dist-packages", "__pycache__"}
    paths = [p for p in sorted(root.rglob("*.py")) if p.is_file() and not beside & set(p.relative_to(root).parts)]
    random.Random(FILE_ORDER).shuffle(paths)
    return text_files(map(str, paths))


def library_modules() -> Corpus:
    """The modules at the top of the standard library (`argparse.py`) in alphabetical order, about 5 MB: a text whose
    beginning does not depend on hashes or seeds."""
    return text_files(str(path) for path in sorted(Path(sysconfig.get_paths()["stdlib"]).glob("*.py")))


# functions of the folder to which a corpus that is fetched is fetched when it is read
CORPORA: dict[str, Callable[[Path], Corpus]] = {
    "code": lambda folder: Corpus(lambda: read_wheels(read_list(False), folder), [], CODE, 183271102, True),
    "code-demo": lambda folder: Corpus(lambda: read_wheels(read_list(True), folder), [], CODE_DEMO, 29953133, True),
    "rfc": lambda folder: Corpus(lambda: read_rfcs(folder), [], RFC, 462315088),
    "stdlib": lambda _: standard_library(),
    "modules": lambda _: library_modules(),
}


def find_corpus(name: str, text_field: str = "text", source: str = "data/.cache") -> Corpus:
    """The corpus of a name, see `ShardOptions`.

    Args:
        name: One of `CORPORA`, `hf:NAME[:CONFIG[:SPLIT]]`, or a file, folder, glob pattern or URL.
        text_field: Key or column of the text, where documents are rows of a table.
        source: Folder of the files of a corpus that is fetched.

    Raises:
        UserError: There is nothing of this name, or a folder holds tables beside other files.
    """
    if name in CORPORA:
        return CORPORA[name](Path(source))
    if name.startswith(HUB):
        return Corpus(dataset(name.removeprefix(HUB), text_field), [])
    files = list_files(name)
    if not files:
        raise UserError(f"data.corpus: got {name!r}, expected a file, pattern, URL, hf:NAME or {', '.join(CORPORA)}")
    return Corpus(lambda: read_files(files, text_field), files)

"""Reading of a corpus: the splits of its documents, the documents that are left out, and the division into parts."""

import hashlib
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import replace

from kerple.data.prepare.corpora import Corpus
from kerple.data.prepare.readers import Document, Fault


def part_size(number: int) -> int:
    """Minimum number of characters of a part. The first parts are small, so that a small corpus occupies many cores."""
    return 1 << 22 if number < 64 else 1 << 25


def split_of(text: bytes, fractions: tuple[float, float, float]) -> str:
    """The split of a document by a hash of the name of its group or of its text."""
    number = int.from_bytes(hashlib.blake2b(text, digest_size=16).digest()[:8], "big") / 2**64
    train, validation, _ = fractions
    return "train" if number < train else "validation" if number < train + validation else "test"


class Reading:
    """Reads the documents of a corpus with their splits, and counts the documents that are left out.

    Args:
        corpus: The corpus.
        fractions: Fractions of the documents in train, validation and test, unless the corpus determines the splits.
        drop_duplicates: Whether only the first of several documents with equal text is read. Some corpora require it.

    Attributes:
        left_out (Counter[str]): Number of documents that were left out so far, by reason.
        lost_bytes (int): Bytes of documents that cannot be used.
        used_bytes (int): Bytes of the documents that were read.
        text (hashlib._Hash): Checksum of these documents, see `Manifest`.
        test_documents (list[Document]): Documents of the test split, without their texts.
    """

    def __init__(self, corpus: Corpus, fractions: tuple[float, float, float], drop_duplicates: bool = False) -> None:
        self.corpus, self.fractions, self.drop_duplicates = corpus, fractions, drop_duplicates or corpus.drop_duplicates
        self.text, self.test_documents = hashlib.sha256(), list[Document]()
        self.left_out, self.examples = Counter[str](), dict[str, str]()
        self.lost_bytes = self.used_bytes = 0

    def __iter__(self) -> Iterator[Document]:
        seen = set[int]()
        for document in self.corpus.documents():
            if isinstance(document, Fault):
                self.left_out[document.reason] += 1
                if document.reason != "empty":
                    first = ": ".join(filter(None, [document.name, document.details]))
                    self.examples.setdefault(document.reason, f"{document.reason} (first: {first})")
                    self.lost_bytes += document.bytes
                continue
            content = document.text.encode()
            self.used_bytes += len(content)
            if self.drop_duplicates:
                digest = int.from_bytes(hashlib.blake2b(content, digest_size=8).digest())
                if digest in seen:
                    self.left_out["duplicates"] += 1
                    continue
                seen.add(digest)
            split = document.split or split_of(document.group.encode() or content, self.fractions)
            document = replace(document, split=split)
            self.text.update(f"{document.group}\0{document.split}\0{len(content)}\0".encode() + content)
            if document.split == "test":
                self.test_documents.append(replace(document, text=""))
            yield document

    def reasons(self) -> str:
        """Numbers of the documents that cannot be used and their reasons, for messages; empty if there are none."""
        return "; ".join(f"{self.left_out[reason]} × {example}" for reason, example in self.examples.items())


def cut_into_parts(documents: Iterable[Document]) -> Iterator[list[Document]]:
    """Divide the documents of a corpus into parts."""
    number, part, size = 0, list[Document](), 0
    for document in documents:
        part.append(document)
        size += len(document.text)
        if size >= part_size(number):
            yield part
            number, part, size = number + 1, [], 0
    if part:
        yield part

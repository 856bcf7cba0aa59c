"""Reading of a corpus: assigns documents to splits, leaves out unusable ones, and divides the others into parts."""

import hashlib
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import replace
from itertools import chain

import numpy as np
from tokenizers import Tokenizer

from kerple.base.errors import UserError
from kerple.data.prepare.corpora import Corpus
from kerple.data.prepare.readers import Document, Fault
from kerple.data.tokenizer import vocabulary_size

LONGEST_LIST = 100  # names of dropped documents that are printed


def part_size(number: int) -> int:
    """Return the size in characters at which part ``number`` ends. The document that reaches this size is included.

    The first parts are small, so that a small corpus has enough parts for all cores.
    """
    return 1 << 22 if number < 64 else 1 << 25


def split_of(text: bytes, fractions: tuple[float, float, float]) -> str:
    """Return the split of a document, by a hash of its text or of the name of its group.

    Args:
        text: The text, or the name of the group.
        fractions: Fractions of the documents in train, validation and test.
    """
    number = int.from_bytes(hashlib.blake2b(text, digest_size=16).digest()[:8], "big") / 2**64
    train, validation, _ = fractions
    return "train" if number < train else "validation" if number < train + validation else "test"


class CorpusReader:
    """Iterates once over the documents of a corpus, sets their splits, and counts the documents that are left out.

    Args:
        corpus: The corpus.
        fractions: Fractions of the documents in train, validation and test. They have no effect if the corpus
            determines the splits.
        drop_duplicates: Whether to leave out documents whose text equals that of an earlier one. A corpus may require
            it (`Corpus.drop_duplicates`).
        tokenizer: The tokenizer ``data.tokenizer`` and its end-of-text token, for documents of token ids; None if the
            tokenizer is trained on the corpus.

    Attributes:
        left_out (Counter[str]): Number of documents left out so far, for each reason.
        examples (dict[str, str]): For each reason except ``empty`` and ``duplicates``, a message about the first case.
        dropped (list[str]): Names and reasons of the first `LONGEST_LIST` documents that `lost_bytes` counts.
        lost_bytes (int): Sum of `Fault.bytes` of all faults so far, except those with the reason ``empty``.
        used_bytes (int): Number of bytes of the documents that can be used, duplicates included.
        text (hashlib._Hash): Checksum of the documents of all splits, which becomes `Manifest.text`.
        test_documents (list[Document]): Documents of the test split, without their texts.
    """

    def __init__(
        self,
        corpus: Corpus,
        fractions: tuple[float, float, float],
        drop_duplicates: bool = False,
        tokenizer: tuple[Tokenizer, int] | None = None,
    ) -> None:
        self.tokenizer = tokenizer
        # counted only once, because this takes 13 ms for 8,192 entries
        self._entries = 0 if tokenizer is None else vocabulary_size(tokenizer[0])
        self.corpus, self.fractions, self.drop_duplicates = corpus, fractions, drop_duplicates or corpus.drop_duplicates
        self.text, self.test_documents = hashlib.sha256(), list[Document]()
        self.left_out, self.examples = Counter[str](), dict[str, str]()
        self.dropped = list[str]()
        self.lost_bytes = self.used_bytes = 0

    def __iter__(self) -> Iterator[Document]:
        seen = set[int]()
        for document in chain.from_iterable(map(self._decoded, self.corpus.documents())):
            if isinstance(document, Fault):
                self.left_out[document.reason] += 1
                if document.reason != "empty":
                    first = ": ".join(filter(None, [document.name, document.details]))
                    self.examples.setdefault(document.reason, f"{document.reason} (first: {first})")
                    self.lost_bytes += document.bytes
                    if document.bytes and len(self.dropped) < LONGEST_LIST:  # not generated files and metadata
                        self.dropped.append(f"{document.name}: {document.reason}")
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
                self.test_documents.append(replace(document, text="", ids=()))
            yield document

    def _decoded(self, document: Document | Fault) -> Iterator[Document | Fault]:
        """Yield a document with its text. Token ids are divided at end-of-text tokens, and decoded."""
        if isinstance(document, Fault) or not document.ids:
            yield document
            return
        if self.tokenizer is None:
            given = f"a tokenizer that is trained, but {document.name} has token ids"
            raise UserError(f"data.tokenizer: got {given}, expected the tokenizer of these ids, such as gpt2")
        tokenizer, end = self.tokenizer
        if (largest := max(document.ids)) >= self._entries:
            details = f"{largest}, but the tokenizer has {self._entries} entries"
            yield Fault(document.name, "a token id outside the tokenizer", 4 * len(document.ids), details)
            return
        ids = np.array(document.ids)
        for piece in np.split(ids, np.flatnonzero(ids == end)):
            if own := tuple(piece[piece != end].tolist()):
                yield replace(document, text=tokenizer.decode(own, skip_special_tokens=False), ids=own)

    def reasons(self) -> str:
        """Return how many documents cannot be used and why, for messages, without duplicates and empty documents."""
        return "; ".join(f"{self.left_out[reason]} × {example}" for reason, example in self.examples.items())


def cut_into_parts(documents: Iterable[Document]) -> Iterator[list[Document]]:
    """Yield the documents in parts of at least `part_size` characters. The last part may be smaller."""
    number, part, size = 0, list[Document](), 0
    for document in documents:
        part.append(document)
        size += len(document.text)
        if size >= part_size(number):
            yield part
            number, part, size = number + 1, [], 0
    if part:
        yield part

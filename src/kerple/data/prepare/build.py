"""`prepare`: from a corpus to a folder of shards, in parallel, with the same bytes on any number of workers.

One process reads the documents and cuts them into parts. Where a part ends is a function of the corpus alone. Each part
is tokenised by a worker and becomes one shard of each split, number n for part n. A preparation that was stopped reads
the corpus again and does the parts that are missing.
"""

import hashlib
import json
import multiprocessing
import shutil
import sys
from collections import Counter, deque
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from itertools import chain
from pathlib import Path
from typing import Any

from filelock import FileLock
from tokenizers import Tokenizer
from tqdm import tqdm

from kerple.base.atomic import write
from kerple.base.errors import NO_FOLDER, UserError
from kerple.base.mapping import read_mapping
from kerple.data.files import is_remote
from kerple.data.manifest import MANIFEST_FILE, SPLITS, TEST_DOCUMENTS, Manifest, Shard, Split, token_dtype
from kerple.data.options import HUB, ShardOptions
from kerple.data.prepare.corpora import Corpus, find_corpus
from kerple.data.prepare.engines import ENGINES, Encoded, Encoder
from kerple.data.prepare.overlap import overlap
from kerple.data.prepare.readers import Document, Fault
from kerple.data.shards import Folder, Tokens, read_shards, token_checksum, write_shard
from kerple.data.tokenizer import TRAINED_HERE, end_of_text, load_tokenizer, train_tokenizer, vocabulary_size

TRAINING_BYTES = 10**8  # bytes of the training split that a tokenizer is trained on
SHIPPED = Path(__file__).parents[1] / "tokenizers"  # tokenizers of the corpora that are the same on every machine
PARTS = "parts"  # folder with a small file for each finished part, and the options; removed at the end


def part_size(number: int) -> int:
    """Least number of characters of a part: small first, so that a small corpus occupies many cores, and then large."""
    return 1 << 22 if number < 64 else 1 << 25


def prepare(options: ShardOptions, progress: bool = True) -> Manifest:
    """Prepare the shards in ``options.location`` unless they exist; a preparation that was stopped goes on.

    Several processes may call this at the same time. One of them works; the others wait and find the shards.

    Args:
        options: What to prepare, and where.
        progress: Whether to show progress on standard error, and to say at the end what was prepared and left out.

    Raises:
        UserError: The corpus or the tokenizer cannot be used, the corpus holds no document or too many faults, or the
            folder was prepared with other options or from other files.
    """
    directory = Path(options.location)
    # a finished folder is only read, so that it may lie on a disk that cannot be written to, where a lock would fail
    if (directory / MANIFEST_FILE).exists():
        shutil.rmtree(directory / PARTS, ignore_errors=True)  # a kill may have left it
        return check_prepared(options)
    assert options.corpus is not None
    if Path(options.corpus).is_dir() and directory.resolve().is_relative_to(Path(options.corpus).resolve()):
        raise UserError(
            f"data.directory: got {directory}, which is inside of the corpus {options.corpus}, so that the shards "
            "would be part of it; choose a folder outside"
        )
    corpus = find_corpus(options.corpus, options.text_field, options.source)  # if there is none, no folder is made
    with _locked(directory):
        if (directory / MANIFEST_FILE).exists():
            return check_prepared(options)
        settings = options.content_options() | {"files": corpus.state()}
        tokenizer = _begin(directory, options, corpus, settings, progress)
        end, vocabulary = end_of_text(tokenizer, options.tokenizer), vocabulary_size(tokenizer)
        content = (directory / "tokenizer.json").read_bytes()
        encoder = Encoder(content.decode(), end, token_dtype(vocabulary))
        reading = Reading(corpus, options.split_fractions, options.drop_duplicates)
        parts = _write_parts(directory, options, encoder, reading, progress)
        _check_losses(options, reading)
        splits = {}
        for name in SPLITS:
            shards = tuple(Shard(part[name]["tokens"], part[name]["sha256"]) for part in parts)
            documents, size = (sum(part[name][what] for part in parts) for what in ("documents", "bytes"))
            splits[name] = Split(shards, documents, size, token_checksum(directory, name, shards, encoder.dtype))
        manifest = Manifest(
            options.location,
            vocabulary,
            end,
            tokenizer=hashlib.sha256(content).hexdigest(),
            splits=splits,
            settings=settings,
            left_out=dict(sorted(reading.left_out.items())),
            text=reading.text.hexdigest(),
            test_documents=_write_test_documents(directory, splits, encoder, reading.tested),
        )
        manifest.write(directory)
        shutil.rmtree(directory / PARTS, ignore_errors=True)
    if progress:
        tokens, documents = (sum(getattr(s, what) for s in splits.values()) for what in ("tokens", "documents"))
        summary = f"{options.location}: {tokens:,} tokens of {documents:,} documents are prepared"
        print("; left out: ".join(filter(None, [summary, reading.reasons()])), file=sys.stderr)
        if none := " and no ".join(name for name, split in splits.items() if not split.documents):
            print(f"{options.location}: no {none} text: add some, or set data.split_fractions", file=sys.stderr)
    return manifest


def check_corpus(options: ShardOptions) -> None:
    """Check that there is a corpus if shards are to be prepared.

    Raises:
        UserError: If there is none.
    """
    if options.corpus is not None and not Path(options.location, MANIFEST_FILE).exists():
        find_corpus(options.corpus, options.text_field, options.source)


def check_prepared(options: ShardOptions) -> Manifest:
    """The manifest of a prepared folder, if it was prepared with these options from the files that exist now.

    Raises:
        UserError: There is no manifest, or the options or the files differ; the message names the differences.
    """
    manifest = Folder(options.location).manifest
    settings = options.content_options()
    if options.corpus and not is_remote(options.corpus) and not options.corpus.startswith(HUB):
        with suppress(UserError):  # shards can be used on a machine without the corpus
            settings["files"] = find_corpus(options.corpus, options.text_field, options.source).state()
    _refuse_other(options.location, manifest.settings, settings)
    return manifest


def _refuse_other(location: str, before: dict[str, Any], now: dict[str, Any]) -> None:
    changes = [f"{name} was {before.get(name)!r}, is {now[name]!r}" for name in now if before.get(name) != now[name]]
    if changes:
        raise UserError(
            f"{location}: was prepared otherwise: {'; '.join(changes)}. Give data.directory another folder, delete "
            "this one to prepare it again, or set data.corpus to null to take the shards as they are"
        )


@contextmanager
def _locked(directory: Path) -> Iterator[None]:
    """Make the folder, and lock it against other processes."""
    if getattr(multiprocessing.current_process(), "_inheriting", False):  # a worker that runs its parent's script again
        raise UserError('data: the script that prepares it needs `if __name__ == "__main__":` around what it does')
    try:
        made = not directory.exists()
        while True:
            directory.mkdir(parents=True, exist_ok=True)
            with suppress(FileNotFoundError):  # another process was refused, and has removed the folder
                lock = FileLock(directory / ".lock").acquire()
                break
    except OSError as error:
        if error.errno not in NO_FOLDER:
            raise
        raise UserError(f"data.directory: {directory} cannot be written to ({error}); choose another folder") from error
    with lock:
        try:
            yield
        except MemoryError as error:
            raise UserError("data.corpus: a document does not fit into memory; split it into smaller ones") from error
        finally:
            if made and [path.name for path in directory.glob("*")] == [".lock"]:  # nothing could be prepared
                shutil.rmtree(directory, ignore_errors=True)


def _begin(
    directory: Path, options: ShardOptions, corpus: Corpus, settings: dict[str, Any], progress: bool
) -> Tokenizer:
    """The tokenizer of a preparation: trained or loaded when it begins, read from the folder when it goes on.

    Raises:
        UserError: The folder holds a preparation with other settings, or shards of something else, or there is no such
            tokenizer, or it has too many entries.
    """
    begun = directory / PARTS / "settings.json"
    if begun.exists():
        _refuse_other(options.location, read_mapping(begun), settings)
        return load_tokenizer(str(directory))
    for shard in directory.glob("*.tar"):
        raise UserError(
            f"data.directory: got {directory}, which holds {shard.name} without a {MANIFEST_FILE}; choose another "
            "folder, or delete what is in this one"
        )
    shipped = SHIPPED / f"{options.corpus}-{options.vocabulary}.json".replace("-demo", "")
    if options.tokenizer == TRAINED_HERE and not shipped.exists():
        reading = Reading(corpus, options.split_fractions)
        texts = _training_texts(reading, progress)
        if (first := next(texts, None)) is None:
            raise UserError(
                f"data.corpus: got {options.corpus!r}, which holds no training document to learn a tokenizer from: "
                f"{reading.reasons() or 'it is empty, or too small for its fraction'}; name another corpus, the key or "
                "column of its text with data.text_field, other data.split_fractions, or a tokenizer"
            )
        tokenizer = train_tokenizer(chain([first], texts), options.vocabulary)
    else:
        tokenizer = load_tokenizer(str(shipped) if shipped.exists() else options.tokenizer)
    if (size := vocabulary_size(tokenizer)) > options.vocabulary:
        raise UserError(
            f"data.vocabulary: got {options.vocabulary}, but tokenizer {options.tokenizer!r} has {size} entries; set "
            f"it to {size} or more (a model may have rows to spare)"
        )
    write(directory / "tokenizer.json", tokenizer.to_str())
    write(begun, json.dumps(settings))
    return tokenizer


def _training_texts(reading: "Reading", progress: bool) -> Iterator[str]:
    """Yield texts of the training split, up to `TRAINING_BYTES`; the tokenizer must not learn from the other splits."""
    size = 0
    for document in tqdm(reading, desc="training the tokenizer", unit=" documents", delay=1, disable=not progress):
        if document.split == "train":
            yield document.text[:TRAINING_BYTES]
            size += len(document.text.encode())
            if size >= TRAINING_BYTES:
                return


def split_of(text: bytes, fractions: tuple[float, float, float]) -> str:
    """The split of a document, by a hash of the name of its group, or of its text: equal ones are in the same split."""
    number = int.from_bytes(hashlib.blake2b(text, digest_size=16).digest()[:8], "big") / 2**64
    train, validation, _ = fractions
    return "train" if number < train else "validation" if number < train + validation else "test"


class Reading:
    """Reads the documents of a corpus with their splits, and counts what is left out.

    Args:
        corpus: The corpus.
        fractions: Fractions of the documents in train, validation and test, unless the corpus says which is in which.
        drop_duplicates: Whether only the first of several documents with equal text is read; of some corpora always.

    Attributes:
        left_out (Counter[str]): Number of documents that were left out so far, by reason.
        lost (int): Bytes of these documents, without empty ones and duplicates.
        used (int): Bytes of the documents that were read.
        text (hashlib._Hash): Checksum of these documents, see `Manifest`.
        tested (list[Document]): Documents of the test split, without their texts.
    """

    def __init__(self, corpus: Corpus, fractions: tuple[float, float, float], drop_duplicates: bool = False) -> None:
        self.corpus, self.fractions, self.drop_duplicates = corpus, fractions, drop_duplicates or corpus.drop_duplicates
        self.text, self.tested = hashlib.sha256(), list[Document]()
        self.left_out, self.examples = Counter[str](), dict[str, str]()
        self.lost = self.used = 0

    def __iter__(self) -> Iterator[Document]:
        seen = set[int]()
        for document in self.corpus.documents():
            if isinstance(document, Fault):
                self.left_out[document.reason] += 1
                if document.reason != "empty":
                    first = ": ".join(filter(None, [document.name, document.details]))
                    self.examples.setdefault(document.reason, f"{document.reason} (first: {first})")
                    self.lost += document.bytes
                continue
            content = document.text.encode()
            self.used += len(content)
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
                self.tested.append(replace(document, text=""))
            yield document

    def reasons(self) -> str:
        """What was left out and why, as part of a message; empty if nothing was."""
        return "; ".join(f"{self.left_out[reason]} × {example}" for reason, example in self.examples.items())


def _parts(documents: Iterable[Document]) -> Iterator[list[Document]]:
    """Cut the documents of a corpus into parts."""
    number, part, size = 0, list[Document](), 0
    for document in documents:
        part.append(document)
        size += len(document.text)
        if size >= part_size(number):
            yield part
            number, part, size = number + 1, [], 0
    if part:
        yield part


def _write_parts(
    directory: Path, options: ShardOptions, encoder: Encoder, reading: Reading, progress: bool
) -> list[dict[str, Any]]:
    """Tokenise all parts that are not finished, and return the entries of each part by split."""
    paths = list[Path]()
    waiting = deque[tuple[int, str, Any]]()
    tokens = 0
    with (
        tqdm(total=reading.corpus.size(), desc="tokenising", unit="B", unit_scale=True, disable=not progress) as bar,
        ENGINES[options.prepare_engine](options.prepare_workers) as (submit, result, workers),
    ):

        def write_next() -> None:
            nonlocal tokens
            number, checksum, handle = waiting.popleft()
            encoded: dict[str, Encoded] = result(handle)
            done: dict[str, Any] = {"texts": checksum}
            for name, (ids, count, size) in encoded.items():
                shard = write_shard(directory, name, number, ids)
                done[name] = vars(shard) | {"documents": count, "bytes": size}
                tokens += len(ids)
            write(paths[number], json.dumps(done))
            bar.set_postfix_str(f"{tokens / 1e6:.1f} Mtok")

        for number, documents in enumerate(_parts(reading)):
            paths.append(directory / PARTS / f"{number:05d}.json")
            checksum = hashlib.blake2b("\0".join(f"{d.split}\0{d.text}" for d in documents).encode()).hexdigest()
            # a part that is done is done again if the corpus has changed since then
            if not paths[number].exists() or read_mapping(paths[number])["texts"] != checksum:
                waiting.append((number, checksum, submit(encoder, documents)))
            bar.update(reading.used + reading.lost - bar.n)
            if len(waiting) > workers:
                write_next()
        while waiting:
            write_next()
    return [read_mapping(path) for path in paths]


def _write_test_documents(
    directory: Path, splits: dict[str, Split], encoder: Encoder, documents: list[Document]
) -> str:
    """Write the table of the test documents, with the overlap of each with the training text; return its sha256."""

    def tokens(split: str) -> Iterator[Tokens]:
        return read_shards(directory, split, splits[split].shards, encoder.dtype)

    fractions = overlap(tokens("test"), tokens("train"), encoder.end_of_text).round(6)
    names = (document.name.encode("utf-8", "replace").decode() for document in documents)  # a path may be no Unicode
    rows = zip(names, (document.group for document in documents), fractions, strict=True)
    content = "".join(json.dumps(row) + "\n" for row in rows).encode()
    write(directory / TEST_DOCUMENTS, content)
    return hashlib.sha256(content).hexdigest()


def _check_losses(options: ShardOptions, reading: Reading) -> None:
    """Refuse a corpus without documents, with too many faults, or with a text that is not that of its checksum."""
    if not reading.used:
        shutil.rmtree(Path(options.location, PARTS))  # so that the next start reads a mended corpus
        raise UserError(
            f"data.corpus: got {options.corpus!r}, which holds no document that can be used: "
            f"{reading.reasons() or 'it is empty'}; name another corpus, or the key or column of its text with "
            "data.text_field"
        )
    fraction = reading.lost / (reading.lost + reading.used)
    if fraction > options.max_dropped_fraction:
        raise UserError(
            f"data.max_dropped_fraction: got {options.max_dropped_fraction}, but {fraction:.2g} of the bytes of "
            f"{options.corpus!r} cannot be used: {reading.reasons()}; mend the corpus and delete {options.location}, "
            "or raise data.max_dropped_fraction"
        )
    if (text := reading.text.hexdigest()) != (reading.corpus.text or text):
        raise UserError(
            f"data.corpus: got {options.corpus!r} with a text of the checksum {text}, expected {reading.corpus.text}; "
            "its list or its rules were changed, so that no other machine has the same text: give data.directory a "
            "folder of text files instead, or write down the new checksum in kerple/data/prepare/corpora.py"
        )

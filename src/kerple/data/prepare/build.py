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
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager, suppress
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
from kerple.data.prepare.documents import Reading, cut_into_parts
from kerple.data.prepare.overlap import overlap
from kerple.data.prepare.readers import Document
from kerple.data.prepare.workers import ENGINES, Encoded, Encoder
from kerple.data.shards import Folder, Tokens, read_shards, token_checksum, write_shard
from kerple.data.tokenizer import TRAINED_HERE, end_of_text, load_tokenizer, train_tokenizer, vocabulary_size

TRAINING_BYTES = 10**8  # bytes of the training split that a tokenizer is trained on
SHIPPED = Path(__file__).parents[1] / "tokenizers"  # tokenizers of the corpora that are the same on every machine
PARTS = "parts"  # folder with a small file for each finished part, and the options; removed at the end


def prepare(options: ShardOptions) -> Manifest:
    """Prepare the shards in ``options.location`` unless they exist; a preparation that was stopped goes on.

    Several processes may call this at the same time. One of them works; the others wait and find the shards.

    Args:
        options: What to prepare, and where.

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
        raise UserError(f"data.directory: got {directory}, inside of the corpus {options.corpus}; choose one outside")
    corpus = find_corpus(options.corpus, options.text_field, options.fetched)  # if there is none, no folder is made
    with _locked(directory):
        if (directory / MANIFEST_FILE).exists():
            return check_prepared(options)
        settings = options.content_options() | {"files": corpus.state()}
        tokenizer = _begin(directory, options, corpus, settings)
        end, vocabulary = end_of_text(tokenizer, options.tokenizer), vocabulary_size(tokenizer)
        content = (directory / "tokenizer.json").read_bytes()
        encoder = Encoder(content.decode(), end, token_dtype(vocabulary))
        reading = Reading(corpus, options.split_fractions, options.drop_duplicates)
        parts = _write_parts(directory, options, encoder, reading)
        _check_losses(options, reading)
        splits = {}
        for name in SPLITS:
            shards = tuple(Shard(part[name]["tokens"], part[name]["sha256"]) for part in parts)
            documents, size = (sum(part[name][what] for part in parts) for what in ("documents", "bytes"))
            splits[name] = Split(shards, documents, size, token_checksum(directory, name, shards, encoder.dtype))
        manifest = Manifest(
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
        find_corpus(options.corpus, options.text_field, options.fetched)


def check_prepared(options: ShardOptions) -> Manifest:
    """The manifest of a prepared folder, if it was prepared with these options from the files that exist now.

    Raises:
        UserError: There is no manifest, or the options or the files differ; the message names the differences.
    """
    manifest = Folder(options.location).manifest
    settings = options.content_options()
    if options.corpus and not is_remote(options.corpus) and not options.corpus.startswith(HUB):
        with suppress(UserError):  # shards can be used on a machine without the corpus
            settings["files"] = find_corpus(options.corpus, options.text_field, options.fetched).state()
    _refuse_other(options.location, manifest.settings, settings)
    return manifest


def _refuse_other(location: str, before: dict[str, Any], now: dict[str, Any]) -> None:
    changes = [f"{name} was {before.get(name)!r}, is {now[name]!r}" for name in now if before.get(name) != now[name]]
    if changes:
        raise UserError(
            f"{location}: was prepared otherwise: {'; '.join(changes)}. Give data.directory another folder, or delete "
            "this one; data.corpus: null takes the shards as they are"
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


def _begin(directory: Path, options: ShardOptions, corpus: Corpus, settings: dict[str, Any]) -> Tokenizer:
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
        raise UserError(f"data.directory: got {directory}, which holds {shard.name} without a manifest; choose another")
    shipped = SHIPPED / f"{options.corpus}-{options.vocabulary}.json".replace("-demo", "")
    if options.tokenizer == TRAINED_HERE and not shipped.exists():
        reading = Reading(corpus, options.split_fractions)
        texts = _training_texts(reading)
        if (first := next(texts, None)) is None:
            raise UserError(
                f"data.corpus: got {options.corpus!r}, which holds no training document to learn a tokenizer from: "
                f"{reading.reasons() or 'it is empty, or too small'}; set data.text_field, split_fractions or tokenizer"
            )
        tokenizer = train_tokenizer(chain([first], texts), options.vocabulary)
    else:
        tokenizer = load_tokenizer(str(shipped) if shipped.exists() else options.tokenizer)
    if (size := vocabulary_size(tokenizer)) > options.vocabulary:
        raise UserError(
            f"data.vocabulary: got {options.vocabulary}, expected the {size} entries of {options.tokenizer!r} or more"
        )
    write(directory / "tokenizer.json", tokenizer.to_str())
    write(begun, json.dumps(settings))
    return tokenizer


def _training_texts(reading: Reading) -> Iterator[str]:
    """Yield texts of the training split, up to `TRAINING_BYTES`; the tokenizer must not learn from the other splits."""
    size = 0
    for document in tqdm(reading, desc="training the tokenizer", unit=" documents", delay=1):
        if document.split == "train":
            yield document.text[:TRAINING_BYTES]
            size += len(document.text.encode())
            if size >= TRAINING_BYTES:
                return


def _write_parts(directory: Path, options: ShardOptions, encoder: Encoder, reading: Reading) -> list[dict[str, Any]]:
    """Tokenise all parts that are not finished, and return the entries of each part by split."""
    paths = list[Path]()
    waiting = deque[tuple[int, str, Any]]()
    tokens = 0
    with (
        tqdm(total=reading.corpus.size(), desc="tokenising", unit="B", unit_scale=True) as bar,
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

        for number, documents in enumerate(cut_into_parts(reading)):
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
            f"{reading.reasons() or 'it is empty'}; name another, or the column of its text with data.text_field"
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
            "its list or rules were changed: write the new checksum into kerple/data/prepare/corpora.py"
        )

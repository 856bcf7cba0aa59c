"""`prepare`: tokenises a corpus in parallel and writes its shards.

One process reads the documents and divides them into parts. The boundaries of the parts depend only on the corpus, so
that the shards do not depend on the number of workers. Each part is tokenised by one worker. In each split, the
documents of part n become shard n. If a preparation is interrupted, the next one reads the whole corpus again, but
tokenises only the missing parts.
"""

import hashlib
import json
import multiprocessing
import os
import shutil
import sys
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager, suppress
from itertools import chain
from pathlib import Path
from typing import Any

from filelock import FileLock
from tokenizers import Tokenizer
from tqdm import tqdm

from kerple.base.atomic import refuse_links, write
from kerple.base.errors import NO_FOLDER, UserError, require
from kerple.config.files import read_mapping
from kerple.data.file_opening import hide_query, is_remote
from kerple.data.manifest import MANIFEST_FILE, SPLITS, TEST_DOCUMENTS, Manifest, Shard, Split, token_dtype
from kerple.data.prepare.corpora import CORPORA, Corpus, find_corpus
from kerple.data.prepare.corpus_reader import CorpusReader, cut_into_parts
from kerple.data.prepare.overlap import overlap
from kerple.data.prepare.readers import Document
from kerple.data.prepare.workers import Encoder, tokenise_parts
from kerple.data.shard_options import HUB, ShardOptions
from kerple.data.shards import Folder, checksum_and_lengths, lengths_file, read_shards, write_shard
from kerple.data.tokenizer import (
    TRAINED_HERE,
    end_of_text,
    load_tokenizer,
    tokenizer_file,
    train_tokenizer,
    vocabulary_size,
)

TRAINING_BYTES = 10**8  # bytes of the training split on which a tokenizer is trained
SHIPPED = Path(__file__).parents[1] / "tokenizers"  # folder of the trained tokenizers for `code` and `rfc`
PARTS = ".parts"  # folder with the settings and a file for each finished part; it is deleted after the preparation
REFUSED = "refused"  # file in `PARTS` of a preparation whose documents were refused


def prepare(options: ShardOptions, tokenise_all: Callable[..., Any] = tokenise_parts) -> Manifest:
    """Prepare the shards in ``options.location`` and return their manifest. Existing shards are only checked.

    An interrupted preparation is continued. Several processes may call this at the same time: one of them prepares, and
    the others wait.

    Args:
        options: Options of the preparation.
        tokenise_all: `tokenise_parts`, or a function with the same arguments and results.

    Raises:
        UserError: The corpus or the tokenizer cannot be used, the corpus has no document or too many unusable ones, or
            the folder was prepared with other options or from other files.
    """
    directory = Path(options.location)
    # a finished folder is not locked, because a lock needs permission to write
    if (directory / MANIFEST_FILE).exists():
        manifest = check_prepared(options)
        shutil.rmtree(directory / PARTS, ignore_errors=True)  # a process that was killed may have left this folder
        return manifest
    assert options.corpus is not None
    folder = Path(options.corpus.removeprefix("file://"))
    inside = folder.is_dir() and directory.resolve().is_relative_to(folder.resolve())
    require(not inside, "data.directory", directory, f"a folder that is not inside the corpus {options.corpus}")
    # called before the folder of the shards is made, so that a wrong corpus or tokenizer leaves no folder behind
    corpus = find_corpus(options)
    given = None if options.tokenizer == TRAINED_HERE else _accepted(load_tokenizer(options.tokenizer), options)
    with _locked_folder(directory):
        if (directory / MANIFEST_FILE).exists():
            return check_prepared(options)
        settings = options.content_options() | {"files": corpus.state()}
        tokenizer = _corpus_tokenizer(directory, options, corpus, settings, given)
        end, vocabulary = end_of_text(tokenizer, options.tokenizer), vocabulary_size(tokenizer)
        content = (directory / "tokenizer.json").read_bytes()
        encoder = Encoder(content.decode(), end, token_dtype(vocabulary))
        reader = CorpusReader(corpus, options.split_fractions, options.drop_duplicates, given and (tokenizer, end))
        parts = _write_parts(directory, options, encoder, reader, tokenise_all)
        if len(reader.dropped) > len(reader.examples):  # the messages below name one example for each reason
            print("left out:", *reader.dropped, sep="\n  ", file=sys.stderr)
        _check_documents(options, reader)
        splits = {}
        for name in SPLITS:
            shards = tuple(Shard(part[name]["tokens"], part[name]["sha256"]) for part in parts)
            documents, size = (sum(part[name][key] for part in parts) for key in ("documents", "bytes"))
            checksum, lengths = checksum_and_lengths(read_shards(directory, name, shards, encoder.dtype), end)
            write(directory / lengths_file(name), lengths.tobytes())
            splits[name] = Split(shards, documents, size, checksum, hashlib.sha256(lengths.tobytes()).hexdigest())
        manifest = Manifest(
            vocabulary,
            end,
            tokenizer=hashlib.sha256(content).hexdigest(),
            splits=splits,
            settings=settings,
            left_out=dict(sorted(reader.left_out.items())),
            text=reader.text.hexdigest(),
            test_documents=_write_test_documents(directory, splits, encoder, reader.test_documents),
        )
        manifest.write(directory)
        shutil.rmtree(directory / PARTS, ignore_errors=True)
    tokens, documents = (sum(getattr(split, key) for split in splits.values()) for key in ("tokens", "documents"))
    summary = f"{options.location}: prepared {tokens:,} tokens of {documents:,} documents"
    print("; left out: ".join(filter(None, [summary, reader.reasons()])), file=sys.stderr)
    if empty := " and no ".join(name for name, split in splits.items() if not split.documents):
        print(f"{options.location}: there is no {empty} text; set data.split_fractions or add text", file=sys.stderr)
    return manifest


def check_corpus(options: ShardOptions) -> None:
    """Raise a UserError if the shards have not been prepared and their corpus cannot be found."""
    if options.corpus is not None and not Path(options.location, MANIFEST_FILE).exists():
        find_corpus(options)


def check_prepared(options: ShardOptions) -> Manifest:
    """Return the manifest of a prepared folder, after comparing it with the options and the files of the corpus.

    The files of remote corpora, and of corpora that do not exist on this machine, are not compared.

    Raises:
        UserError: There is no manifest, or the options or the files differ. The message names the differences.
    """
    folder = Folder(options.location)
    manifest, settings = folder.manifest, options.content_options()
    if options.corpus and not is_remote(options.corpus) and not options.corpus.startswith(HUB):
        with suppress(UserError):  # shards can be used on a machine without the corpus
            settings["files"] = find_corpus(options).state()
    _compare_settings(options.location, manifest.settings, settings, ", or set data.corpus: null to skip this check")
    local = options.tokenizer != TRAINED_HERE and os.path.isfile(tokenizer_file(options.tokenizer))
    if local and load_tokenizer(options.tokenizer).to_str() != folder.tokenizer().to_str():
        given = f"got {options.location}, which was prepared with another content of {options.tokenizer}"
        raise UserError(f"data.directory: {given}; choose another folder, or delete this one")
    return manifest


def _compare_settings(location: str, before: dict[str, Any], now: dict[str, Any], advice: str = "") -> None:
    """Raise a UserError, which ends with ``advice``, if a folder was prepared with other values of the settings."""
    before = {"encoding": "utf-8"} | before  # of folders that were prepared before this option existed
    if hide_query(str(before.get("corpus"))) == now.get("corpus"):  # earlier versions stored the query
        before["corpus"] = now["corpus"]
    changes = [f"{name} was {before.get(name)!r}, is {now[name]!r}" for name in now if before.get(name) != now[name]]
    if changes:
        given = f"got {location}, which was prepared with other settings: {'; '.join(changes)}"
        raise UserError(f"data.directory: {given}; choose another folder, or delete this one{advice}")


@contextmanager
def _locked_folder(directory: Path) -> Iterator[None]:
    """Make a folder, and hold its lock within the context.

    Raises:
        UserError: A worker process calls this function, the folder cannot be written to or has a link in place of a
            file or folder of the preparation, or memory runs out within the context.
    """
    if getattr(multiprocessing.current_process(), "_inheriting", False):  # a worker that imports the main script
        raise UserError('data: worker processes import your script; put its code below `if __name__ == "__main__":`')
    try:
        directory.mkdir(parents=True, exist_ok=True)
        refuse_links("data.directory", directory / ".lock", directory / PARTS)
        lock = FileLock(directory / ".lock").acquire()
    except OSError as error:
        if error.errno not in NO_FOLDER:
            raise
        raise UserError(f"data.directory: {directory} cannot be written to ({error}); choose another folder") from error
    with lock:
        try:
            yield
        except MemoryError as error:
            raise UserError("data.corpus: a document does not fit into memory; split the largest documents") from error


def _accepted(tokenizer: Tokenizer, options: ShardOptions) -> Tokenizer:
    """Return a tokenizer, or raise a UserError if it has too many entries or no end-of-text token."""
    size = vocabulary_size(tokenizer)
    expected = f"at least {size}, the number of entries of the tokenizer"
    require(size <= options.vocabulary, "data.vocabulary", options.vocabulary, expected)
    end_of_text(tokenizer, options.tokenizer)
    return tokenizer


def _corpus_tokenizer(
    directory: Path, options: ShardOptions, corpus: Corpus, settings: dict[str, Any], given: Tokenizer | None
) -> Tokenizer:
    """Return the tokenizer of a preparation, after writing it to the folder of the shards.

    Args:
        directory: Folder of the shards.
        options: Options of the preparation.
        corpus: The corpus.
        settings: Settings of the preparation. They are compared with those of an interrupted preparation.
        given: The tokenizer that ``data.tokenizer`` names. It may differ from that of an interrupted preparation. None
            if the preparation trains a tokenizer. It is then read from the folder of the shards, and trained again if
            a file of the corpus has changed.

    Raises:
        UserError: The folder has an unfinished preparation with other settings, or shards or a tokenizer but no
            manifest. Or the corpus has no training document. Or the trained tokenizer has too many entries.
    """
    unfinished = directory / PARTS / "settings.json"
    if (unfinished.parent / REFUSED).exists() and read_mapping(unfinished) != settings:
        _discard(directory)  # the settings or the corpus were corrected
    if unfinished.exists():
        _compare_settings(options.location, read_mapping(unfinished), settings)
        files = [unfinished, *(Path(path) for path in corpus.files if not is_remote(path))]
        # a changed file may have the same size, and so the same settings; unlike the mtime, the ctime cannot be set
        if given is None and max(files, key=lambda path: path.stat().st_ctime_ns) == unfinished:
            return load_tokenizer(str(directory))
    elif not unfinished.parent.exists():
        for file in chain(directory.glob("*.tar"), directory.glob("tokenizer.json")):
            raise UserError(f"data.directory: {directory} has {file.name} but no manifest; choose another folder")
    tokenizer = given or _accepted(_trained_tokenizer(options, corpus), options)
    unfinished.parent.mkdir(exist_ok=True)  # made first: a tokenizer without this folder is not overwritten
    write(directory / "tokenizer.json", tokenizer.to_str())
    write(unfinished, json.dumps(settings))
    return tokenizer


def _discard(directory: Path) -> None:
    """Remove the files of an unfinished preparation from its folder."""
    for file in chain(directory.glob("*.tar"), directory.glob("tokenizer.json")):
        file.unlink()
    shutil.rmtree(directory / PARTS)


def _trained_tokenizer(options: ShardOptions, corpus: Corpus) -> Tokenizer:
    """Return the tokenizer in this package for a built-in corpus, or train one on the corpus."""
    shipped = SHIPPED / f"{options.corpus}-{options.vocabulary}.json".replace("-demo", "")
    if options.corpus in CORPORA and shipped.exists():
        return load_tokenizer(str(shipped))
    reader = CorpusReader(corpus, options.split_fractions)
    texts = _training_texts(reader)
    first = next(texts, "")
    reasons = reader.reasons() or "it is empty, or too small"
    given = f"{options.corpus!r}, which has no training document for a tokenizer: {reasons}"
    advice = "correct data.text_field or data.split_fractions, or set data.tokenizer"
    require(first != "", "data.corpus", given, f"a larger corpus; or {advice}")
    return train_tokenizer(chain([first], texts), options.vocabulary)


def _training_texts(reader: CorpusReader) -> Iterator[str]:
    """Yield texts of the training split until they have `TRAINING_BYTES` bytes in all."""
    size = 0
    for document in tqdm(reader, desc="training the tokenizer", unit=" documents", delay=1):
        if document.split == "train":
            yield document.text[:TRAINING_BYTES]
            size += len(document.text.encode())
            if size >= TRAINING_BYTES:
                return


def _write_parts(
    folder: Path, options: ShardOptions, encoder: Encoder, reader: CorpusReader, tokenise_all: Callable[..., Any]
) -> list[dict[str, Any]]:
    """Write the shards of the unfinished parts, and return a description of each part. See `prepare` for arguments.

    A description has a checksum of the tokenizer and the part's documents (``texts``), and for each split the fields of
    its `Shard`, the number of documents and their bytes. It is stored in `PARTS`.
    """
    paths, tokens = list[Path](), 0
    encoding = hashlib.blake2b(f"{encoder.end_of_text}\0{encoder.tokenizer}".encode())

    def unfinished() -> Iterator[tuple[tuple[int, str], list[Document]]]:
        for number, documents in enumerate(cut_into_parts(reader)):
            paths.append(folder / PARTS / f"{number:05d}.json")
            checksum = encoding.copy()
            checksum.update("\0".join(f"{d.split}\0{d.text}" for d in documents).encode())
            # a finished part is written again if its documents or the tokenizer have changed
            if not paths[number].exists() or read_mapping(paths[number])["texts"] != checksum.hexdigest():
                yield (number, checksum.hexdigest()), documents
            bar.update(reader.used_bytes + reader.lost_bytes - bar.n)

    with (
        tqdm(total=reader.corpus.size(), desc="tokenising", unit="B", unit_scale=True) as bar,
        closing(tokenise_all(options.prepare_workers, encoder, unfinished())) as results,
    ):
        for (number, checksum), splits in results:
            part: dict[str, Any] = {"texts": checksum}
            for name, (ids, count, size) in splits.items():
                part[name] = vars(write_shard(folder, name, number, ids)) | {"documents": count, "bytes": size}
                tokens += len(ids)
            write(paths[number], json.dumps(part))
            bar.set_postfix_str(f"{tokens / 1e6:.1f} Mtok")
    return [read_mapping(path) for path in paths]


def _write_test_documents(
    directory: Path, splits: dict[str, Split], encoder: Encoder, documents: list[Document]
) -> str:
    """Write the table of the test documents with their overlaps (see `overlap`), and return the sha256 of its file."""
    test, training = (read_shards(directory, name, splits[name].shards, encoder.dtype) for name in ("test", "train"))
    fractions = overlap(test, training, encoder.end_of_text).round(6)
    names = (document.name.encode("utf-8", "replace").decode() for document in documents)  # not every path is Unicode
    rows = zip(names, (document.group for document in documents), fractions, strict=True)
    content = "".join(json.dumps(row) + "\n" for row in rows).encode()
    write(directory / TEST_DOCUMENTS, content)
    return hashlib.sha256(content).hexdigest()


def _check_documents(options: ShardOptions, reader: CorpusReader) -> None:
    """Raise a UserError if a corpus has no documents, too many unusable ones, or not the expected checksum.

    How much text a damaged file has lost is unknown. It is accepted only if every fraction is accepted.
    """
    if not reader.used_bytes:
        _discard(Path(options.location))  # so that a corrected corpus can be prepared
        given = f"got {options.corpus!r}, which has no document that can be used: {reader.reasons() or 'it is empty'}"
        raise UserError(f"data.corpus: {given}; choose another, or set data.text_field to the name of the text column")
    fraction, limit = reader.lost_bytes / (reader.lost_bytes + reader.used_bytes), options.max_dropped_fraction
    expected = f"{fraction:.2g} or more, the fraction of {options.corpus!r} that cannot be used"
    if "damaged file" in reader.left_out:
        fraction, expected = 1.0, f"1, because the size of the lost text of {options.corpus!r} is unknown"
    if fraction > limit:
        write(Path(options.location, PARTS, REFUSED), "")
    advice = "repair the corpus, or increase data.max_dropped_fraction"
    require(fraction <= limit, "data.max_dropped_fraction", limit, f"{expected}: {reader.reasons()}; {advice}")
    text = reader.text.hexdigest()
    advice = f"delete its files in {options.source_folder} and run again; if the error remains, report it"
    given = f"{options.corpus!r}, whose text has the checksum {text}"
    require(reader.corpus.text in (None, text), "data.corpus", given, f"{reader.corpus.text}; {advice}")

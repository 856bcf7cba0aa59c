"""`build` prepares a folder of shards: in parallel, resumable, and with the same bytes on any number of workers.

One process reads the records in order and writes their tokens in order. In between, portions of records are tokenised
by all cores or a cluster (`workers`). Nothing that is written depends on where a portion ends, so neither the number of
workers nor an interruption changes the shards.
"""

import hashlib
import sqlite3
import sys
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager
from itertools import chain
from pathlib import Path
from typing import Literal

from filelock import FileLock
from tokenizers import Tokenizer
from tqdm import tqdm

from kerple.base.atomic import write
from kerple.base.errors import NO_FOLDER, NO_ROOM, UserError
from kerple.data.layout import RUN_TOKENS, RUNS_PER_SHARD, ShardLayout
from kerple.data.manifest import MANIFEST_FILE, SPLITS, Manifest, SplitEntry, read_manifest
from kerple.data.prepare import journal as journals
from kerple.data.prepare.corpora import sources
from kerple.data.prepare.encode import Encoded, digest_of, parse
from kerple.data.prepare.journal import Journal, Progress, remove_journal
from kerple.data.prepare.settings import Recipe, differences
from kerple.data.prepare.sources import Place, Record, Source
from kerple.data.prepare.workers import WORKERS, Portion
from kerple.data.prepare.writing import Writing
from kerple.data.shards import checksums, numbered
from kerple.data.tokenizer import TRAINED_HERE, end_of_text, load_tokenizer, train_tokenizer, vocabulary_size

PORTION_BYTES = 1 << 20  # raw bytes in a portion
PORTION_RECORDS = 1 << 12  # largest number of records in a portion
TRAINING_BYTES = 10**8  # bytes of the training split that a tokenizer is trained on
COMMIT_SECONDS = 2.0
LARGEST_LOSS = 0.01
REFUSED = (sqlite3.SQLITE_FULL, sqlite3.SQLITE_IOERR)  # SQLite's errors for a disk that is full or cannot be written


def build(
    directory: Path,
    recipe: Recipe,
    workers: int = 0,
    on_fault: Literal["skip", "raise"] = "skip",
    engine: Literal["local", "ray"] = "local",
    largest_loss: float = LARGEST_LOSS,
    progress: bool = True,
    run_tokens: int = RUN_TOKENS,
    runs_per_shard: int = RUNS_PER_SHARD,
    commit_seconds: float = COMMIT_SECONDS,
) -> Manifest:
    """Prepare the shards in `directory` unless they are there; an interrupted preparation goes on where it stopped.

    Several processes may call this at the same time. One of them works; the others wait and find the shards.

    Args:
        directory: Folder for tokenizer.json, the shards and manifest.json, which is written last.
        recipe: What to prepare.
        workers: Number of processes that tokenise; 0 means one per core, 1 means this process.
        on_fault: What happens to a document that is broken, not Unicode, nested too deeply or too large: `skip` counts
            it and goes on, `raise` stops.
        engine: Where the workers run: on this machine, or on a Ray cluster, where 0 workers means one per CPU.
        largest_loss: Largest share of the corpus's bytes that may be left out because of faults.
        progress: Whether to show progress bars on standard error, and to say at the end what was prepared and left out.
        run_tokens: Tokens in a member of a shard.
        runs_per_shard: Members in a shard.
        commit_seconds: Seconds between commits; a kill loses at most the work since the last one.

    Returns:
        The manifest of the folder.

    Raises:
        UserError: The corpus or the tokenizer cannot be used, the corpus holds no document or too many faults, the
            folder was prepared with other settings or from other files, or the disk is full.
    """
    if engine not in WORKERS:
        raise UserError(f"data.prepare_engine: got {engine!r}, expected one of {', '.join(WORKERS)}")
    # a finished folder is only read, so that it may lie on a disk that cannot be written to, where a lock would fail
    if (directory / MANIFEST_FILE).exists() and not (directory / journals.JOURNAL_FILE).exists():
        return check_recipe(read_manifest(directory), recipe)
    try:
        with _locked(directory):
            if (directory / MANIFEST_FILE).exists():
                remove_journal(directory)
                return check_recipe(read_manifest(directory), recipe)
            _refuse_foreign(directory)
            found = sources(recipe.corpus, recipe.text_field)
            settings = recipe.settings(found)
            sizes = {"run_tokens": run_tokens, "runs_per_shard": runs_per_shard}
            with closing(Journal(directory, settings | sizes)) as journal:
                tokenizer = _tokenizer(directory, recipe, found, journal, progress)
                vocabulary = vocabulary_size(tokenizer)
                layout = ShardLayout("uint16" if vocabulary <= 1 << 16 else "uint32", run_tokens, runs_per_shard)
                encoder = (tokenizer.to_str(), end_of_text(tokenizer, recipe.tokenizer), recipe.text_field)
                if not journal.progress.finished:
                    writing = Writing(directory, recipe, layout, journal, on_fault, commit_seconds)
                    now = journal.progress
                    portions = _portions(found, now.source, now.place, recipe.largest_document)
                    with closing(WORKERS[engine](portions, encoder, workers)) as results:
                        _write(found, writing, results, progress)
                _check_losses(directory, recipe, journal, largest_loss)
                splits = _splits(directory, layout, journal.progress, progress)
                manifest = Manifest(
                    str(directory),
                    vocabulary,
                    encoder[1],
                    hashlib.sha256((directory / "tokenizer.json").read_bytes()).hexdigest(),
                    layout,
                    splits,
                    settings,
                    dict(sorted(journal.progress.counts.items())),
                )
            manifest.write(directory)
            remove_journal(directory)
            if progress:
                print(_summary(manifest, journal.progress.reasons()), file=sys.stderr)
            return manifest
    except (OSError, sqlite3.OperationalError) as error:
        if getattr(error, "errno", None) not in NO_ROOM and getattr(error, "sqlite_errorcode", 0) & 0xFF not in REFUSED:
            raise
        raise UserError(
            f"data.directory: {directory} cannot be written to ({error}); free some space and start again, what is "
            "done is kept"
        ) from error


def check_recipe(manifest: Manifest, recipe: Recipe) -> Manifest:
    """Return the manifest of a prepared folder if it was prepared by this recipe from the files that are there now.

    Raises:
        UserError: The settings or the files differ; the message names the differences.
    """
    if told := differences(manifest.settings, recipe.settings_now()):
        raise UserError(
            f"{manifest.place}: was prepared otherwise: {told}. Give data.directory another folder, delete this one to "
            "prepare it again, or set data.corpus to null to take the shards as they are"
        )
    return manifest


@contextmanager
def _locked(directory: Path) -> Iterator[None]:
    """Make the folder, and let no other process work in it."""
    lock = FileLock(directory / ".lock")
    try:
        directory.mkdir(parents=True, exist_ok=True)
        lock.acquire()
    except OSError as error:
        if error.errno not in NO_FOLDER:
            raise
        raise UserError(
            f"data.directory: {directory} cannot be made or written to ({error}); choose another folder"
        ) from error
    try:
        yield
    finally:
        lock.release()


def _refuse_foreign(directory: Path) -> None:
    """Refuse a folder with shards, but neither manifest nor journal: they are not ours to write over."""
    if (directory / journals.JOURNAL_FILE).exists():
        return
    for split in SPLITS:
        for path in (*(path for _, path in numbered(directory, split)), directory / f"{split}.offsets"):
            if path.exists():
                raise UserError(
                    f"data.directory: got {directory}, which holds {path.name} without a {MANIFEST_FILE}; choose "
                    "another folder, or delete what is in this one"
                )


def _check_losses(directory: Path, recipe: Recipe, journal: Journal, largest_loss: float) -> None:
    """Refuse a corpus without documents, or with too many faults; warn of fewer."""
    now = journal.progress
    if not sum(now.documents.values()):
        journal.forget()  # so that the next start reads a mended corpus from its beginning
        raise UserError(
            f"data.corpus: got {recipe.corpus!r}, which holds no document that can be used: "
            f"{now.reasons() or 'it is empty'}; name another corpus, or the key or column of its text with "
            "data.text_field"
        )
    share = now.lost / max(now.lost + now.taken, 1)
    if share > largest_loss:
        raise UserError(
            f"data.largest_loss: got {largest_loss}, but {share:.2g} of the bytes of {recipe.corpus!r} cannot be used: "
            f"{now.reasons()}; mend the corpus and delete {directory}, or allow the loss with a larger "
            "data.largest_loss"
        )


def _summary(manifest: Manifest, left_out: str) -> str:
    tokens, documents = (sum(getattr(s, what) for s in manifest.splits.values()) for what in ("tokens", "documents"))
    told = f"{manifest.place}: {tokens / 1e6:.1f}M tokens of {documents:,} documents are prepared"
    return f"{told}; left out: {left_out}" if left_out else told


def _tokenizer(directory: Path, recipe: Recipe, found: list[Source], journal: Journal, progress: bool) -> Tokenizer:
    """Load or train the tokenizer, and keep it in the journal; an older tokenizer.json in the folder is overwritten."""
    if journal.tokenizer is not None:
        tokenizer = Tokenizer.from_str(journal.tokenizer)
    elif recipe.tokenizer == TRAINED_HERE:
        faults = Progress()
        texts = _training_texts(recipe, found, faults, progress)
        if (first := next(texts, None)) is None:
            told = faults.reasons() or "it is empty, or too small for its share"
            raise UserError(
                f"data.corpus: got {recipe.corpus!r}, which holds no training document to learn a tokenizer from: "
                f"{told}; name another corpus, the key or column of its text with data.text_field, other data.shares, "
                "or a tokenizer"
            )
        tokenizer = train_tokenizer(chain([first], texts), recipe.vocabulary)
    else:
        tokenizer = load_tokenizer(recipe.tokenizer)
    if (size := vocabulary_size(tokenizer)) > recipe.vocabulary:
        raise UserError(
            f"data.vocabulary: got {recipe.vocabulary}, but tokenizer {recipe.tokenizer!r} has {size} entries; set it "
            f"to {size} or more (a model may have rows to spare)"
        )
    if journal.tokenizer is None:
        journal.begin(tokenizer.to_str())
    write(directory / "tokenizer.json", tokenizer.to_str())
    return tokenizer


def _training_texts(recipe: Recipe, found: list[Source], faults: Progress, progress: bool) -> Iterator[str]:
    """Yield texts of the training split, up to `TRAINING_BYTES`; the tokenizer must not learn from the other splits."""
    used = 0
    with tqdm(desc="training the tokenizer", unit="B", unit_scale=True, delay=1, disable=not progress) as bar:
        for source in found:
            for record in source.records((0, 0), recipe.largest_document):
                text, raw, fault = parse(record.raw, record.json, recipe.text_field)
                if fault := record.fault or fault:
                    faults.leave_out(record.name, fault, record.lost)
                    continue
                if recipe.split_of(digest_of(raw)) != "train":
                    continue
                yield text
                used += len(raw)
                bar.update(len(raw))
                if used >= TRAINING_BYTES:
                    return


def _write(found: list[Source], writing: Writing, results: Iterator[tuple[Portion, Encoded]], progress: bool) -> None:
    """Write all portions under a progress bar, which counts bytes of the corpus."""
    now = writing.journal.progress
    sizes = [source.size for source in found]
    total = None if None in sizes else sum(size or 0 for size in sizes)
    before = sum(size or 0 for size in sizes[: now.source])
    with tqdm(
        total=total, initial=before, desc="tokenising", unit="B", unit_scale=True, delay=1, disable=not progress
    ) as bar:
        begin, first = time.monotonic(), sum(now.tokens.values())
        for (source, records), encoded in results:
            writing.take(source, records, encoded)
            bar.n = sum(size or 0 for size in sizes[:source]) + records[-1].consumed
            speed = (sum(now.tokens.values()) - first) / max(time.monotonic() - begin, 1e-9)
            bar.set_postfix_str(f"{speed / 1e6:.2f} Mtok/s, {sum(now.tokens.values()) / 1e6:.1f} Mtok", refresh=False)
            bar.update(0)
    writing.finish()


def _portions(found: list[Source], source: int, place: Place, limit: int) -> Iterator[Portion]:
    """Group the records from `place` of source number `source` on into portions; none holds records of two sources."""
    for number in range(source, len(found)):
        portion, size = list[Record](), 0
        for record in found[number].records(place if number == source else (0, 0), limit):
            portion.append(record)
            size += len(record.raw)
            if size >= PORTION_BYTES or len(portion) >= PORTION_RECORDS:
                yield number, portion
                portion, size = [], 0
        if portion:
            yield number, portion


def _splits(directory: Path, layout: ShardLayout, now: Progress, progress: bool) -> dict[str, SplitEntry]:
    """The manifest's entries for the finished shards, whose checksums are made of what the disk gives back."""
    splits = {}
    runs = sum(layout.runs(now.tokens[s]) for s in SPLITS)
    with tqdm(total=runs, desc="checksums", unit="run", delay=1, disable=not progress) as bar:
        for name in SPLITS:
            sums = []
            for checksum in checksums(directory, layout, name, now.tokens[name]):
                sums.append(checksum)
                bar.update()
            with (directory / f"{name}.offsets").open("rb") as file:
                offsets = hashlib.file_digest(file, "sha256").hexdigest()
            splits[name] = SplitEntry(
                name, now.tokens[name], now.documents[name], now.bytes[name], tuple(sums), offsets
            )
    return splits

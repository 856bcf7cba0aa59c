"""Corpus to shards: parallel, streaming, resumable, and the same bytes whoever does it.

One process reads records in order and writes tokens in order; between the two, batches of records are tokenised by all
cores, or a cluster (`engines`). Nothing that is written depends on where a batch ends, so the number of
workers, interruptions and commits leave no trace in the shards.
"""

import hashlib
import time
import warnings
from collections.abc import Iterator
from contextlib import closing
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
from filelock import FileLock
from tokenizers import Tokenizer
from tqdm import tqdm

from kerple.data.manifest import (
    FILE,
    RUN_TOKENS,
    RUNS_PER_SHARD,
    SPLITS,
    Layout,
    Manifest,
    Split,
    read_manifest,
    write_atomically,
)
from kerple.data.prepare.corpora import Place, Record, Source, sources
from kerple.data.prepare.encode import Encoded, digest_of, parse
from kerple.data.prepare.engines import ENGINES, Batch
from kerple.data.prepare.journal import Journal, Progress, remove_journal
from kerple.data.shards import ShardWriter, checksums
from kerple.data.tokenizer import TRAINED_HERE, end_of_text, load_tokenizer, train_tokenizer, vocabulary_size
from kerple.errors import UserError

BATCH_BYTES = 1 << 20  # raw bytes tokenised together
BATCH_RECORDS = 1 << 12
TRAINING_BYTES = 10**8  # of the training split that a tokenizer is trained on
COMMIT_SECONDS = 2.0


@dataclass(frozen=True)
class Recipe:
    """What the bytes of the shards depend on; nothing else does.

    Args:
        corpus: See `kerple.data.prepare.corpora.sources`.
        tokenizer: "bpe" to train one here, else see `kerple.data.tokenizer.load_tokenizer`.
        vocabulary: Entries of a tokenizer trained here; for any other one, the most it may have.
        shares: Of documents in train, validation and test.
        text_field: Key or column of the text.
        drop_duplicates: Keep only the first of documents with equal text.
        largest_document: Bytes beyond which a document, or a line of JSON, is a fault.
    """

    corpus: str
    tokenizer: str = TRAINED_HERE
    vocabulary: int = 2048
    shares: tuple[float, float, float] = (0.9, 0.05, 0.05)
    text_field: str = "text"
    drop_duplicates: bool = False
    largest_document: int = 1 << 26

    def __post_init__(self) -> None:
        shares = self.shares
        if len(shares) != 3 or not all(0 <= s <= 1 for s in shares) or abs(sum(shares) - 1) > 1e-6:
            raise UserError(
                f"shares: expected three numbers, for train, validation, test, that add up to 1, got {shares}"
            )

    def settings(self) -> dict[str, Any]:
        return {**asdict(self), "shares": list(self.shares)}

    def split_of(self, digest: bytes) -> str:
        """The split of a document, by a hash of its text alone: equal texts never lie on two sides."""
        place = int.from_bytes(digest[:8], "big") / 2**64
        return (
            "train" if place < self.shares[0] else "validation" if place < self.shares[0] + self.shares[1] else "test"
        )


def build(
    directory: Path,
    recipe: Recipe,
    workers: int = 0,
    on_fault: Literal["skip", "raise"] = "skip",
    engine: Literal["local", "ray"] = "local",
    progress: bool = True,
    run_tokens: int = RUN_TOKENS,
    runs_per_shard: int = RUNS_PER_SHARD,
    commit_seconds: float = COMMIT_SECONDS,
) -> Manifest:
    """Prepare `directory` unless it is prepared; go on where an interrupted preparation stopped.

    Several processes may call this at the same time: one works, the others wait and find it done.

    Args:
        directory: Where tokenizer.json, the shards and at last manifest.json go.
        recipe: What to prepare.
        workers: Processes that tokenise; 0: one a core. 1: this one.
        on_fault: Whether one that is broken, not Unicode, too deep or too large is left out and counted, or fatal.
        engine: Where they run: on this machine, or a Ray cluster, of which 0 workers are all CPUs.
        progress: Show progress bars on standard error.
        run_tokens, runs_per_shard: Sizes of members and shards.
        commit_seconds: At most this much work is lost by a kill.

    Raises:
        UserError: The corpus or the tokenizer cannot be used, or the directory holds something prepared otherwise.
    """
    if engine not in ENGINES:
        raise UserError(f"prepare_engine: got {engine!r}, expected one of {', '.join(ENGINES)}")
    directory.mkdir(parents=True, exist_ok=True)
    with FileLock(directory / ".lock"):
        if (directory / FILE).exists():
            remove_journal(directory)
            return check_recipe(read_manifest(directory), recipe)
        found = sources(recipe.corpus, recipe.text_field)
        tokenizer = _tokenizer(directory, recipe, found, progress)
        vocabulary = vocabulary_size(tokenizer)
        if vocabulary > recipe.vocabulary:
            raise UserError(
                f"vocabulary: {recipe.vocabulary}, but tokenizer {recipe.tokenizer!r} has {vocabulary} entries; "
                f"set it to {vocabulary} or more (a model may have rows to spare)"
            )
        layout = Layout("uint16" if vocabulary <= 1 << 16 else "uint32", run_tokens, runs_per_shard)
        with closing(Journal(directory, {**recipe.settings(), **asdict(layout)})) as journal:
            encoder = (tokenizer.to_str(), end_of_text(tokenizer, recipe.tokenizer), recipe.text_field)
            if not journal.progress.finished:
                writing, now = _Writing(directory, recipe, layout, journal, on_fault, commit_seconds), journal.progress
                batches = _batches(found, now.source, now.place, recipe.largest_document)
                with closing(ENGINES[engine](batches, encoder, workers)) as results:
                    _write(found, writing, results, progress)
            manifest = _manifest(directory, recipe, layout, journal.progress, vocabulary, encoder[1], progress)
        manifest.write(directory)
        remove_journal(directory)
        _report(manifest)
        return manifest


def check_recipe(manifest: Manifest, recipe: Recipe) -> Manifest:
    """Raise a ValueError that names each setting in which a prepared directory differs from what is asked for."""
    asked = recipe.settings()
    differing = {k: (manifest.settings.get(k), v) for k, v in asked.items() if manifest.settings.get(k) != v}
    if differing:
        told = "; ".join(f"{key} was {was!r}, is {now!r}" for key, (was, now) in differing.items())
        raise UserError(
            f"{manifest.place}: was prepared with other settings: {told}. Give data.directory another folder, "
            "or set data.corpus to null to take the shards as they are"
        )
    return manifest


def _tokenizer(directory: Path, recipe: Recipe, found: list[Source], progress: bool) -> Tokenizer:
    path = directory / "tokenizer.json"
    if path.exists():
        return load_tokenizer(str(path))
    if recipe.tokenizer == TRAINED_HERE:
        tokenizer = train_tokenizer(_training_texts(recipe, found, progress), recipe.vocabulary)
    else:
        tokenizer = load_tokenizer(recipe.tokenizer)
    write_atomically(path, tokenizer.to_str().encode())
    return tokenizer


def _training_texts(recipe: Recipe, found: list[Source], progress: bool) -> Iterator[str]:
    """Texts of the training split only: the tokenizer must not have seen what it is tested on."""
    used = 0
    with tqdm(desc="training the tokenizer", unit="B", unit_scale=True, disable=not progress) as bar:
        for source in found:
            for record in source.records((0, 0), recipe.largest_document):
                text, raw, fault = parse(record.raw, record.json, recipe.text_field)
                if fault or recipe.split_of(digest_of(raw)) != "train":
                    continue
                yield text
                used += len(raw)
                bar.update(len(raw))
                if used >= TRAINING_BYTES:
                    return


class _Writing:
    """Takes encoded batches in order, splits, writes, commits."""

    def __init__(
        self, directory: Path, recipe: Recipe, layout: Layout, journal: Journal, on_fault: str, commit_seconds: float
    ) -> None:
        self.recipe, self.journal, self.on_fault, self.commit_seconds = recipe, journal, on_fault, commit_seconds
        now = journal.progress
        self.writers = {s: ShardWriter(directory, s, layout, now.tokens[s], now.documents[s]) for s in SPLITS}
        self.last_commit = time.monotonic()

    def take(self, source: int, records: list[Record], encoded: Encoded) -> None:
        now = self.journal.progress
        ends = np.cumsum(encoded.lengths)
        kept: dict[str, list[int]] = {split: [] for split in SPLITS}
        for i, record in enumerate(records):
            if fault := encoded.faults[i]:
                if self.on_fault == "raise" and fault != "empty":
                    raise UserError(f"{record.name}: {fault}; data.on_fault: skip counts such documents and goes on")
                now.counts[fault.partition(":")[0]] = now.counts.get(fault.partition(":")[0], 0) + 1
                continue
            if not self.journal.is_new(encoded.digests[i]):
                now.counts["duplicates"] = now.counts.get("duplicates", 0) + 1
                if self.recipe.drop_duplicates:
                    continue
            split = self.recipe.split_of(encoded.digests[i])
            kept[split].append(i)
            now.bytes[split] += encoded.sizes[i]
        for split, writer in self.writers.items():
            own = kept[split]
            if own:
                tokens = np.concatenate([encoded.tokens[ends[i] - encoded.lengths[i] : ends[i]] for i in own])
                starts = np.cumsum([0, *encoded.lengths[own[:-1]]]).astype(np.uint64)
                writer.append(tokens, starts)
            now.tokens[split], now.documents[split] = writer.tokens, writer.documents
        now.source, now.place = source, records[-1].next
        if time.monotonic() - self.last_commit >= self.commit_seconds:
            self.commit()

    def commit(self) -> None:
        for writer in self.writers.values():
            writer.sync()
        self.journal.commit()
        self.last_commit = time.monotonic()

    def finish(self) -> None:
        self.commit()
        for writer in self.writers.values():
            writer.close()
        self.journal.progress.finished = True
        self.journal.commit()


def _write(found: list[Source], writing: _Writing, results: Iterator[tuple[Batch, Encoded]], progress: bool) -> None:
    now = writing.journal.progress
    sizes = [source.size for source in found]
    total = None if None in sizes else sum(size or 0 for size in sizes)
    before = sum(size or 0 for size in sizes[: now.source])
    with tqdm(total=total, initial=before, desc="tokenising", unit="B", unit_scale=True, disable=not progress) as bar:
        begin, first = time.monotonic(), sum(now.tokens.values())
        for (source, records), encoded in results:
            writing.take(source, records, encoded)
            bar.n = sum(size or 0 for size in sizes[:source]) + records[-1].consumed
            speed = (sum(now.tokens.values()) - first) / max(time.monotonic() - begin, 1e-9)
            bar.set_postfix_str(f"{speed / 1e6:.2f} Mtok/s, {sum(now.tokens.values()) / 1e6:.1f} Mtok", refresh=False)
            bar.update(0)
    writing.finish()


def _batches(found: list[Source], source: int, place: Place, limit: int) -> Iterator[Batch]:
    for number in range(source, len(found)):
        batch, size = list[Record](), 0
        for record in found[number].records(place if number == source else (0, 0), limit):
            batch.append(record)
            size += len(record.raw)
            if size >= BATCH_BYTES or len(batch) >= BATCH_RECORDS:
                yield number, batch
                batch, size = [], 0
        if batch:
            yield number, batch


def _manifest(
    directory: Path, recipe: Recipe, layout: Layout, now: Progress, vocabulary: int, ending: int, progress: bool
) -> Manifest:
    splits = {}
    with tqdm(
        total=sum(layout.runs(now.tokens[s]) for s in SPLITS), desc="checksums", unit="run", disable=not progress
    ) as bar:
        for name in SPLITS:
            sums = []
            for checksum in checksums(directory, layout, name, now.tokens[name]):
                sums.append(checksum)
                bar.update()
            with (directory / f"{name}.offsets").open("rb") as file:
                offsets = hashlib.file_digest(file, "sha256").hexdigest()
            splits[name] = Split(name, now.tokens[name], now.documents[name], now.bytes[name], tuple(sums), offsets)
    tokenizer = hashlib.sha256((directory / "tokenizer.json").read_bytes()).hexdigest()
    return Manifest(
        str(directory),
        vocabulary,
        ending,
        tokenizer,
        layout,
        splits,
        recipe.settings(),
        dict(sorted(now.counts.items())),
    )


def _report(manifest: Manifest) -> None:
    left_out = {reason: n for reason, n in manifest.counts.items() if reason not in ("empty", "duplicates")}
    if left_out:
        told = ", ".join(f"{count} × {reason}" for reason, count in left_out.items())
        warnings.warn(f"{manifest.place}: documents left out: {told}", stacklevel=3)

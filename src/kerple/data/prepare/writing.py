"""Writing of tokenised documents to the shards of their splits, with commits, so that a kill loses little work."""

import time
from pathlib import Path

import numpy as np

from kerple.base.errors import UserError
from kerple.data.layout import ShardLayout
from kerple.data.manifest import SPLITS
from kerple.data.prepare.encode import Encoded
from kerple.data.prepare.journal import Journal
from kerple.data.prepare.settings import Recipe
from kerple.data.prepare.sources import Record
from kerple.data.shards import ShardWriter


class Writing:
    """Writes tokenised portions in order: it assigns their documents to the splits and commits now and then."""

    def __init__(
        self,
        directory: Path,
        recipe: Recipe,
        layout: ShardLayout,
        journal: Journal,
        on_fault: str,
        commit_seconds: float,
    ) -> None:
        self.recipe, self.journal, self.on_fault, self.commit_seconds = recipe, journal, on_fault, commit_seconds
        now = journal.progress
        self.writers = {s: ShardWriter(directory, s, layout, now.tokens[s], now.documents[s]) for s in SPLITS}
        self.last_commit = time.monotonic()

    def take(self, source: int, records: list[Record], encoded: Encoded) -> None:
        """Append a portion of source number `source` to the shards; commit after `commit_seconds`.

        Raises:
            UserError: A document has a fault, and `on_fault` is `raise`.
        """
        now = self.journal.progress
        ends = np.cumsum(encoded.lengths)
        kept: dict[str, list[int]] = {split: [] for split in SPLITS}
        for i, record in enumerate(records):
            if fault := encoded.faults[i]:
                if self.on_fault == "raise" and fault != "empty":
                    raise UserError(f"{record.name}: {fault}; data.on_fault: skip counts such documents and goes on")
                now.leave_out(record.name, fault, record.lost or len(record.raw))
                continue
            now.taken += len(record.raw)
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
        """Make everything so far survive a kill: first the shards, then the journal that counts on them."""
        for writer in self.writers.values():
            writer.sync()
        self.journal.commit()
        self.last_commit = time.monotonic()

    def finish(self) -> None:
        """Close the shards, and say so in the journal."""
        self.commit()
        for writer in self.writers.values():
            writer.close()
        self.journal.progress.finished = True
        self.journal.commit()

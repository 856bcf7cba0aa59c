"""The journal of a preparation: how far it has come, kept in a database on disk.

Two things have to agree after a kill: the place in the corpus with the sizes of the shards written for it, and the
digests of all documents before that place. SQLite writes both in one transaction. The digests are looked up on disk, so
memory does not grow with the corpus.
"""

import json
import sqlite3
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from kerple.base.errors import UserError
from kerple.data.manifest import SPLITS
from kerple.data.prepare.settings import differences

JOURNAL_FILE = "journal.sqlite"


@dataclass
class Progress:
    """A point in the corpus before which everything is in the shards, and what they hold.

    Args:
        source: Number of the source that is being read.
        place: Place in that source.
        tokens: Tokens written to each split.
        documents: Documents written to each split.
        bytes: UTF-8 bytes of those documents.
        counts: Number of documents left out for each reason, and of duplicates.
        examples: For each reason, the first document that was left out.
        lost: Raw bytes of the documents left out; empty ones do not count.
        taken: Raw bytes of the other documents.
        finished: Whether the whole corpus has been read.
    """

    source: int = 0
    place: tuple[int, int] = (0, 0)
    tokens: dict[str, int] = field(default_factory=lambda: dict.fromkeys(SPLITS, 0))
    documents: dict[str, int] = field(default_factory=lambda: dict.fromkeys(SPLITS, 0))
    bytes: dict[str, int] = field(default_factory=lambda: dict.fromkeys(SPLITS, 0))
    counts: dict[str, int] = field(default_factory=dict)
    examples: dict[str, str] = field(default_factory=dict)
    lost: int = 0
    taken: int = 0
    finished: bool = False

    def leave_out(self, name: str, fault: str, lost: int) -> None:
        """Count a record that is left out.

        Args:
            name: What messages call it.
            fault: Its kind of fault, and after a colon the details.
            lost: Raw bytes that it costs.
        """
        reason = fault.partition(":")[0]
        self.counts[reason] = self.counts.get(reason, 0) + 1
        if reason != "empty":
            self.examples.setdefault(reason, f"{name}: {fault}")
            self.lost += lost

    def reasons(self) -> str:
        """What was left out and why, as part of a message; empty if nothing was."""
        return "; ".join(f"{self.counts[reason]} × {example}" for reason, example in self.examples.items())


class Journal:
    """The journal of one folder; it is made or continued.

    Args:
        directory: Folder of the shards.
        settings: What is being prepared.

    Attributes:
        progress (Progress): How far the preparation has come.
        tokenizer (str | None): The tokenizer as JSON, None before `begin`.

    Raises:
        UserError: The folder holds an interrupted preparation with other settings, or a journal that cannot be read.
    """

    def __init__(self, directory: Path, settings: dict[str, Any]) -> None:
        path = directory / JOURNAL_FILE
        try:
            self.database = sqlite3.connect(path, isolation_level=None)
            self.database.execute("PRAGMA journal_mode = WAL")
            self.database.execute("PRAGMA synchronous = FULL")
            self.database.execute("PRAGMA cache_size = -65536")  # KiB
            self.database.execute("BEGIN IMMEDIATE")
            self.database.execute("CREATE TABLE IF NOT EXISTS seen (digest BLOB PRIMARY KEY) WITHOUT ROWID")
            self.database.execute("CREATE TABLE IF NOT EXISTS state (key TEXT PRIMARY KEY, value TEXT)")
            rows = self.database.execute("SELECT key, value FROM state").fetchall()
            stored = {key: json.loads(value) for key, value in rows}
        except (sqlite3.DatabaseError, ValueError) as error:
            if isinstance(error, sqlite3.OperationalError):  # the disk is full; `build` says so
                raise
            raise UserError(f"{path}: cannot be used ({error}); delete the folder to prepare it again") from error
        if told := differences(stored.get("settings", settings), settings):
            self.close()
            raise UserError(
                f"{directory}: holds an interrupted preparation, and since then {told}; delete the folder to prepare "
                "it again, or give data.directory another one"
            )
        self.settings: dict[str, Any] = stored.get("settings", settings)
        self.tokenizer: str | None = stored.get("tokenizer")
        self.progress = Progress(**stored.get("progress", {}))
        self.progress.place = (self.progress.place[0], self.progress.place[1])

    def begin(self, tokenizer: str) -> None:
        """Commit the settings and the tokenizer, with which the next start goes on."""
        self.tokenizer = tokenizer
        self._put("settings", self.settings)
        self._put("tokenizer", tokenizer)
        self.commit()

    def forget(self) -> None:
        """Delete everything in the journal, so that the next start begins from nothing."""
        self.database.execute("DELETE FROM state")
        self.database.execute("DELETE FROM seen")
        self.database.execute("COMMIT")
        self.database.execute("BEGIN IMMEDIATE")

    def is_new(self, digest: bytes) -> bool:
        """Whether no document before had this digest; the digest is recorded."""
        return self.database.execute("INSERT OR IGNORE INTO seen VALUES (?)", (digest,)).rowcount == 1

    def commit(self) -> None:
        """Commit `progress` and all digests so far; after this they survive a kill or a power cut."""
        self._put("progress", asdict(self.progress))
        self.database.execute("COMMIT")
        self.database.execute("BEGIN IMMEDIATE")

    def close(self) -> None:
        """Close the database without what was not committed."""
        self.database.rollback()
        self.database.close()

    def _put(self, key: str, value: Any) -> None:
        self.database.execute("INSERT OR REPLACE INTO state VALUES (?, ?)", (key, json.dumps(value)))


def remove_journal(directory: Path) -> None:
    """Delete the journal of a folder, if there is one, and the files that SQLite keeps beside it."""
    for suffix in ("", "-wal", "-shm"):
        (directory / (JOURNAL_FILE + suffix)).unlink(missing_ok=True)

"""How far a preparation has come, on disk, in one transaction at a time.

SQLite keeps the two things that have to agree after a kill: the place in the corpus with the sizes of what was written
for it, and the digests of all documents so far. The digests live on disk too, so memory does not grow with the corpus.
"""

import json
import sqlite3
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from kerple.data.manifest import SPLITS
from kerple.data.prepare.recipe import differences
from kerple.errors import UserError

FILE = "journal.sqlite"


@dataclass
class Progress:
    """Everything before this point is in the shards.

    Args:
        source: Number of the source being read.
        place: Where to go on in it.
        tokens, documents, bytes: Written so far, by split.
        counts: Documents left out, by reason, and duplicates.
        examples: The first document of each reason.
        lost: Raw bytes of documents left out, not those of empty ones.
        taken: Raw bytes of the other documents.
        finished: No record is left.
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
        """Count a document, or what else has the fault."""
        reason = fault.partition(":")[0]
        self.counts[reason] = self.counts.get(reason, 0) + 1
        if reason != "empty":
            self.examples.setdefault(reason, f"{name}: {fault}")
            self.lost += lost

    def reasons(self) -> str:
        """What was left out and why, for a message."""
        return "; ".join(f"{self.counts[reason]} × {example}" for reason, example in self.examples.items())


class Journal:
    """The journal of one directory.

    Args:
        directory: Where the shards are written.
        settings: What is being prepared; a journal of other settings belongs to another corpus.

    Attributes:
        progress: How far the preparation has come.
        tokenizer: The tokenizer as text, None before `begin`.

    Raises:
        UserError: The directory holds an interrupted preparation with other settings, or no journal that can be read.
    """

    def __init__(self, directory: Path, settings: dict[str, Any]) -> None:
        path = directory / FILE
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
            if isinstance(error, sqlite3.OperationalError):  # the disk is full
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
        """Make the settings and the tokenizer survive: the next start goes on with them."""
        self.tokenizer = tokenizer
        self._put("settings", self.settings)
        self._put("tokenizer", tokenizer)
        self.commit()

    def forget(self) -> None:
        """Make the next start one from the beginning."""
        self.database.execute("DELETE FROM state")
        self.database.execute("DELETE FROM seen")
        self.database.execute("COMMIT")
        self.database.execute("BEGIN IMMEDIATE")

    def is_new(self, digest: bytes) -> bool:
        """Whether no document so far had this digest; from now on one has."""
        return self.database.execute("INSERT OR IGNORE INTO seen VALUES (?)", (digest,)).rowcount == 1

    def commit(self) -> None:
        """Make `progress` and every digest so far survive whatever comes."""
        self._put("progress", asdict(self.progress))
        self.database.execute("COMMIT")
        self.database.execute("BEGIN IMMEDIATE")

    def close(self) -> None:
        """Drop what was not committed."""
        self.database.rollback()
        self.database.close()

    def _put(self, key: str, value: Any) -> None:
        self.database.execute("INSERT OR REPLACE INTO state VALUES (?, ?)", (key, json.dumps(value)))


def remove_journal(directory: Path) -> None:
    """Delete the journal and what SQLite keeps beside it; one that is not there is fine."""
    for suffix in ("", "-wal", "-shm"):
        (directory / (FILE + suffix)).unlink(missing_ok=True)

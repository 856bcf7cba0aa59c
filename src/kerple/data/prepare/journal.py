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
        finished: No record is left.
    """

    source: int = 0
    place: tuple[int, int] = (0, 0)
    tokens: dict[str, int] = field(default_factory=lambda: dict.fromkeys(SPLITS, 0))
    documents: dict[str, int] = field(default_factory=lambda: dict.fromkeys(SPLITS, 0))
    bytes: dict[str, int] = field(default_factory=lambda: dict.fromkeys(SPLITS, 0))
    counts: dict[str, int] = field(default_factory=dict)
    finished: bool = False


class Journal:
    """The journal of one directory.

    Args:
        directory: Where the shards are written.
        settings: What is being prepared; a journal of other settings belongs to another corpus.

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
            stored = dict(self.database.execute("SELECT key, value FROM state"))
        except sqlite3.Error as error:
            raise UserError(f"{path}: cannot be used ({error}); delete the folder to prepare it again") from error
        if "settings" in stored and json.loads(stored["settings"]) != json.loads(json.dumps(settings)):
            raise UserError(
                f"{directory}: holds an interrupted preparation with other settings, {stored['settings']}; "
                "delete the folder, or give data.directory another one"
            )
        self._put("settings", settings)
        self.progress = Progress(**json.loads(stored["progress"])) if "progress" in stored else Progress()
        self.progress.place = (self.progress.place[0], self.progress.place[1])

    def is_new(self, digest: bytes) -> bool:
        """Whether no document so far had this digest; from now on one has."""
        return self.database.execute("INSERT OR IGNORE INTO seen VALUES (?)", (digest,)).rowcount == 1

    def commit(self) -> None:
        """Make `progress` and every digest so far survive whatever comes."""
        self._put("progress", asdict(self.progress))
        self.database.execute("COMMIT")
        self.database.execute("BEGIN IMMEDIATE")

    def close(self) -> None:
        """Forget what was not committed."""
        self.database.rollback()
        self.database.close()

    def _put(self, key: str, value: Any) -> None:
        self.database.execute("INSERT OR REPLACE INTO state VALUES (?, ?)", (key, json.dumps(value)))


def remove_journal(directory: Path) -> None:
    """Delete the journal and what SQLite keeps beside it; one that is not there is fine."""
    for suffix in ("", "-wal", "-shm"):
        (directory / (FILE + suffix)).unlink(missing_ok=True)

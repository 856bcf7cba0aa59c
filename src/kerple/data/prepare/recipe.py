"""What a preparation depends on, kept with its shards so that a later run notices a change."""

import hashlib
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from kerple.data.files import is_remote, open_bytes
from kerple.data.prepare.corpora import HUB, Source, sources
from kerple.data.tokenizer import TRAINED_HERE
from kerple.errors import UserError

HASHED_BYTES = 1 << 28  # a corpus up to this size is known by its content, a larger one by the times of its files


@dataclass(frozen=True)
class Recipe:
    """The settings that the bytes of the shards depend on, beside the corpus itself.

    Args:
        corpus: See `kerple.data.prepare.corpora.sources`.
        tokenizer: "bpe" to train one here, else see `kerple.data.tokenizer.load_tokenizer`.
        vocabulary: Entries of a tokenizer trained here; for any other one, the most it may have.
        shares: Shares of the documents in train, validation and test.
        text_field: Key or column of the text.
        drop_duplicates: Keep only the first of documents with equal text.
        largest_document: A document, or a line of JSON, of more bytes than this is a fault.

    Raises:
        UserError: The shares are no shares.
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
                f"data.shares: got {shares}, expected three numbers, for train, validation, test, that add up to 1"
            )

    def settings(self, found: list[Source]) -> dict[str, Any]:
        """The recipe and the state of its sources, as JSON holds them."""
        return {**asdict(self), "shares": list(self.shares), "sources": _states(found, self.tokenizer)}

    def settings_now(self) -> dict[str, Any]:
        """As `settings`, without "sources" where the corpus is not on this machine: shards may be used without it."""
        settings = {**asdict(self), "shares": list(self.shares)}
        if is_remote(self.corpus) or self.corpus.startswith(HUB):
            return settings
        try:
            return self.settings(sources(self.corpus, self.text_field))
        except UserError:
            return settings

    def split_of(self, digest: bytes) -> str:
        """The split of a document, by a hash of its text alone: equal texts never lie on two sides."""
        place = int.from_bytes(digest[:8], "big") / 2**64
        train, validation, _ = self.shares
        return "train" if place < train else "validation" if place < train + validation else "test"


def differences(before: dict[str, Any], now: dict[str, Any]) -> str:
    """Say how two settings differ, for a message; the empty string if they do not.

    Args:
        before: Settings from a manifest or a journal. One that does not tell its sources is not compared in them.
        now: The settings asked for; so is this one.
    """
    told = [f"{key} was {before.get(key)!r}, is {now[key]!r}" for key in now if before.get(key) != now[key]]
    recorded = before.get("sources")
    if "sources" in now and recorded != now["sources"]:
        told = [phrase for phrase in told if not phrase.startswith("sources ")]
        if isinstance(recorded, list) and all(isinstance(state, dict) for state in recorded):
            told += _changes({str(s.get("name")): s for s in recorded}, {s["name"]: s for s in now["sources"]})
    return "; ".join(told if len(told) <= 4 else [*told[:3], f"and {len(told) - 3} more changes"])


def _changes(before: dict[str, Any], now: dict[str, Any]) -> list[str]:
    told = []
    for name in {**now, **before}:
        if name not in now or name not in before:
            told.append(f"{name} is {'new' if name in now else 'gone'}")
        elif before[name] != now[name]:
            was, is_now = (
                f"{state.get('files')} files of {state.get('bytes')} bytes" for state in (before[name], now[name])
            )
            told.append(f"{name} was {was}, is {is_now}" if was != is_now else f"the content of {name} was changed")
    return told


def _states(found: list[Source], tokenizer: str) -> list[dict[str, Any]]:
    """For each source, and a tokenizer from a file, its name, number of files, their bytes, and a sha256.

    The sha256 is over the files' names, sizes and contents; over times of modification instead of contents where the
    corpus is larger than `HASHED_BYTES`. What lies behind a URL has none.
    """
    named = [(source.name, source.paths, source.size) for source in found]
    file = Path(tokenizer, "tokenizer.json") if Path(tokenizer).is_dir() else Path(tokenizer)
    if file.is_file():
        named.append((tokenizer, [str(file)], file.stat().st_size))
    by_content = sum(size or 0 for _, _, size in named) <= HASHED_BYTES
    return [
        {"name": name, "files": len(paths), "bytes": size, "sha256": _digest(paths, by_content)}
        for name, paths, size in named
    ]


def _digest(paths: list[str], by_content: bool) -> str | None:
    if not paths or is_remote(paths[0]):
        return None
    digest = hashlib.sha256()
    for path in map(Path, paths):
        state = path.stat()
        digest.update(f"{path.name}\0{state.st_size}\0{0 if by_content else state.st_mtime_ns}\0".encode())
        if by_content:
            with open_bytes(str(path)) as file:
                digest.update(file.read())
    return digest.hexdigest()

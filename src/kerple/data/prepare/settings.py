"""Settings of a preparation of shards and the state of its corpus, kept in the manifest so that a change is noticed."""

import hashlib
import re
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from kerple.base.errors import UserError
from kerple.data.files import bare, is_remote, open_bytes
from kerple.data.prepare.corpora import HUB, sources
from kerple.data.prepare.sources import Source
from kerple.data.tokenizer import OF_A_MODEL, TRAINED_HERE

HASHED_BYTES = 1 << 28  # up to this size a corpus is known by its content, above by its files' times


@dataclass(frozen=True)
class Recipe:
    """The settings that determine the bytes of the shards, together with the corpus.

    Args:
        corpus: Name of the corpus, see `kerple.data.prepare.corpora.sources`.
        tokenizer: `bpe` to train one, or a source for `kerple.data.tokenizer.load_tokenizer`.
        vocabulary: Entries of a tokenizer that is trained; the largest number of entries of any other.
        shares: Shares of the documents in train, validation and test.
        text_field: Key or column of the text.
        drop_duplicates: Whether only the first of several documents with equal text is kept.
        largest_document: Largest number of bytes in a document or a line of JSON.

    Raises:
        UserError: The shares are not three numbers from 0 to 1 that add up to 1.
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
        """The recipe and the state of its sources, as the manifest's JSON holds them."""
        return {**asdict(self), "shares": list(self.shares), "sources": _states(found, self.tokenizer)}

    def settings_now(self) -> dict[str, Any]:
        """As `settings`, but without "sources" if the corpus is not on this machine; shards are usable without."""
        settings = {**asdict(self), "shares": list(self.shares)}
        if is_remote(self.corpus) or self.corpus.startswith(HUB):
            return settings
        try:
            return self.settings(sources(self.corpus, self.text_field))
        except UserError:
            return settings

    def split_of(self, digest: bytes) -> str:
        """The split of a document, by its digest alone: documents with equal texts are in the same split."""
        place = int.from_bytes(digest[:8], "big") / 2**64
        train, validation, _ = self.shares
        return "train" if place < train else "validation" if place < train + validation else "test"


def differences(before: dict[str, Any], now: dict[str, Any]) -> str:
    """Say how two settings differ, as part of a message; empty if they do not. Sources are compared if both name them.

    Args:
        before: The settings in a manifest or a journal.
        now: The settings that are asked for.
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
    """Name, number of files, bytes and sha256 of each source, and of a tokenizer that is read from a file.

    The sha256 covers the files' names, sizes and contents. For a corpus of more than `HASHED_BYTES` it covers the times
    of modification instead of the contents. Sources at a URL have none.
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


def default_directory(corpus: str, tokenizer: str, vocabulary: int) -> str:
    """The folder data/<corpus>-<tokenizer>, made of the last part of each name without its endings and patterns."""
    parts = bare(corpus.removeprefix(HUB)).replace(":", "/").split("/")
    names = [re.sub(r"[*?\[\]]+", "-", part.partition(".")[0]).strip("- ") for part in parts]
    name = next(filter(None, reversed(names)), "corpus")
    kind = (
        f"{tokenizer}{vocabulary}"
        if tokenizer == TRAINED_HERE
        else Path(tokenizer.removeprefix(OF_A_MODEL).removesuffix("/tokenizer.json")).stem
    )
    return f"data/{name}-{kind}"

"""`manifest.json`, which says what a folder of shards holds, and the checks of one from an unknown source.

The layout of shards is a function of a few numbers: run i of a split holds its tokens i·R .. (i + 1)·R - 1 and is the
member `<split>-<i>.u16` of shard i // runs_per_shard. So a manifest is checked by computing what it has to say.
"""

import hashlib
import json
import math
import re
import warnings
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kerple.base.atomic import write
from kerple.base.errors import UserError
from kerple.data.layout import ShardLayout

FORMAT = 2  # a manifest of format 1 has no checksum of its own
MANIFEST_FILE = "manifest.json"
SPLITS = ("train", "validation", "test")
SHA256 = re.compile(r"[0-9a-f]{64}")
LARGEST_COUNT = 1 << 48  # tokens, bytes or documents; a larger number is an attempt to overflow something


@dataclass(frozen=True)
class SplitEntry:
    """What the manifest says of one split.

    Args:
        name: `train`, `validation` or `test`.
        tokens: Number of tokens.
        documents: Number of documents.
        bytes: UTF-8 bytes of the documents; end-of-text tokens stand for none.
        checksums: sha256 of the token ids of each run.
        offsets: sha256 of the file `<name>.offsets`.
    """

    name: str
    tokens: int
    documents: int
    bytes: int
    checksums: tuple[str, ...]
    offsets: str

    @property
    def bytes_per_token(self) -> float:
        """Mean number of bytes per token, NaN for an empty split."""
        return self.bytes / self.tokens if self.tokens else math.nan

    @property
    def offsets_file(self) -> str:
        """Name of the file that holds the index of the first token of each document, as little-endian uint64."""
        return f"{self.name}.offsets"


@dataclass(frozen=True)
class Manifest:
    """Contents of a folder of shards.

    Args:
        place: Path or URL of the folder, for messages.
        vocabulary: Number of token ids; every id in every shard is below it.
        end_of_text: Id of the token that ends each document.
        tokenizer: sha256 of the `tokenizer.json` beside the shards.
        layout: Names, sizes and dtype of the shards.
        splits: The entries of train, validation and test by their names.
        settings: What the shards were prepared from; two preparations with equal settings write equal bytes.
        counts: Number of documents left out for each reason, and of duplicates.
    """

    place: str
    vocabulary: int
    end_of_text: int
    tokenizer: str
    layout: ShardLayout
    splits: dict[str, SplitEntry]
    settings: dict[str, Any]
    counts: dict[str, int]

    def to_json(self) -> str:
        """The text of manifest.json, with a checksum of its own."""
        layout = self.layout
        return signed(
            {
                "format": FORMAT,
                "vocabulary": self.vocabulary,
                "end_of_text": self.end_of_text,
                "tokenizer": {"file": "tokenizer.json", "sha256": self.tokenizer},
                "dtype": layout.dtype,
                "run_tokens": layout.run_tokens,
                "runs_per_shard": layout.runs_per_shard,
                "settings": self.settings,
                "counts": self.counts,
                "splits": {s.name: _split_to_json(s, layout) for s in self.splits.values()},
            }
        )

    def write(self, directory: Path) -> None:
        """Write manifest.json atomically. It is written after all other files: a folder without one is unfinished."""
        write(directory / MANIFEST_FILE, self.to_json())


def signed(entries: dict[str, Any]) -> str:
    """JSON of a manifest's entries and their sha256, which covers what no shard can confirm: bytes and counts."""
    return json.dumps({**entries, "sha256": _sha256(entries)}, indent=1)


def _sha256(entries: dict[str, Any]) -> str:
    """sha256 of all entries but the checksum itself, whatever their order and indentation."""
    content = {key: value for key, value in entries.items() if key != "sha256"}
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()


def read_manifest(directory: Path) -> Manifest:
    """Read and check `directory`/manifest.json.

    Raises:
        UserError: The file is missing, is not JSON or contradicts itself; the message names the file and the entry.
    """
    path = directory / MANIFEST_FILE
    try:
        return parse_manifest(path.read_bytes(), str(path))
    except OSError as error:
        raise UserError(f"{path}: cannot be read ({error.strerror}); `python run.py prepare` writes it") from error


def parse_manifest(content: bytes, name: str) -> Manifest:
    """Check the bytes of a manifest and return what they say; messages call the file `name`.

    Raises:
        UserError: As `read_manifest`.
    """
    try:
        entries = json.loads(content)
        checksum = _sha256(entries) if isinstance(entries, dict) else None
    except (ValueError, RecursionError) as error:
        raise UserError(f"{name}: is not JSON ({error})") from error
    check = _Check(name)
    top = check.mapping(entries, "manifest")
    if (version := top.get("format")) == 1 and "sha256" not in top:
        warnings.warn(f"{name}: an earlier version wrote it without a checksum; prepare it again", stacklevel=2)
    elif version != FORMAT:
        raise UserError(f"{name}: format is {version!r}, this program reads format {FORMAT}")
    elif top.get("sha256") != checksum:
        raise UserError(f"{name}: its sha256 is not that of its entries; prepare or copy the folder again")
    vocabulary = check.integer(top, "vocabulary", 1, 1 << 32)
    dtype = "uint16" if vocabulary <= 1 << 16 else "uint32"
    check.equal(top.get("dtype"), dtype, f"dtype for a vocabulary of {vocabulary}")
    tokenizer = check.mapping(top.get("tokenizer"), "tokenizer")
    check.equal(tokenizer.get("file"), "tokenizer.json", "tokenizer.file")
    layout = ShardLayout(
        dtype, check.integer(top, "run_tokens", 1, 1 << 28), check.integer(top, "runs_per_shard", 1, 1 << 16)
    )
    splits = check.mapping(top.get("splits"), "splits")
    check.equal(sorted(splits), sorted(SPLITS), "names of the splits")
    counts = check.mapping(top.get("counts"), "counts")
    return Manifest(
        place=name.removesuffix(MANIFEST_FILE).rstrip("/") or ".",
        vocabulary=vocabulary,
        end_of_text=check.integer(top, "end_of_text", 0, vocabulary - 1),
        tokenizer=check.sha256(tokenizer.get("sha256"), "tokenizer.sha256"),
        layout=layout,
        splits={split: _split_from_json(check, split, splits[split], layout) for split in SPLITS},
        settings=check.mapping(top.get("settings"), "settings"),
        counts={reason: check.integer(counts, reason, 0, LARGEST_COUNT) for reason in counts},
    )


def _split_to_json(split: SplitEntry, layout: ShardLayout) -> dict[str, Any]:
    per = layout.runs_per_shard
    return {
        "tokens": split.tokens,
        "documents": split.documents,
        "bytes": split.bytes,
        "offsets": {"file": split.offsets_file, "sha256": split.offsets},
        "shards": [
            {
                "file": layout.shard(split.name, shard),
                "bytes": layout.shard_bytes(split.tokens, shard),
                "runs": [
                    {
                        "member": layout.member(split.name, run),
                        "tokens": layout.tokens_in_run(split.tokens, run),
                        "sha256": split.checksums[run],
                    }
                    for run in range(shard * per, min((shard + 1) * per, len(split.checksums)))
                ],
            }
            for shard in range(layout.shards(split.tokens))
        ],
    }


def _split_from_json(check: "_Check", name: str, entries: Any, layout: ShardLayout) -> SplitEntry:
    entries = check.mapping(entries, f"splits.{name}")
    tokens = check.integer(entries, "tokens", 0, LARGEST_COUNT)
    offsets = check.mapping(entries.get("offsets"), f"splits.{name}.offsets")
    shards = check.sequence(entries.get("shards"), f"splits.{name}.shards")
    runs = [
        run
        for shard in shards
        for run in check.sequence(check.mapping(shard, f"splits.{name}.shards").get("runs"), f"splits.{name}.runs")
    ]
    check.equal(len(runs), layout.runs(tokens), f"splits.{name}: number of runs for {tokens} tokens")
    split = SplitEntry(
        name=name,
        tokens=tokens,
        documents=check.integer(entries, "documents", 0, tokens + 1),
        bytes=check.integer(entries, "bytes", 0, LARGEST_COUNT),
        checksums=tuple(
            check.sha256(check.mapping(run, f"splits.{name}.runs").get("sha256"), f"splits.{name}.runs.sha256")
            for run in runs
        ),
        offsets=check.sha256(offsets.get("sha256"), f"splits.{name}.offsets.sha256"),
    )
    # names and sizes must be those that follow from the counts; this also keeps foreign paths out
    check.equal(offsets.get("file"), split.offsets_file, f"splits.{name}.offsets.file")
    for given, expected in zip(shards, _split_to_json(split, layout)["shards"], strict=False):
        check.equal(given.get("file"), expected["file"], f"splits.{name}.shards.file")
        check.equal(given.get("bytes"), expected["bytes"], f"{expected['file']}: bytes")
        for run, expected_run in zip(given["runs"], expected["runs"], strict=False):
            check.equal(run.get("member"), expected_run["member"], f"{expected['file']}: member")
            check.equal(
                run.get("tokens"), expected_run["tokens"], f"{expected['file']}: {expected_run['member']}: tokens"
            )
        check.equal(len(given["runs"]), len(expected["runs"]), f"{expected['file']}: number of members")
    check.equal(len(shards), layout.shards(tokens), f"splits.{name}: number of shards for {tokens} tokens")
    return split


class _Check:
    """Typed access to parsed JSON; a failure is a UserError that names the file `name` and the entry.

    A schema library (pydantic, msgspec) would check types and ranges. Most of a manifest has to follow from its counts,
    which no schema says; ``docs/decisions/why-our-own-shards.md`` weighs it.
    """

    def __init__(self, name: str) -> None:
        self.name = name

    def mapping(self, value: Any, entry: str) -> dict[str, Any]:
        if not isinstance(value, dict):
            raise UserError(f"{self.name}: {entry} must be an object, got {_short(value)}")
        return value

    def sequence(self, value: Any, entry: str) -> list[Any]:
        if not isinstance(value, list):
            raise UserError(f"{self.name}: {entry} must be a list, got {_short(value)}")
        return value

    def integer(self, entries: dict[str, Any], key: str, low: int, high: int) -> int:
        value = entries.get(key)
        if type(value) is not int or not low <= value <= high:
            raise UserError(f"{self.name}: {key} must be a whole number in {low} .. {high}, got {_short(value)}")
        return value

    def sha256(self, value: Any, entry: str) -> str:
        if not isinstance(value, str) or not SHA256.fullmatch(value):
            raise UserError(f"{self.name}: {entry} must be 64 hexadecimal digits, got {_short(value)}")
        return value

    def equal(self, value: Any, expected: Any, entry: str) -> None:
        if type(value) is not type(expected) or value != expected:
            raise UserError(f"{self.name}: {entry} must be {_short(expected)}, got {_short(value)}")


def _short(value: Any) -> str:
    text = repr(value) if not isinstance(value, str) or len(value) < 200 else repr(value[:80]) + "…"
    return text if len(text) <= 200 else text[:200] + "…"

"""`manifest.json`: the description of a folder of shards, with the checksums of its files."""

import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from kerple.base.atomic import write
from kerple.base.errors import UserError

FORMAT = 5
READABLE = (4, FORMAT)  # format 4 has no files with the lengths of documents
MANIFEST_FILE = "manifest.json"
TEST_DOCUMENTS = "test-documents.jsonl"  # a line for each document: its name, its group and its overlap (see `overlap`)
SPLITS = ("train", "validation", "test")
COPY = "copy the folder again, or delete it and prepare it again"  # advice about a damaged folder


@dataclass(frozen=True)
class Shard:
    """A shard of a split: one tar file.

    Args:
        tokens: Number of tokens. A shard without tokens has no file.
        sha256: Checksum of the file.
    """

    tokens: int
    sha256: str


@dataclass(frozen=True)
class Split:
    """The entry of one split in the manifest.

    Args:
        shards: The shards of the split in the order of their numbers.
        documents: Number of documents.
        bytes: UTF-8 bytes of the documents, without end-of-text tokens.
        sha256: Checksum of the tokens of all shards in order, as little-endian integers of the manifest's dtype. It
            does not depend on the division into shards.
        lengths: sha256 of the file with the lengths of the documents (`lengths_file`); empty if there is no such file.
    """

    shards: tuple[Shard, ...]
    documents: int
    bytes: int
    sha256: str
    lengths: str = ""

    @property
    def tokens(self) -> int:
        """Number of tokens."""
        return sum(shard.tokens for shard in self.shards)


@dataclass(frozen=True)
class Manifest:
    """Contents of a folder of shards.

    Args:
        vocabulary: The largest token id of the tokenizer plus one.
        end_of_text: Id of the token after each document; it does not occur inside documents.
        tokenizer: sha256 of the `tokenizer.json` in the folder.
        splits: The entries of `train`, `validation` and `test`.
        settings: Options of the preparation (`ShardOptions.content_options`), and the state of the corpus's files
            (`Corpus.state`).
        left_out: Number of documents that were left out, for each reason.
        text: sha256 of the documents in order, with their groups and splits. It does not depend on the tokenizer.
        test_documents: sha256 of the file `TEST_DOCUMENTS`, a table of the documents of the test split.
    """

    vocabulary: int
    end_of_text: int
    tokenizer: str
    splits: dict[str, Split]
    settings: dict[str, Any]
    left_out: dict[str, int]
    text: str
    test_documents: str

    @property
    def dtype(self) -> np.dtype[Any]:
        """The dtype of token ids in the shards."""
        return token_dtype(self.vocabulary)

    def write(self, directory: Path) -> None:
        """Write manifest.json atomically. It is written after all other files, so a folder without it is incomplete."""
        write(directory / MANIFEST_FILE, json.dumps({"format": FORMAT} | asdict(self), indent=1) + "\n")


def token_dtype(vocabulary: int) -> np.dtype[Any]:
    """Return the dtype of token ids in shards: little-endian uint16, or uint32 for a vocabulary above 65,536."""
    return np.dtype("<u2" if vocabulary <= 1 << 16 else "<u4")


def read_manifest(directory: str | Path, content: bytes | None = None) -> Manifest:
    """Read and check the manifest.json of a folder.

    Args:
        directory: Path or URL of the folder.
        content: Content of the file; None to read it.

    Raises:
        UserError: The file is missing, or it is not a manifest of a format in `READABLE`.
    """
    path = f"{directory}/{MANIFEST_FILE}"
    try:
        entries = json.loads(Path(path).read_bytes() if content is None else content)
        version, splits = entries.pop("format"), {name: _split(entries["splits"][name]) for name in SPLITS}
        manifest = Manifest(**entries | {"splits": splits, "settings": dict(entries["settings"])})
        _check_counts(manifest.vocabulary, manifest.end_of_text, *manifest.left_out.values())
        if version not in READABLE or not manifest.end_of_text < manifest.vocabulary <= 1 << 32:
            given = f"format {version}, end_of_text {manifest.end_of_text} and vocabulary {manifest.vocabulary}"
            raise ValueError(f"got {given}, expected format 4 or {FORMAT} and end_of_text below vocabulary")
    except OSError as error:
        advice = f"run `python run.py prepare` first, or set the folder as seen from {Path.cwd()}"
        raise UserError(f"{path}: cannot be read ({error.strerror}); {advice}") from error
    except (ValueError, TypeError, LookupError, AttributeError, RecursionError) as error:
        raise UserError(f"{path}: is not a manifest ({error!r}); {COPY}") from error
    return manifest


def _split(entries: dict[str, Any]) -> Split:
    """Return the split that an entry of ``splits`` in the file describes, after checking its numbers."""
    split = Split(**entries | {"shards": tuple(Shard(**shard) for shard in entries["shards"])})
    _check_counts(split.documents, split.bytes, *(shard.tokens for shard in split.shards))
    return split


def _check_counts(*values: Any) -> None:
    """Raise a ValueError if a value is not an integer from 0 to 2⁴⁸ - 1."""
    if wrong := [value for value in values if type(value) is not int or not 0 <= value < 1 << 48]:
        raise ValueError(f"got {wrong[0]!r}, expected a number of tokens, documents or bytes")

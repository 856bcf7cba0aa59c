"""Folders of shards: tar files of token ids in the format of WebDataset, written once and mapped into memory.

A shard has one member, `<split>-<number>.u16` (or `.u32`). It holds the little-endian token ids of documents, each
followed by the end-of-text token. The member starts at byte 512, and its size follows from the number of tokens in the
manifest. The headers of the tar file are therefore not read. The tokens of a split are those of its shards in
order.
"""

import hashlib
import json
import os
import tarfile
from bisect import bisect_right
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from itertools import accumulate
from pathlib import Path
from queue import SimpleQueue
from threading import Thread
from typing import TYPE_CHECKING, Any, BinaryIO

import numpy as np
from numpy.typing import NDArray
from tokenizers import Tokenizer

from kerple.base.atomic import write
from kerple.base.errors import UserError
from kerple.data.manifest import COPY, MANIFEST_FILE, TEST_DOCUMENTS, Shard, read_manifest
from kerple.data.remote_shards import PATIENCE, RemoteFiles, is_intact, is_url
from kerple.data.shard_options import CACHE, CACHE_GB
from kerple.data.tokenizer import load_tokenizer

if TYPE_CHECKING:
    import pandas as pd

BLOCK = 512  # bytes of a header in a tar file; the size of a member is padded to a multiple of it

Tokens = NDArray[np.integer[Any]]


def shard_file(split: str, number: int) -> str:
    """Return the file name of a shard."""
    return f"{split}-{number:05d}.tar"


def lengths_file(split: str) -> str:
    """Return the name of the file with the lengths of the documents of a split, little-endian uint32."""
    return f"lengths-{split}.u32"


def shard_bytes(size: int) -> int:
    """Return the size of a tar file whose only member has ``size`` bytes.

    The file consists of a header, the padded member and two blocks of zeros.
    """
    return BLOCK + -(-size // BLOCK) * BLOCK + 2 * BLOCK


def write_shard(directory: Path, split: str, number: int, tokens: Tokens) -> Shard:
    """Write tokens (n,) as a shard, atomically, and return its entry of the manifest. Without tokens, write no file.

    The header of the member has neither owner nor time, so that every machine writes the same bytes.
    """
    if not len(tokens):
        return Shard(0, "")
    member = tarfile.TarInfo(f"{split}-{number:05d}.u{8 * tokens.itemsize}")
    member.size = tokens.nbytes
    content = (member.tobuf(tarfile.USTAR_FORMAT) + tokens.tobytes()).ljust(shard_bytes(member.size), b"\0")
    write(directory / shard_file(split, number), content)
    return Shard(len(tokens), hashlib.sha256(content).hexdigest())


class Folder:
    """A folder of shards on this machine or at a URL.

    Args:
        location: Path or URL of the folder.
        cache: Folder of the copies of files at a URL, see `RemoteFiles`.
        cache_gb: Size of these copies in 10⁹ bytes.

    Attributes:
        location (str): Path or URL of the folder.
        remote (RemoteFiles | None): The files at the URL; None for a folder on this machine.
        manifest (Manifest): Description of the folder's contents.

    Raises:
        UserError: The folder has no manifest, or a damaged one.
    """

    def __init__(self, location: str | Path, cache: str = CACHE, cache_gb: float = CACHE_GB) -> None:
        self.remote = RemoteFiles(str(location), cache, cache_gb) if is_url(str(location)) else None
        self.location = str(location if self.remote else Path(location))
        self.manifest = read_manifest(self.location, self.remote.read(MANIFEST_FILE) if self.remote else None)

    def shard(self, split: str, number: int, recheck: bool = False, patience: float = PATIENCE) -> BinaryIO:
        """Open a shard, after comparing its size and checksum with the manifest (`is_intact`).

        Args:
            split: Name of the split.
            number: Index of the shard.
            recheck: Whether to compare the checksum even if the file has not changed.
            patience: See `RemoteFiles.open`.

        Raises:
            UserError: The shard is missing, or its size or checksum differs from the manifest.
        """
        name, sha256, size = self._entry(split, number)
        if self.remote:
            file = self.remote.open(name, sha256, size, patience)
            if os.fstat(file.fileno()).st_size != size:
                file.close()
                raise UserError(f"{self.location}/{name}: is not {size} bytes long, as in the manifest; {COPY}")
            return file
        self._check_size(name, size)
        return self._checked_file(name, sha256, recheck)

    def check_shard_sizes(self) -> None:
        """Raise a UserError if a shard on this machine is missing, or has another size than in the manifest."""
        for split, entry in self.manifest.splits.items():
            for number, shard in enumerate(entry.shards):
                if shard.tokens and not self.remote:
                    name, _, size = self._entry(split, number)
                    self._check_size(name, size)

    def _entry(self, split: str, number: int) -> tuple[str, str, int]:
        """Return the file name of a shard, its sha256 and its size in bytes."""
        shard = self.manifest.splits[split].shards[number]
        return shard_file(split, number), shard.sha256, shard_bytes(shard.tokens * self.manifest.dtype.itemsize)

    def _check_size(self, name: str, size: int) -> None:
        path = Path(self.location, name)
        if not path.is_file() or path.stat().st_size != size:
            raise UserError(f"{path}: is missing, or not {size} bytes long; {COPY}")

    def documents(self, split: str) -> NDArray[np.int64]:
        """Return the index of the first token of each document of a split, (documents,) int64, ascending.

        Raises:
            UserError: The file with the lengths of the documents is damaged, or does not fit the manifest.
        """
        entry = self.manifest.splits[split]
        if entry.lengths:
            with self._checked_file(lengths_file(split), entry.lengths) as file:
                lengths = np.frombuffer(file.read(), "<u4")
            if (len(lengths), lengths.sum(dtype=np.int64)) != (entry.documents, entry.tokens) or not lengths.all():
                raise UserError(f"{file.name}: does not fit the manifest; {COPY}")
        else:  # of format 4
            stream = TokenStream(self, split, open_shards=1)
            tokens = (stream.shard(number) for number, shard in enumerate(entry.shards) if shard.tokens)
            lengths = document_lengths(tokens, self.manifest.end_of_text)
        return lengths.cumsum(dtype=np.int64) - lengths

    def test_documents(self) -> "pd.DataFrame":
        """Return a table with one row for each document of the test split, in order.

        The columns are the name of the document (``document``), the name of its group (``group``, such as its package)
        and the fraction of its 32-grams (32 consecutive tokens) that also occur in the training text of this folder
        (``overlap``).

        Raises:
            UserError: The table is missing, or its checksum differs from the manifest.
        """
        import pandas as pd  # here, so that mistakes in options are reported before it is imported

        with self._checked_file(TEST_DOCUMENTS, self.manifest.test_documents) as file:
            rows = [json.loads(line) for line in file]
        return pd.DataFrame(rows, columns=["document", "group", "overlap"])

    def tokenizer(self) -> Tokenizer:
        """Return the tokenizer of the shards.

        Raises:
            UserError: Its file is missing, or the checksum differs from the manifest.
        """
        with self._checked_file("tokenizer.json", self.manifest.tokenizer) as file:
            return load_tokenizer(file.name)

    def _checked_file(self, name: str, sha256: str, recheck: bool = True) -> BinaryIO:
        """Open a file, after comparing its checksum."""
        if self.remote:
            return self.remote.open(name, sha256)
        path = Path(self.location, name)
        if not path.is_file() or not is_intact(path, sha256, recheck):
            raise UserError(f"{path}: is missing, or its sha256 is wrong; {COPY}")
        return path.open("rb")


class TokenStream:
    """The tokens of one split, mapped from its shards. Like an array, it has a length and can be sliced.

    Args:
        folder: The folder of the shards.
        split: Name of the split.
        open_shards: Largest number of shards that are mapped at a time; None for no limit.

    Attributes:
        ends (Sequence[int]): Index after the last token of each shard.
    """

    def __init__(self, folder: Folder, split: str, open_shards: int | None = None) -> None:
        self.folder, self.split, self.open_shards = folder, split, open_shards
        self.shards, self.dtype = folder.manifest.splits[split].shards, folder.manifest.dtype
        self.ends: Sequence[int] = list(accumulate(shard.tokens for shard in self.shards))
        self.maps: dict[int, Tokens] = {}

    def __len__(self) -> int:
        return self.ends[-1] if self.ends else 0

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "maps": {}}  # pickling would copy the tokens; a worker process maps the files itself

    def __getitem__(self, part: slice) -> Tokens:
        """Return the tokens of a slice with step 1, in the shards' dtype.

        The result is a view of the file if the tokens are in one shard, and a copy if they are in several.

        Raises:
            UserError: A shard is missing, or its size or checksum differs from the manifest.
        """
        start, stop, _ = part.indices(len(self))
        parts = list[Tokens]()
        while start < stop:
            number = bisect_right(self.ends, start)
            end = self.ends[number]
            first = start - end + self.shards[number].tokens
            parts.append(self.shard(number)[first : first + stop - start])
            start = end
        return parts[0] if len(parts) == 1 else np.concatenate([np.empty(0, self.dtype), *parts])

    def shard(self, number: int) -> Tokens:
        """Return all tokens of a shard, (tokens,)."""
        if number not in self.maps:
            if self.open_shards is not None and len(self.maps) >= self.open_shards:
                del self.maps[next(iter(self.maps))]  # the one that was opened first
            with self.folder.shard(self.split, number) as file:
                self.maps[number] = map_tokens(file, self.dtype, self.shards[number].tokens)
        return self.maps[number]


class ShardFetcher:
    """Fetches shards at a URL into the cache, in the order in which they will be read, by threads of this process.

    Args:
        parts: Each part of a `Mixture`, or the only part: the tokens of the split, and the index after the last place
            of a sample in each shard.
        threads: Number of shards that are fetched at a time.
    """

    def __init__(self, parts: Sequence[tuple[TokenStream, Sequence[int]]], threads: int = 4) -> None:
        self.parts, self.threads = parts, threads
        self.shards: SimpleQueue[tuple[int, int] | None] = SimpleQueue()  # a part and a shard; None ends a thread
        self.last = dict[tuple[int, int], None]()
        self.stopped = False
        for _ in range(threads):
            Thread(target=self._fetch, daemon=True).start()

    def request(self, places: NDArray[np.int64]) -> None:
        """Fetch the shards of samples from their places (…). An error is left to the reader of the shard."""
        places, parts = np.divmod(places.ravel(), len(self.parts))
        numbers = np.empty_like(places)
        for part, (_, ends) in enumerate(self.parts):
            numbers[parts == part] = np.searchsorted(ends, places[parts == part], side="right")
        shards = dict.fromkeys(zip(parts.tolist(), numbers.tolist(), strict=True))  # in the order of their samples
        for shard in shards:
            if shard not in self.last and self.parts[shard[0]][0].folder.remote:
                self.shards.put(shard)
        self.last = shards

    def stop(self) -> None:
        """End the threads after the shards that they are fetching."""
        self.stopped = True
        for _ in range(self.threads):
            self.shards.put(None)

    def _fetch(self) -> None:
        while (shard := self.shards.get()) is not None and not self.stopped:
            part, number = shard
            stream = self.parts[part][0]
            with suppress(UserError, OSError):
                stream.folder.shard(stream.split, number, patience=0).close()


def map_tokens(file: Path | BinaryIO, dtype: np.dtype[Any], count: int) -> Tokens:
    """Map the tokens (count,) of a shard from its file, without comparing its size or checksum."""
    return np.memmap(file, dtype, "r", BLOCK, (count,)).view(np.ndarray)


def read_shards(directory: Path, split: str, shards: Iterable[Shard], dtype: np.dtype[Any]) -> Iterator[Tokens]:
    """Yield the tokens (tokens,) of each shard that is not empty, without comparing checksums."""
    for number, shard in enumerate(shards):
        if shard.tokens:
            yield map_tokens(directory / shard_file(split, number), dtype, shard.tokens)


def document_lengths(shards: Iterable[Tokens], end_of_text: int) -> NDArray[np.uint32]:
    """Return the number of tokens of each document of consecutive shards, with its end-of-text token, (documents,)."""
    lengths, tokens = [np.empty(0, "<u4")], 0  # number of tokens since the last end of a document
    for shard in shards:
        ends = np.flatnonzero(shard == end_of_text)
        lengths.append(np.diff(ends, prepend=-1 - tokens).astype("<u4"))
        tokens = len(shard) - 1 - ends[-1] if len(ends) else tokens + len(shard)
    return np.concatenate(lengths)


def checksum_and_lengths(shards: Iterable[Tokens], end_of_text: int) -> tuple[str, NDArray[np.uint32]]:
    """Return the `Split.sha256` of a split and its `document_lengths`. Each of its shards is read once."""
    digest = hashlib.sha256()

    def digested() -> Iterator[Tokens]:
        for tokens in shards:
            digest.update(tokens.data)
            yield tokens

    lengths = document_lengths(digested(), end_of_text)
    return digest.hexdigest(), lengths


def verify(folder: Folder) -> None:
    """Compare all files of a folder with the manifest, and check that the vocabulary contains all token ids.

    Raises:
        UserError: A file differs from the manifest, a split has another checksum or other documents than in the
            manifest, or a token id is outside the vocabulary. The message names the first fault.
    """
    folder.tokenizer()
    folder.test_documents()
    for name, split in folder.manifest.splits.items():
        stream = TokenStream(folder, name, open_shards=1)

        def checked_shards(stream: TokenStream = stream) -> Iterator[Tokens]:
            for number, shard in enumerate(stream.shards):
                if shard.tokens:
                    with folder.shard(stream.split, number, recheck=True) as file:
                        tokens = stream.shard(number)
                    if (largest := int(tokens.max())) >= folder.manifest.vocabulary:
                        expected = f"below {folder.manifest.vocabulary}; {COPY}"
                        raise UserError(f"{file.name}: got the token id {largest}, expected ids {expected}")
                    yield tokens

        checksum, lengths = checksum_and_lengths(checked_shards(), folder.manifest.end_of_text)
        begins = lengths.cumsum(dtype=np.int64) - lengths
        same = (checksum, len(begins)) == (split.sha256, split.documents)
        if not same or (begins != folder.documents(name)).any():
            raise UserError(f"{folder.location}: the tokens of {name} differ from the manifest; {COPY}")

"""Token streams in WebDataset tar shards: `ShardWriter` appends to them, `TokenStream` maps them into memory.

A member of a tar file is a run of raw little-endian token ids. Tar pads members to 512 bytes, so every run starts
aligned and can be mapped where it is. Names, sizes and offsets follow from the manifest (`ShardLayout`). A shard is
compared with them; nothing that it says about itself is used.
"""

import hashlib
import os
import re
import tarfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
from numpy.typing import NDArray

from kerple.base.errors import UserError
from kerple.data.layout import TAR_BLOCK, ShardLayout
from kerple.data.manifest import Manifest, SplitEntry

Tokens = NDArray[np.integer[Any]]


def header(name: str, size: int) -> bytes:
    """The 512 bytes of the ustar header of a member: a regular file without owner or time, so every machine agrees."""
    member = tarfile.TarInfo(name)
    member.size = size
    return member.tobuf(tarfile.USTAR_FORMAT)


def numbered(directory: Path, split: str) -> list[tuple[int, Path]]:
    """Numbers and paths of the files in a folder that have the name of a shard of this split."""
    found = ((path.stem.removeprefix(f"{split}-"), path) for path in directory.glob(f"{split}-*.tar"))
    return [(int(number), path) for number, path in found if re.fullmatch(r"[0-9]{5,18}", number)]


class ShardWriter:
    """Appends the tokens of one split to its tar files.

    The length of every file is a function of the number of tokens alone. A writer that was killed therefore goes on
    from any number of tokens that `sync` has confirmed: what the files hold beyond it is cut off and written again.

    Args:
        directory: Folder of the shards.
        split: Name of the split.
        layout: Names and sizes of runs and shards.
        tokens: Number of tokens already in the files that are kept.
        documents: Number of documents that are kept.
    """

    def __init__(self, directory: Path, split: str, layout: ShardLayout, tokens: int = 0, documents: int = 0) -> None:
        self.directory, self.split, self.layout = directory, split, layout
        self.tokens, self.documents = tokens, documents
        self.shard_tokens = layout.run_tokens * layout.runs_per_shard
        for number, path in numbered(directory, split):
            if number * self.shard_tokens >= tokens:
                path.unlink()
        self.offsets = _open(directory / f"{split}.offsets")
        _truncate(self.offsets, documents * 8)
        self.file: BinaryIO | None = None
        if tokens % self.shard_tokens:
            self.file = _open(self._path(tokens // self.shard_tokens))
            run, rest = divmod(tokens % self.shard_tokens, layout.run_tokens)
            if rest:  # an earlier attempt may have closed the run: its header says the full size again
                self.file.seek(run * layout.run_bytes)
                self.file.write(self._header(tokens // layout.run_tokens, layout.run_tokens))
            _truncate(self.file, run * layout.run_bytes + (TAR_BLOCK + rest * layout.numpy.itemsize if rest else 0))

    def append(self, tokens: Tokens, starts: NDArray[np.uint64]) -> None:
        """Append tokens (n,). Documents begin at the indices `starts` (documents,) into them."""
        self.offsets.write((starts + np.uint64(self.tokens)).astype("<u8").tobytes())
        self.documents += len(starts)
        tokens = tokens.astype(self.layout.numpy, copy=False)
        while len(tokens):
            part = tokens[: self.layout.run_tokens - self.tokens % self.layout.run_tokens]
            self._write(part)
            tokens = tokens[len(part) :]

    def _write(self, part: Tokens) -> None:
        layout = self.layout
        if self.tokens % self.shard_tokens == 0:
            self.file = _open(self._path(self.tokens // self.shard_tokens))
        assert self.file is not None
        if self.tokens % layout.run_tokens == 0:
            self.file.write(self._header(self.tokens // layout.run_tokens, layout.run_tokens))
        self.file.write(part.tobytes())
        self.tokens += len(part)
        if self.tokens % layout.run_tokens == 0:
            self.file.write(bytes(-layout.run_tokens * layout.numpy.itemsize % TAR_BLOCK))
        if self.tokens % self.shard_tokens == 0:
            self.file.write(bytes(2 * TAR_BLOCK))
            self._sync(self.file)
            self.file.close()
            self.file = None

    def sync(self) -> None:
        """Flush everything that was appended to the disk; after this it survives a power cut."""
        for file in (self.offsets, self.file):
            if file is not None:
                self._sync(file)

    def close(self) -> None:
        """Give the last run its true size, end the last tar file and close all files."""
        layout = self.layout
        if self.file is not None:
            if rest := self.tokens % layout.run_tokens:
                self.file.write(bytes(-rest * layout.numpy.itemsize % TAR_BLOCK))
                self.file.seek(self.tokens % self.shard_tokens // layout.run_tokens * layout.run_bytes)
                self.file.write(self._header(self.tokens // layout.run_tokens, rest))
                self.file.seek(0, os.SEEK_END)
            self.file.write(bytes(2 * TAR_BLOCK))
        self.sync()
        self.abandon()

    def abandon(self) -> None:
        """Close the files without ending them."""
        for file in (self.offsets, self.file):
            if file is not None:
                file.close()
        self.file = None

    def _header(self, run: int, tokens: int) -> bytes:
        return header(self.layout.member(self.split, run), tokens * self.layout.numpy.itemsize)

    def _path(self, shard: int) -> Path:
        return self.directory / self.layout.shard(self.split, shard)

    @staticmethod
    def _sync(file: BinaryIO) -> None:
        file.flush()
        os.fsync(file.fileno())


class TokenStream:
    """The tokens of one split as one long array, mapped from the shards and checked on first use.

    Args:
        directory: Folder of the shards.
        manifest: The manifest of that folder.
        split: Name of the split.
        verify: Whether the sha256 of a run and the range of its ids are checked before its first token is used. This
            reads about 1 GB/s.
    """

    def __init__(self, directory: Path, manifest: Manifest, split: str, verify: bool = True) -> None:
        self.directory, self.layout, self.split = directory, manifest.layout, manifest.splits[split]
        self.vocabulary, self.verify = manifest.vocabulary, verify
        self.maps: dict[int, NDArray[np.uint8]] = {}
        self.views: dict[int, Tokens] = {}

    def __len__(self) -> int:
        return self.split.tokens

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "maps": {}, "views": {}}  # a worker process maps the files itself

    def read(self, start: int, count: int) -> Tokens:
        """Tokens start .. start + count - 1 in the shards' dtype; a view of the file if they lie in one run."""
        assert start >= 0
        assert start + count <= len(self)
        run, first = divmod(start, self.layout.run_tokens)
        if first + count <= self.layout.run_tokens:
            return self.run(run)[first : first + count]
        parts = [self.run(run)[first:]]
        missing = count - len(parts[0])
        while missing:
            run += 1
            parts.append(self.run(run)[:missing])
            missing -= len(parts[-1])
        return np.concatenate(parts)

    def run(self, run: int) -> Tokens:
        """All tokens of a run (tokens,), checked.

        Raises:
            UserError: The shard differs from the manifest; the message names the file and the member.
        """
        if (view := self.views.get(run)) is None:
            shard, place = divmod(run, self.layout.runs_per_shard)
            size = self.layout.tokens_in_run(len(self), run) * self.layout.numpy.itemsize
            start = place * self.layout.run_bytes + TAR_BLOCK
            view = self._map(shard)[start : start + size].view(self.layout.numpy)
            if self.verify:
                check_run(
                    self.directory / self.layout.shard(self.split.name, shard), self.layout, self.split, run, view
                )
                check_ids(self.directory, self.layout, self.split, run, view, self.vocabulary)
            self.views[run] = view
        return view

    def _map(self, shard: int) -> NDArray[np.uint8]:
        if (mapped := self.maps.get(shard)) is None:
            path = self.directory / self.layout.shard(self.split.name, shard)
            mapped = self.maps[shard] = map_shard(path, self.layout, self.split, shard)
        return mapped


def map_shard(path: Path, layout: ShardLayout, split: SplitEntry, shard: int) -> NDArray[np.uint8]:
    """Map a tar file whose size and member headers are the ones that follow from the manifest; (bytes,) uint8.

    Raises:
        UserError: The size or a header differs, as it does for links, devices and members of other names or sizes. The
            message names the file and the member.
    """
    expected = layout.shard_bytes(split.tokens, shard)
    if not path.is_file():
        raise UserError(f"{path}: there is no such file; the manifest lists it, prepare or copy it again")
    if (size := path.stat().st_size) != expected:
        state = "truncated" if size < expected else "too long"
        raise UserError(
            f"{path}: is {state}, {size} bytes where the manifest says {expected}; prepare or copy it again"
        )
    mapped = np.memmap(path, np.uint8, mode="r")
    for place, run in enumerate(runs_of(layout, split, shard)):
        name, size = layout.member(split.name, run), layout.tokens_in_run(split.tokens, run) * layout.numpy.itemsize
        found = mapped[place * layout.run_bytes :][:TAR_BLOCK].tobytes()
        if found != header(name, size):
            raise UserError(f"{path}: member {name}: expected a regular file of {size} bytes, found {_describe(found)}")
    return mapped.view(np.ndarray)


def runs_of(layout: ShardLayout, split: SplitEntry, shard: int) -> range:
    """Numbers of the runs in a shard."""
    first = shard * layout.runs_per_shard
    return range(first, min(first + layout.runs_per_shard, layout.runs(split.tokens)))


def check_run(path: Path | str, layout: ShardLayout, split: SplitEntry, run: int, tokens: Tokens) -> None:
    """Check that the sha256 of a run is the manifest's.

    Raises:
        UserError: It differs; the message names the file and the member.
    """
    if hashlib.sha256(tokens.data).hexdigest() != split.checksums[run]:
        name = layout.member(split.name, run)
        raise UserError(f"{path}: member {name}: its sha256 is not the manifest's; prepare or copy the shard again")


def check_ids(place: Path, layout: ShardLayout, split: SplitEntry, run: int, tokens: Tokens, vocabulary: int) -> None:
    """Check that every id of a run is below `vocabulary`, so that it has a row in the embedding.

    Raises:
        UserError: An id is too large; the message names the file and the member.
    """
    if len(tokens) and (largest := int(tokens.max())) >= vocabulary:
        path = place / layout.shard(split.name, run // layout.runs_per_shard)
        raise UserError(
            f"{path}: member {layout.member(split.name, run)}: got token {largest}, expected at most {vocabulary - 1}, "
            "the last of the vocabulary; prepare or copy the shard again"
        )


def checksums(directory: Path, layout: ShardLayout, split: str, tokens: int) -> Iterator[str]:
    """Yield the sha256 of each run of a split, read back from the finished shards."""
    for run in range(layout.runs(tokens)):
        shard, place = divmod(run, layout.runs_per_shard)
        with (directory / layout.shard(split, shard)).open("rb") as file:
            file.seek(place * layout.run_bytes + TAR_BLOCK)
            yield hashlib.sha256(file.read(layout.tokens_in_run(tokens, run) * layout.numpy.itemsize)).hexdigest()


def _describe(found: bytes) -> str:
    try:
        member = tarfile.TarInfo.frombuf(found, "utf-8", "replace")
    except tarfile.TarError:
        return "no tar header"
    kind = {b"1": "hard link", b"2": "symbolic link", b"5": "directory"}.get(member.type, f"type {member.type!r}")
    kind = "regular file" if member.isreg() else kind
    return f"a {kind} {member.name[:100]!r} of {member.size} bytes"


def _open(path: Path) -> BinaryIO:
    file = path.open("r+b" if path.exists() else "w+b")
    file.seek(0, os.SEEK_END)
    return file


def _truncate(file: BinaryIO, size: int) -> None:
    file.flush()
    assert os.fstat(file.fileno()).st_size >= size, "the journal claims more than was written"
    file.truncate(size)
    file.seek(size)

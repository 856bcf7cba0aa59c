"""Token streams in WebDataset tar shards: appended to while preparing, memory-mapped where they lie while training.

A member is a raw little-endian run of tokens. Tar pads to 512 bytes, so every payload starts aligned and can be mapped
in place. Names, sizes and places follow from the manifest (`Layout`); a shard is compared with that, never explored.
"""

import hashlib
import os
import tarfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
from numpy.typing import NDArray

from kerple.data.manifest import TAR_BLOCK, Layout, Manifest, SplitEntry
from kerple.errors import UserError

Tokens = NDArray[np.integer[Any]]


def header(name: str, size: int) -> bytes:
    """The 512 bytes of ustar before a member: a regular file without owner or time, the same on every machine."""
    member = tarfile.TarInfo(name)
    member.size = size
    return member.tobuf(tarfile.USTAR_FORMAT)


class ShardWriter:
    """Appends tokens of one split to its tar files, run after run.

    How far a file has to reach is a function of the number of tokens alone. So a writer that was killed goes on from
    any number of tokens it had made sure of: everything beyond is cut off and written again.

    Args:
        directory: Where the shards lie.
        split: Name of the split.
        layout: Sizes.
        tokens: Tokens to keep of what is there.
        documents: Documents to keep.
    """

    def __init__(self, directory: Path, split: str, layout: Layout, tokens: int = 0, documents: int = 0) -> None:
        self.directory, self.split, self.layout = directory, split, layout
        self.tokens, self.documents = tokens, documents
        self.shard_tokens = layout.run_tokens * layout.runs_per_shard
        for path in directory.glob(f"{split}-*.tar"):
            if int(path.stem.rpartition("-")[2]) * self.shard_tokens >= tokens:
                path.unlink()
        self.offsets = _open(directory / f"{split}.offsets")
        _truncate(self.offsets, documents * 8)
        self.file: BinaryIO | None = None
        if tokens % self.shard_tokens:
            self.file = _open(self._path(tokens // self.shard_tokens))
            run, rest = divmod(tokens % self.shard_tokens, layout.run_tokens)
            if rest:  # closed by an earlier attempt, perhaps: give the run its full size again
                self.file.seek(run * layout.run_bytes)
                self.file.write(self._header(tokens // layout.run_tokens, layout.run_tokens))
            _truncate(self.file, run * layout.run_bytes + (TAR_BLOCK + rest * layout.numpy.itemsize if rest else 0))

    def append(self, tokens: Tokens, starts: NDArray[np.uint64]) -> None:
        """Add tokens (n,), in which documents begin at `starts` (documents,), counted from the first of these."""
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
        """Return when everything appended so far would survive a power cut."""
        for file in (self.offsets, self.file):
            if file is not None:
                self._sync(file)

    def close(self) -> None:
        """End the last run where the tokens end, and the last shard."""
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
        """Close the files as they are."""
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
    """The tokens of one split, mapped from their shards and checked when first touched.

    Args:
        directory: Where the shards lie.
        manifest: Of that directory.
        split: Name of the split.
        verify: Compare the sha256 of a run and the range of its ids before its first token is used, at about 1 GB/s.
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
        """Tokens start .. start + count - 1 in the shards' dtype, a view where they lie in one run."""
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
        """All tokens of a run, checked.

        Raises:
            UserError: The shard is not what the manifest says; the message names file and member.
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


def map_shard(path: Path, layout: Layout, split: SplitEntry, shard: int) -> NDArray[np.uint8]:
    """Map a tar file after comparing its size and every member's header with what the manifest implies.

    Raises:
        UserError: Anything differs; links, devices, other names, paths and sizes all do. Names file and member.
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


def runs_of(layout: Layout, split: SplitEntry, shard: int) -> range:
    """Numbers of the runs a shard holds."""
    first = shard * layout.runs_per_shard
    return range(first, min(first + layout.runs_per_shard, layout.runs(split.tokens)))


def check_run(path: Path | str, layout: Layout, split: SplitEntry, run: int, tokens: Tokens) -> None:
    """Compare a run's sha256 with the manifest's."""
    if hashlib.sha256(tokens).hexdigest() != split.checksums[run]:
        name = layout.member(split.name, run)
        raise UserError(f"{path}: member {name}: its sha256 is not the manifest's; prepare or copy the shard again")


def check_ids(place: Path, layout: Layout, split: SplitEntry, run: int, tokens: Tokens, vocabulary: int) -> None:
    """Every id must have a row in the embedding."""
    if len(tokens) and (largest := int(tokens.max())) >= vocabulary:
        path = place / layout.shard(split.name, run // layout.runs_per_shard)
        raise UserError(
            f"{path}: member {layout.member(split.name, run)}: token {largest}, the vocabulary ends at {vocabulary - 1}"
        )


def checksums(directory: Path, layout: Layout, split: str, tokens: int) -> Iterator[str]:
    """sha256 of each run of finished shards, read back from the disk."""
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

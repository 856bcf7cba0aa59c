"""Prepared folders of shards, on this machine or at a URL; the latter are read through a cache of bounded size.

webdataset reads a remote shard member by member. Each member is compared with the manifest and written to the cache as
part of a file that equals a local shard, which is then mapped as any other. So the network decides when a sample
arrives, but never which sample it is.

MosaicML Streaming (0.13) and litdata (0.2.76) do more: several clouds, compression, prefetching. But the former cannot
be installed beside this project's lock (numpy below 2.2, transformers below 5), and the latter unpickles what an index
says is a pickle; both read formats of their own, whose items cannot be mapped where they are. webdataset's own cache
opens URLs by running `curl`.
"""

import hashlib
import io
import tarfile
from pathlib import Path

import numpy as np
from filelock import FileLock
from numpy.typing import NDArray
from tokenizers import Tokenizer
from webdataset.tariterators import reraise_exception, tar_file_iterator

from kerple.data.files import ResumingStream, check_protocol, is_remote
from kerple.data.manifest import MANIFEST_FILE, Manifest, SplitEntry, parse_manifest, read_manifest
from kerple.data.shards import TokenStream, check_run, header, map_shard, runs_of
from kerple.data.tokenizer import load_tokenizer
from kerple.data.verify import read_offsets, tokenizer_file
from kerple.errors import UserError
from kerple.runs.atomic import write

SMALL_FILE = 1 << 30  # bytes; a manifest or a tokenizer is smaller
CACHE_BYTES = 16 << 30


class Folder:
    """A folder of shards on this machine.

    Args:
        place: Path of the folder.
        verify: Whether tokens are checked on first use, see `TokenStream`.

    Raises:
        UserError: The folder has no manifest that can be used.
    """

    def __init__(self, place: str, verify: bool = True) -> None:
        self.place, self.directory, self.verify = place, Path(place), verify
        self.manifest: Manifest = read_manifest(self.directory)

    def stream(self, split: str) -> TokenStream:
        """The tokens of a split as one long array."""
        return TokenStream(self.directory, self.manifest, split, self.verify)

    def tokenizer(self) -> Tokenizer:
        """The tokenizer that the shards were made with.

        Raises:
            UserError: It is missing, or is not the one that the manifest names.
        """
        return load_tokenizer(str(tokenizer_file(self.directory, self.manifest)))

    def documents(self, split: str) -> NDArray[np.int64]:
        """Index of the first token of each document of a split, (documents,) int64, ascending."""
        return read_offsets(self.directory, self.manifest, split).astype(np.int64)


class RemoteFolder(Folder):
    """A folder of shards at a URL.

    Args:
        place: URL of the folder.
        cache: Local folder for copies of shards; several processes and runs may share it.
        cache_bytes: Largest size of the copies of this folder's shards. The least recently used ones are deleted.
        attempts: Number of failures in a row after which a download gives up.
        pause: Seconds before the first new attempt; doubled before each further one.

    Raises:
        UserError: The manifest or the tokenizer cannot be loaded, or the cache is too small for two shards.
    """

    def __init__(
        self, place: str, cache: Path, cache_bytes: int = CACHE_BYTES, attempts: int = 8, pause: float = 0.5
    ) -> None:
        check_protocol(place)
        self.place, self.verify, self.attempts, self.pause = place.rstrip("/"), True, attempts, pause
        content = self._small(MANIFEST_FILE)
        self.manifest = parse_manifest(content, f"{self.place}/{MANIFEST_FILE}")
        # a new manifest at the same URL is a new corpus, with copies of its own
        self.directory = cache / hashlib.sha256(self.place.encode() + content).hexdigest()[:16]
        self.directory.mkdir(parents=True, exist_ok=True)
        self.cache_bytes = cache_bytes
        largest = max((self._shard_bytes(s, 0) for s in self.manifest.splits.values() if s.tokens), default=0)
        if cache_bytes < 2 * largest:
            raise UserError(
                f"data.cache_bytes: got {cache_bytes}, expected at least {2 * largest}, the size of two shards of "
                f"{place}"
            )
        tokenizer = self._small("tokenizer.json")
        if hashlib.sha256(tokenizer).hexdigest() != self.manifest.tokenizer:
            raise UserError(f"{self.place}/tokenizer.json: its sha256 is not the manifest's; upload the folder again")
        with FileLock(self.directory / ".lock"):
            if not (self.directory / "tokenizer.json").exists():
                write(self.directory / "tokenizer.json", tokenizer)

    def stream(self, split: str) -> TokenStream:
        return RemoteStream(self, split)

    def documents(self, split: str) -> NDArray[np.int64]:
        path = self.directory / self.manifest.splits[split].offsets_file
        with FileLock(self.directory / ".lock"):
            if not path.exists():
                write(path, self._small(path.name))
        return super().documents(split)

    def fetch(self, split: SplitEntry, shard: int) -> Path:
        """Path of a checked local copy of a shard, which is downloaded unless it is there.

        Raises:
            UserError: The shard cannot be loaded, or differs from the manifest.
        """
        path = self.directory / self.manifest.layout.shard(split.name, shard)
        with FileLock(path.with_suffix(".lock")):  # other processes that need this shard wait for this download
            part = path.with_suffix(".part")
            # files of this folder are made, renamed and deleted only under its lock
            with FileLock(self.directory / ".lock"):
                if path.exists():
                    path.touch()  # the time of the last use
                    return path
                self._make_room(self._shard_bytes(split, shard), part)
            self._download(split, shard, part)
            with FileLock(self.directory / ".lock"):
                part.replace(path)
        return path

    def _make_room(self, needed: int, part: Path) -> None:
        """Delete the least recently used copies, and reserve room by a sparse file of `needed` bytes."""
        copies = sorted(self.directory.glob("*.tar"), key=lambda p: p.stat().st_mtime_ns)
        taken = sum(p.stat().st_size for p in (*copies, *self.directory.glob("*.part")) if p != part)
        while copies and taken + needed > self.cache_bytes:
            oldest = copies.pop(0)
            taken -= oldest.stat().st_size
            oldest.unlink()
        with part.open("wb") as file:
            file.truncate(needed)  # other processes count it from now on

    def _download(self, split: SplitEntry, shard: int, part: Path) -> None:
        layout = self.manifest.layout
        url = f"{self.place}/{layout.shard(split.name, shard)}"
        runs = runs_of(layout, split, shard)
        expected = {layout.member(split.name, run): run for run in runs}
        first = header(layout.member(split.name, runs.start), self._run_bytes(split, runs.start))
        remote = ResumingStream(url, self._shard_bytes(split, shard), self.attempts, self.pause)
        with io.BufferedReader(remote, 1 << 20) as stream, part.open("r+b") as file:
            if stream.peek(len(first))[: len(first)] != first:  # webdataset would unpack a compressed tar, to any size
                raise UserError(f"{url}: does not begin with the member the manifest says; upload it again")
            try:
                for member in tar_file_iterator(stream, handler=reraise_exception):
                    name, payload = member["fname"], member["data"]
                    run = expected.pop(name, None)
                    if run is None or len(payload) != self._run_bytes(split, run):
                        raise UserError(
                            f"{url}: member {name!r} of {len(payload)} bytes is not in the manifest; upload it again"
                        )
                    check_run(url, layout, split, run, np.frombuffer(payload, layout.numpy))
                    file.seek((run - runs.start) * layout.run_bytes)
                    file.write(header(name, len(payload)) + payload)
            except tarfile.TarError as error:
                raise UserError(f"{url}: cannot be read to its end ({error}); upload it again") from error
        if expected:
            raise UserError(f"{url}: member {min(expected)} is missing; upload it again")

    def _small(self, name: str) -> bytes:
        with ResumingStream(f"{self.place}/{name}", None, self.attempts, self.pause) as stream:
            content = bytearray()
            while chunk := stream.read(1 << 20):
                content += chunk
                if len(content) > SMALL_FILE:
                    raise UserError(f"{self.place}/{name}: must be at most {SMALL_FILE} bytes; upload it again")
        return bytes(content)

    def _run_bytes(self, split: SplitEntry, run: int) -> int:
        return self.manifest.layout.tokens_in_run(split.tokens, run) * self.manifest.layout.numpy.itemsize

    def _shard_bytes(self, split: SplitEntry, shard: int) -> int:
        return self.manifest.layout.shard_bytes(split.tokens, shard)


class RemoteStream(TokenStream):
    """The tokens of one split of a remote folder; a shard is fetched when its first token is read."""

    def __init__(self, folder: RemoteFolder, split: str) -> None:
        super().__init__(folder.directory, folder.manifest, split)
        self.folder = folder

    def _map(self, shard: int) -> NDArray[np.uint8]:
        if (mapped := self.maps.get(shard)) is None:
            while mapped is None:
                path = self.folder.fetch(self.split, shard)
                try:
                    mapped = map_shard(path, self.layout, self.split, shard)
                except ValueError:
                    if path.exists():  # else another process has deleted it to make room
                        raise
            self._forget_deleted()
            self.maps[shard] = mapped
        return mapped

    def _forget_deleted(self) -> None:
        """Drop the maps of deleted files: a file that is mapped keeps its space on the disk."""
        for shard in list(self.maps):
            if not (self.directory / self.layout.shard(self.split.name, shard)).exists():
                del self.maps[shard]
                for run in runs_of(self.layout, self.split, shard):
                    self.views.pop(run, None)


def open_folder(place: str, verify: bool, cache: str, cache_bytes: int) -> Folder:
    """Open the prepared folder at a path or URL; the arguments are those of `Folder` and `RemoteFolder`."""
    return RemoteFolder(place, Path(cache), cache_bytes) if is_remote(place) else Folder(place, verify)

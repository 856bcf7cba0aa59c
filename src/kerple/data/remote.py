"""Prepared folders of shards, on this machine or at a URL; the latter are read through a cache of bounded size.

webdataset reads a remote shard member by member. A member's header is compared with the manifest before that, and its
tokens after it; both are written to the cache as part of a file that equals a local shard, which is then mapped as any
other. So the network decides when a sample arrives, but never which sample it is.

MosaicML Streaming (0.13) and litdata (0.2.76) do more: several clouds, compression, prefetching. But the former cannot
be installed beside this project's lock (numpy below 2.2, transformers below 5), and the latter unpickles what an index
says is a pickle; both read formats of their own, whose items cannot be mapped where they are. webdataset's own cache
opens URLs by running `curl`.
"""

import hashlib
import io
import os
import tarfile
from pathlib import Path
from typing import Any

import numpy as np
from filelock import FileLock
from numpy.typing import NDArray
from tokenizers import Tokenizer
from webdataset.tariterators import reraise_exception, tar_file_iterator

from kerple.base.atomic import write
from kerple.base.errors import UserError
from kerple.data.files import ResumingStream, check_protocol, is_remote
from kerple.data.layout import TAR_BLOCK
from kerple.data.manifest import MANIFEST_FILE, Manifest, SplitEntry, parse_manifest, read_manifest
from kerple.data.shards import Tokens, TokenStream, check_run, header, map_shard, runs_of
from kerple.data.tokenizer import load_tokenizer
from kerple.data.verify import read_offsets, tokenizer_file

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
        verify: Whether tokens are checked on first use, see `TokenStream`, beside the check of each download.

    Raises:
        UserError: The manifest or the tokenizer cannot be loaded, or the cache cannot be made or is too small for two
            shards.
    """

    def __init__(
        self,
        place: str,
        cache: Path,
        cache_bytes: int = CACHE_BYTES,
        attempts: int = 8,
        pause: float = 0.5,
        verify: bool = True,
    ) -> None:
        check_protocol(place)
        self.place, self.verify, self.attempts, self.pause = place.rstrip("/"), verify, attempts, pause
        content = self._small(MANIFEST_FILE)
        self.manifest = parse_manifest(content, f"{self.place}/{MANIFEST_FILE}")
        # a new manifest at the same URL is a new corpus, with copies of its own
        self.directory = cache / hashlib.sha256(self.place.encode() + content).hexdigest()[:16]
        try:
            self.directory.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise UserError(f"data.cache: {cache} cannot be made ({error}); choose another folder") from error
        self.cache_bytes = cache_bytes
        largest = max((self._shard_bytes(s, 0) for s in self.manifest.splits.values() if s.tokens), default=0)
        if cache_bytes < 2 * largest:
            raise UserError(
                f"data.cache_bytes: got {cache_bytes}, expected at least {2 * largest}, the size of two shards of "
                f"{place}"
            )
        self._keep("tokenizer.json", self.manifest.tokenizer)

    def stream(self, split: str) -> TokenStream:
        return RemoteStream(self, split)

    def documents(self, split: str) -> NDArray[np.int64]:
        entry = self.manifest.splits[split]
        self._keep(entry.offsets_file, entry.offsets)
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
        headers = [header(layout.member(split.name, run), self._run_bytes(split, run)) for run in runs]
        remote = ResumingStream(url, self._shard_bytes(split, shard), self.attempts, self.pause)
        checked = CheckedHeaders(remote, headers, layout.run_bytes)
        with io.BufferedReader(checked, 1 << 20) as stream, part.open("r+b") as file:
            try:
                members = tar_file_iterator(stream, handler=reraise_exception)
                for run, member in zip(runs, members, strict=False):
                    check_run(url, layout, split, run, np.frombuffer(member["data"], layout.numpy))
                    file.seek((run - runs.start) * layout.run_bytes)
                    file.write(headers[run - runs.start] + member["data"])
                file.flush()
                os.fsync(file.fileno())  # or a power cut could leave a copy with holes under its final name
            except Exception as error:
                if checked.wrong is not None:
                    wrong = layout.member(split.name, runs[checked.wrong])
                    raise UserError(f"{url}: member {wrong} is not as the manifest says; upload it again") from error
                if isinstance(error, tarfile.TarError):
                    raise UserError(f"{url}: cannot be read to its end ({error}); upload it again") from error
                raise

    def _keep(self, name: str, checksum: str) -> None:
        """Copy a small file into the cache, unless it is there.

        Raises:
            UserError: Its sha256 is not `checksum`, the manifest's.
        """
        with FileLock(self.directory / ".lock"):
            path = self.directory / name
            if path.exists() and hashlib.sha256(path.read_bytes()).hexdigest() == checksum:
                return
            content = self._small(name)
            if hashlib.sha256(content).hexdigest() != checksum:
                raise UserError(f"{self.place}/{name}: its sha256 is not the manifest's; upload the folder again")
            write(path, content)

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


class CheckedHeaders(io.RawIOBase):
    """A remote shard whose members' headers are compared with the manifest before anyone reads what they say.

    A compressed tar, a link or a sparse file, of which a few bytes may become any number, is refused by that.

    Args:
        remote: The shard, read from its beginning.
        headers: The header of each member.
        distance: Bytes from one header to the next.

    Attributes:
        wrong: Number of the member whose header is another; reading fails there. None if there is none so far.
    """

    wrong: int | None = None

    def __init__(self, remote: ResumingStream, headers: list[bytes], distance: int) -> None:
        self.remote, self.headers, self.distance = remote, headers, distance

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        start = self.remote.tell()
        count = self.remote.readinto(buffer)
        view = memoryview(buffer)
        for place in range(start // self.distance, min(-(-(start + count) // self.distance), len(self.headers))):
            first = place * self.distance
            begin, end = max(start, first), min(start + count, first + TAR_BLOCK)
            if begin < end and view[begin - start : end - start] != self.headers[place][begin - first : end - first]:
                self.wrong = place
                raise tarfile.ReadError("a header is not the one that the manifest says")
        return count

    def close(self) -> None:
        self.remote.close()
        super().close()


class RemoteStream(TokenStream):
    """The tokens of one split of a remote folder; a shard is fetched when its first token is read."""

    def __init__(self, folder: RemoteFolder, split: str) -> None:
        super().__init__(folder.directory, folder.manifest, split, folder.verify)
        self.folder = folder

    def run(self, run: int) -> Tokens:
        if run in self.views:
            return self.views[run]
        shard = run // self.layout.runs_per_shard
        path = self.directory / self.layout.shard(self.split.name, shard)
        kept = path.exists()
        try:
            return super().run(run)
        except UserError:
            if not kept:
                raise
            with FileLock(self.directory / ".lock"):  # the copy was damaged here: it is fetched again, once
                path.unlink(missing_ok=True)
            self._forget_deleted()
            return super().run(run)

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
    if is_remote(place):
        return RemoteFolder(place, Path(cache), cache_bytes, verify=verify)
    return Folder(place.removeprefix("file://"), verify)

"""Prepared folders wherever they lie: local ones as they are, remote ones through a cache of bounded size.

webdataset reads a remote shard member by member. Each member is compared with the manifest and written to the cache in
the layout of a local shard, which is then mapped like any other. So the network decides when a sample comes, never
which one.

MosaicML Streaming (0.13) and litdata (0.2.76) were looked at. They do more (several clouds, compression, prefetching),
but read formats of their own instead of WebDataset tars, in whose members tokens can be mapped in place, and both
require torchvision; the former also numpy below 2.2 and the libraries of five clouds. webdataset's own cache opens URLs
by running `curl`.
"""

import hashlib
import io
import tarfile
from pathlib import Path

import numpy as np
from filelock import FileLock
from numpy.typing import NDArray
from webdataset.tariterators import reraise_exception, tar_file_iterator

from kerple.data.files import ResumingStream, check_protocol, is_remote
from kerple.data.manifest import FILE, Manifest, SplitEntry, parse_manifest, read_manifest, write_atomically
from kerple.data.shards import TokenStream, check_run, header, map_shard, runs_of
from kerple.data.verify import read_offsets
from kerple.errors import UserError

SMALL_FILE = 1 << 30  # bytes beyond which a manifest or tokenizer is none
CACHE_BYTES = 16 << 30


class Folder:
    """A folder of shards on this machine.

    Args:
        place: Its path.
        verify: As in `TokenStream`.

    Raises:
        UserError: It has no manifest that can be used.
    """

    def __init__(self, place: str, verify: bool = True) -> None:
        self.place, self.directory, self.verify = place, Path(place), verify
        self.manifest: Manifest = read_manifest(self.directory)

    def stream(self, split: str) -> TokenStream:
        return TokenStream(self.directory, self.manifest, split, self.verify)

    def documents(self, split: str) -> NDArray[np.int64]:
        """Where each document of a split begins in its stream, (documents,) ascending."""
        return read_offsets(self.directory, self.manifest, split).astype(np.int64)


class RemoteFolder(Folder):
    """A folder of shards at a URL.

    Args:
        place: The URL.
        cache: Local folder for copies of shards; several processes and runs may share it.
        cache_bytes: Size the copies of this folder's shards are kept below, by deleting those unused for longest.
        attempts: Failures in a row that a download endures.
        pause: Seconds before the first new attempt, doubled after each.

    Raises:
        UserError: The manifest cannot be had, or the cache holds no two shards.
    """

    def __init__(
        self, place: str, cache: Path, cache_bytes: int = CACHE_BYTES, attempts: int = 8, pause: float = 0.5
    ) -> None:
        check_protocol(place)
        self.place, self.verify, self.attempts, self.pause = place.rstrip("/"), True, attempts, pause
        content = self._small(FILE)
        self.manifest = parse_manifest(content, f"{self.place}/{FILE}")
        # another manifest at the same URL is another corpus
        self.directory = cache / hashlib.sha256(self.place.encode() + content).hexdigest()[:16]
        self.directory.mkdir(parents=True, exist_ok=True)
        self.cache_bytes = cache_bytes
        largest = max((self._shard_bytes(s, 0) for s in self.manifest.splits.values() if s.tokens), default=0)
        if cache_bytes < 2 * largest:
            raise UserError(f"cache_bytes: {cache_bytes}, but two shards of {place} take {2 * largest}")
        tokenizer = self._small("tokenizer.json")
        if hashlib.sha256(tokenizer).hexdigest() != self.manifest.tokenizer:
            raise UserError(f"{self.place}/tokenizer.json: its sha256 is not the manifest's; upload the folder again")
        with FileLock(self.directory / ".lock"):
            if not (self.directory / "tokenizer.json").exists():
                write_atomically(self.directory / "tokenizer.json", tokenizer)

    def stream(self, split: str) -> TokenStream:
        return RemoteStream(self, split)

    def documents(self, split: str) -> NDArray[np.int64]:
        path = self.directory / self.manifest.splits[split].offsets_file
        with FileLock(self.directory / ".lock"):
            if not path.exists():
                write_atomically(path, self._small(path.name))
        return super().documents(split)

    def fetch(self, split: SplitEntry, shard: int) -> Path:
        """A checked local copy of a shard; downloads it unless it is there.

        Raises:
            UserError: It cannot be had, or is not what the manifest says.
        """
        path = self.directory / self.manifest.layout.shard(split.name, shard)
        with FileLock(path.with_suffix(".lock")):  # whoever else wants this shard waits for the one download
            part = path.with_suffix(".part")
            # files of this folder come, go and change their names only under its lock
            with FileLock(self.directory / ".lock"):
                if path.exists():
                    path.touch()  # used just now
                    return path
                self._make_room(self._shard_bytes(split, shard), part)
            self._download(split, shard, part)
            with FileLock(self.directory / ".lock"):
                part.replace(path)
        return path

    def _make_room(self, needed: int, part: Path) -> None:
        """Delete the copies unused for longest, and reserve the room by a file of the size needed."""
        copies = sorted(self.directory.glob("*.tar"), key=lambda p: p.stat().st_mtime_ns)
        taken = sum(p.stat().st_size for p in (*copies, *self.directory.glob("*.part")) if p != part)
        while copies and taken + needed > self.cache_bytes:
            oldest = copies.pop(0)
            taken -= oldest.stat().st_size
            oldest.unlink()
        with part.open("wb") as file:
            file.truncate(needed)  # counted by the others from now on

    def _download(self, split: SplitEntry, shard: int, part: Path) -> None:
        layout = self.manifest.layout
        url = f"{self.place}/{layout.shard(split.name, shard)}"
        runs = runs_of(layout, split, shard)
        expected = {layout.member(split.name, run): run for run in runs}
        first = header(layout.member(split.name, runs.start), self._run_bytes(split, runs.start))
        remote = ResumingStream(url, self._shard_bytes(split, shard), self.attempts, self.pause)
        with io.BufferedReader(remote, 1 << 20) as stream, part.open("r+b") as file:
            if stream.peek(len(first))[: len(first)] != first:  # a compressed tar could unpack to any size
                raise UserError(f"{url}: does not begin with the member the manifest says; upload it again")
            try:
                for member in tar_file_iterator(stream, handler=reraise_exception):
                    name, payload = member["fname"], member["data"]
                    run = expected.pop(name, None)
                    if run is None or len(payload) != self._run_bytes(split, run):
                        raise UserError(f"{url}: member {name!r} of {len(payload)} bytes is not in the manifest")
                    check_run(url, layout, split, run, np.frombuffer(payload, layout.numpy))
                    file.seek((run - runs.start) * layout.run_bytes)
                    file.write(header(name, len(payload)) + payload)
            except tarfile.TarError as error:
                raise UserError(f"{url}: is not a tar file that can be read to its end ({error})") from error
        if expected:
            raise UserError(f"{url}: member {min(expected)}: is missing")

    def _small(self, name: str) -> bytes:
        with ResumingStream(f"{self.place}/{name}", None, self.attempts, self.pause) as stream:
            content = bytearray()
            while chunk := stream.read(1 << 20):
                content += chunk
                if len(content) > SMALL_FILE:
                    raise UserError(f"{self.place}/{name}: is larger than {SMALL_FILE} bytes")
        return bytes(content)

    def _run_bytes(self, split: SplitEntry, run: int) -> int:
        return self.manifest.layout.tokens_in_run(split.tokens, run) * self.manifest.layout.numpy.itemsize

    def _shard_bytes(self, split: SplitEntry, shard: int) -> int:
        return self.manifest.layout.shard_bytes(split.tokens, shard)


class RemoteStream(TokenStream):
    """The tokens of one split of a remote folder."""

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
                    if path.exists():  # else another process made room in between
                        raise
            self._forget_deleted()
            self.maps[shard] = mapped
        return mapped

    def _forget_deleted(self) -> None:
        """A deleted file that is still mapped would go on taking its space."""
        for shard in list(self.maps):
            if not (self.directory / self.layout.shard(self.split.name, shard)).exists():
                del self.maps[shard]
                for run in runs_of(self.layout, self.split, shard):
                    self.views.pop(run, None)


def open_folder(place: str, verify: bool, cache: str, cache_bytes: int) -> Folder:
    """A prepared folder by path or URL."""
    return RemoteFolder(place, Path(cache), cache_bytes) if is_remote(place) else Folder(place, verify)

import shutil
import subprocess
import sys
import tarfile
import threading
import time
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest
import torch

from kerple.base.errors import UserError
from kerple.data import TokenShards, files
from kerple.data.manifest import Manifest, read_manifest
from kerple.data.prepare.corpora import sources
from kerple.data.remote import Folder, RemoteFolder
from kerple.data.shards import TokenStream


class Server(ThreadingHTTPServer):
    """Serves a folder, with ranges, and lets every second request go wrong in the ways asked for, in turn."""

    daemon_threads = True

    def __init__(self, folder: Path) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.folder, self.faults, self.ranges = folder, list[str](), True
        self.requests = list[str]()
        self.turn = 0
        self.url = f"http://127.0.0.1:{self.server_port}"

    def fault(self) -> str | None:
        self.turn += 1
        return self.faults[self.turn // 2 % len(self.faults)] if self.faults and self.turn % 2 else None


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: Server

    def do_HEAD(self) -> None:
        self.answer(body=False)

    def do_GET(self) -> None:
        self.server.requests.append(self.path)
        self.answer(body=True)

    def answer(self, body: bool) -> None:
        path = self.server.folder / self.path.lstrip("/")
        if not path.is_file():
            self.send_error(404)
            return
        content, status = path.read_bytes(), 200
        fault = self.server.fault() if body else None
        if fault == "error":
            self.send_error(503)
            return
        start = 0
        if self.server.ranges and (asked := self.headers.get("Range")):
            start, end = (int(part or len(content) - 1) for part in asked.removeprefix("bytes=").split("-"))
            total, status = len(content), 206
            content = content[start : end + 1]
        self.send_response(status)
        self.send_header("Content-Length", str(len(content)))
        if self.server.ranges:
            self.send_header("Accept-Ranges", "bytes")
        if status == 206:
            self.send_header("Content-Range", f"bytes {start}-{start + len(content) - 1}/{total}")
        self.end_headers()
        if body:
            self.wfile.write(content[: len(content) // 2] if fault else content)
            if fault == "stall":
                time.sleep(1.5)
            self.close_connection = fault is not None

    def log_message(self, *arguments: object) -> None: ...


@pytest.fixture
def server(prepared: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Server]:
    monkeypatch.setattr(files, "STALL", 0.3)
    shutil.copytree(prepared, tmp_path / "served")
    server = Server(tmp_path / "served")
    threading.Thread(target=server.serve_forever, args=(0.05,), daemon=True).start()
    yield server
    server.shutdown()
    server.server_close()


def shard_bytes(folder: Path) -> int:
    return (folder / "train-00000.tar").stat().st_size


@pytest.mark.parametrize("ranges", [True, False])
@pytest.mark.parametrize("faults", [[], ["drop", "error", "stall"]])
def test_whatever_the_server_does_the_tokens_are_the_same(
    server: Server, prepared: Path, tmp_path: Path, faults: list[str], ranges: bool
) -> None:
    server.faults, server.ranges = faults, ranges

    folder = RemoteFolder(server.url, tmp_path / "cache", pause=0.01)
    stream = folder.stream("train")

    expected = TokenStream(prepared, read_manifest(prepared), "train")
    assert stream.read(0, len(stream)).tolist() == expected.read(0, len(expected)).tolist()


def test_a_server_that_only_fails_ends_in_an_error_that_names_the_file(server: Server, tmp_path: Path) -> None:
    folder = RemoteFolder(server.url, tmp_path / "cache", attempts=3, pause=0.01)
    (server.folder / "train-00000.tar").rename(server.folder / "gone")
    with pytest.raises(ValueError, match=r"/train-00000\.tar: there is no such file"):
        folder.stream("train").read(0, 10)
    with pytest.raises(ValueError, match=r"manifest\.json: .*attempts failed|manifest\.json: there is no such"):
        RemoteFolder("http://127.0.0.1:9", tmp_path / "cache", attempts=2, pause=0.01)


def test_the_cache_stays_below_its_size_and_keeps_what_was_used_last(
    server: Server, prepared: Path, tmp_path: Path
) -> None:
    limit = 2 * shard_bytes(prepared)
    folder = RemoteFolder(server.url, tmp_path / "cache", limit)
    stream, held = folder.stream("train"), list[int]()
    expected = TokenStream(prepared, read_manifest(prepared), "train")

    def read(stream: TokenStream, number: int) -> list[int]:
        time.sleep(0.02)  # the time of a file's last use is coarse
        return stream.read(min(number * 3000 + 50, len(stream) - 20), 20).tolist()

    def kept() -> set[int]:
        return {int(path.stem[-5:]) for path in folder.directory.glob("*.tar")}

    for number in (0, 1, 2, 0, 3, 3, 1):
        assert read(stream, number) == read(expected, number)
        held = held if number in held else [*held[-1:], number]
        assert kept() == set(held)
        assert sum(p.stat().st_size for p in folder.directory.glob("*.tar")) <= limit
        assert len(stream.maps) <= 2
    again = RemoteFolder(server.url, tmp_path / "cache", limit).stream("train")
    before = len(server.requests)
    for number in (held[1], held[0]):
        read(again, number)
    assert len(server.requests) == before  # the copies of an earlier run serve
    read(again, 0)
    assert kept() == {held[0], 0}  # it was fetched before the other, and used after it
    with pytest.raises(ValueError, match=r"cache_bytes: got 100, expected at least \d+, the size of two shards"):
        RemoteFolder(server.url, tmp_path / "cache", 100)


READER = """
import sys
from pathlib import Path
from kerple.data.remote import Folder, RemoteFolder
folder = RemoteFolder(sys.argv[1], Path(sys.argv[2]), int(sys.argv[3]))
stream = folder.stream("train")
expected = Path(sys.argv[4]).read_bytes()
for turn in range(2):
    for start in range(0, len(stream) - 20, 700 + 100 * turn):
        found = stream.read(start, 20).astype("<u2").tobytes()
        assert found == expected[2 * start : 2 * start + 40], start
"""


@pytest.mark.slow
def test_processes_that_share_a_cache_too_small_for_all_read_the_same(
    server: Server, prepared: Path, tmp_path: Path
) -> None:
    expected = TokenStream(prepared, read_manifest(prepared), "train")
    (tmp_path / "tokens").write_bytes(expected.read(0, len(expected)).astype("<u2").tobytes())
    arguments = [server.url, tmp_path / "cache", 2 * shard_bytes(prepared), tmp_path / "tokens"]
    command = [sys.executable, "-c", READER, *map(str, arguments)]
    readers = [subprocess.Popen(command, stderr=subprocess.PIPE, text=True) for _ in range(3)]
    for reader in readers:
        assert (reader.communicate()[1], reader.returncode) == ("", 0)


def damage_payload(content: bytearray) -> None:
    content[600] ^= 1


def damage_name(content: bytearray) -> None:
    content[:5] = b"../x-"


def compress(content: bytearray) -> None:
    content[:2] = b"\x1f\x8b"


@pytest.mark.parametrize("damage", [damage_payload, damage_name, compress])
def test_a_shard_that_is_not_the_manifests_is_refused(
    server: Server, tmp_path: Path, damage: Callable[[bytearray], None]
) -> None:
    shard = server.folder / "train-00000.tar"
    content = bytearray(shard.read_bytes())
    damage(content)
    shard.write_bytes(content)
    folder = RemoteFolder(server.url, tmp_path / "cache")
    with pytest.raises(ValueError, match=r"http://127\.0\.0\.1:\d+/train-00000\.tar: "):
        folder.stream("train").read(0, 10)
    assert not list(folder.directory.glob("*.tar"))


def test_training_from_a_url_sees_the_samples_of_the_local_folder(
    server: Server, prepared: Path, tmp_path: Path
) -> None:
    def samples(directory: str) -> torch.Tensor:
        data = TokenShards(
            None,
            directory=directory,
            vocabulary=300,
            length=16,
            batch_size=8,
            shuffle_shards=1,
            cache=str(tmp_path / "cache"),
            cache_bytes=2 * shard_bytes(prepared),
        )
        return torch.cat([batch["tokens"] for batch in data.train_dataloader()])

    assert torch.equal(samples(server.url), samples(str(prepared)))


def test_a_cache_too_small_for_the_shuffle_is_refused(server: Server, prepared: Path, tmp_path: Path) -> None:
    size = 2 * shard_bytes(prepared)
    data = TokenShards(
        None, directory=server.url, vocabulary=300, length=16, cache=str(tmp_path / "cache"), cache_bytes=size
    )
    with pytest.raises(
        ValueError, match=f"cache_bytes: got {size}, expected at least .* shards .* set a smaller shuffle_shards"
    ):
        data.train_dataloader()


def test_a_corpus_over_http(
    server: Server, json_lines: Path, tmp_path: Path, small_build: Callable[..., Manifest]
) -> None:
    shutil.copy(json_lines / "part0.jsonl", server.folder)
    server.faults = ["drop", "error"]
    local = small_build(tmp_path / "local", json_lines / "part0.jsonl")

    remote = small_build(tmp_path / "remote", f"{server.url}/part0.jsonl")

    assert remote.splits == local.splits
    assert sources(f"{server.url}/part0.jsonl")[0].size is None


def test_a_folder_without_its_tokenizer_says_so(prepared: Path, tmp_path: Path) -> None:
    copied = shutil.copytree(prepared, tmp_path / "copied")
    (copied / "tokenizer.json").unlink()
    with pytest.raises(UserError, match=r"tokenizer\.json: is missing or its sha256 is not the manifest's"):
        Folder(str(copied)).tokenizer()


def test_a_damaged_copy_of_a_shard_is_fetched_again(server: Server, prepared: Path, tmp_path: Path) -> None:
    expected = TokenStream(prepared, read_manifest(prepared), "train").read(0, 10).tolist()
    folder = RemoteFolder(server.url, tmp_path / "cache")
    folder.stream("train").read(0, 10)
    copy = folder.directory / "train-00000.tar"
    for damage in (damage_payload, lambda content: content.clear()):
        content = bytearray(copy.read_bytes())
        damage(content)
        copy.write_bytes(content)
        before = len(server.requests)
        assert folder.stream("train").read(0, 10).tolist() == expected
        assert len(server.requests) == before + 1
    (server.folder / "train-00000.tar").unlink()
    copy.write_bytes(b"")
    with pytest.raises(ValueError, match=r"train-00000\.tar: there is no such file"):
        folder.stream("train").read(0, 10)


def test_a_damaged_copy_of_a_small_file_is_replaced_and_a_damaged_original_not_kept(
    server: Server, prepared: Path, tmp_path: Path
) -> None:
    original = (server.folder / "test.offsets").read_bytes()
    (server.folder / "test.offsets").write_bytes(original[:-8])
    folder = RemoteFolder(server.url, tmp_path / "cache")
    with pytest.raises(ValueError, match=r"/test\.offsets: its sha256 is not the manifest's; upload"):
        folder.documents("test")
    (server.folder / "test.offsets").write_bytes(original)
    assert folder.documents("test").tolist() == Folder(str(prepared)).documents("test").tolist()
    (folder.directory / "test.offsets").write_bytes(b"")
    assert len(folder.documents("test")) == len(original) // 8


def test_a_sparse_member_of_a_remote_shard_is_never_unpacked(server: Server, tmp_path: Path) -> None:
    shard = server.folder / "train-00000.tar"
    content = bytearray(shard.read_bytes())
    second = read_manifest(server.folder).layout.run_bytes
    content[second + 156 : second + 157] = tarfile.GNUTYPE_SPARSE
    content[second + 483 : second + 495] = b"%011o\0" % (1 << 32)  # the size that it claims
    content[second + 148 : second + 156] = b" " * 8
    content[second + 148 : second + 156] = b"%06o\0 " % sum(content[second : second + 512])
    shard.write_bytes(content)
    with tarfile.open(shard) as archive:
        assert archive.getmembers()[1].size == 1 << 32  # it is one, for anybody who believes it
    with pytest.raises(
        ValueError, match=r"train-00000\.tar: member train-00000001\.u16 is not as .* says; upload it again$"
    ):
        RemoteFolder(server.url, tmp_path / "cache").stream("train").read(0, 10)


def test_a_server_that_is_not_there_is_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(files, "FIRST_PAUSE", 0.0)
    monkeypatch.setattr(files.time, "sleep", lambda _: None)
    with pytest.raises(ValueError, match=r"http://127\.0\.0\.1:9/folder: \d attempts failed"):
        sources("http://127.0.0.1:9/folder")

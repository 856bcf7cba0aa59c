"""Shards at a URL: copied once, compared with their checksums, and read like local ones."""

import errno
import json
import resource
import shutil
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import fsspec
import pytest
from filelock import FileLock

from kerple.base.errors import UserError
from kerple.data import remote_shards
from kerple.data.manifest import MANIFEST_FILE, SPLITS
from kerple.data.shards import Folder, TokenStream, verify
from tests.web_server import Clock, answer, send_slowly, serving, truncate

GB = 1.0


@pytest.fixture
def server(prepared, tmp_path):
    with serving(Path(shutil.copytree(prepared, tmp_path / "served"))) as server:
        yield server


@pytest.fixture
def clock(monkeypatch):
    clock = Clock()
    monkeypatch.setattr(remote_shards, "time", clock)
    return clock


@pytest.fixture
def cache(tmp_path, clock):
    return str(tmp_path / "cache")


def flip(path: Path) -> None:
    """Change one byte of a file."""
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)


def tokens(folder: Folder) -> list[list[int]]:
    return [TokenStream(folder, split)[:].tolist() for split in SPLITS]


def copies(cache: str) -> dict[str, bytes]:
    """The content of each copy by its name, which follows a hash."""
    return {path.name.partition("-")[2]: path.read_bytes() for path in Path(cache, "shards").glob("[!.]*")}


def test_a_folder_at_a_url_equals_the_local_one_and_each_file_is_fetched_once(server, prepared, cache):
    local = Folder(prepared)
    with ThreadPoolExecutor(3) as readers:
        assert list(readers.map(lambda _: tokens(Folder(server.url, cache, GB)), range(3))) == [tokens(local)] * 3
    for location in (f"{server.url}/", f"file://{server.folder}"):
        verify(Folder(location, cache, GB))
    assert Folder(server.url, cache, GB).test_documents().equals(local.test_documents())
    fetched = [path for path in server.handler.requests if "manifest" not in path]
    assert len(fetched) == len(set(fetched)) == len(list(prepared.glob("[!.m]*")))


def test_an_interrupted_answer_is_repeated_and_leaves_no_partial_file(server, prepared, cache, capfd):
    folder = Folder(server.url, cache, GB)
    server.handler.fault = truncate
    verify(folder)
    expected = {path.name: path.read_bytes() for path in prepared.glob("[!.m]*")}
    assert copies(cache) == expected
    assert "trying again" in capfd.readouterr().err


@pytest.mark.parametrize(
    ("fault", "message", "attempts"),
    [
        (answer(503), r"cannot be read \(ClientResponseError: 503.*check the address, the server and your cred", 11),
        (answer(403), r"/train-00000.tar cannot be read \(ClientResponseError: 403", 1),
        (answer(404), "/train-00000.tar cannot be read", 1),
        (
            answer(302, {"Location": "http://localhost:9/x"}),
            "-> http://localhost:9/x, expected no redirect to another",
            1,
        ),
    ],
)
def test_an_answer_other_than_the_file_is_one_line(server, cache, fault, message, attempts):
    folder = Folder(server.url, cache, GB)
    server.handler.requests.clear()
    server.handler.fault = fault
    with pytest.raises(UserError, match=message) as error:
        TokenStream(folder, "train")[:5]
    assert "\n" not in str(error.value)
    assert len(server.handler.requests) == attempts
    assert copies(cache) == {}


def test_a_redirect_within_the_server_is_followed(server, cache, prepared):
    folder, moved = Folder(server.url, cache, GB), server.folder / "moved"
    moved.mkdir()
    shutil.move(server.folder / "train-00000.tar", moved / "shard.tar")
    server.handler.fault = answer(302, {"Location": "/moved/shard.tar"}, "train-00000")
    assert tokens(folder) == tokens(Folder(prepared))


@pytest.mark.parametrize("error", [TimeoutError(errno.ETIMEDOUT, "timed out"), ConnectionResetError()])
def test_an_error_of_the_network_is_repeated(server, cache, prepared, monkeypatch, error):
    folder, errors = Folder(server.url, cache, GB), [error]
    read = fsspec.filesystem("http").cat_file
    answers = SimpleNamespace(cat_file=lambda url: read(url) if not errors else throw(errors.pop()))
    monkeypatch.setattr(remote_shards, "filesystem", lambda url, *_, **__: (answers, url))
    assert tokens(folder) == tokens(Folder(prepared))


@pytest.mark.parametrize("seconds", [0, 60, 119])
def test_a_server_that_does_not_answer_is_asked_for_two_minutes(server, cache, clock, monkeypatch, seconds):
    folder, requests = Folder(server.url, cache, GB), []
    silent = SimpleNamespace(
        cat_file=lambda url: requests.append(clock.now) or clock.sleep(seconds) or throw(OSError())
    )
    monkeypatch.setattr(remote_shards, "filesystem", lambda url, *_, **__: (silent, url))
    with pytest.raises(UserError, match=r"train-00000.tar cannot be read"):
        folder.shard("train", 0)
    assert 60 <= requests[-1] <= 120


@pytest.mark.parametrize(("status", "attempts"), [(503, 3), (429, 3), (404, 1), (403, 1)])
def test_a_manifest_is_requested_again_like_a_shard(server, cache, prepared, capfd, status, attempts):
    server.handler.fault = lambda handler, number: number < 3 and answer(status)(handler, number)
    if attempts == 1:
        with pytest.raises(UserError, match=r"/manifest\.json cannot be read"):
            Folder(server.url, cache, GB)
    else:
        assert Folder(server.url, cache, GB).manifest == Folder(prepared).manifest
        assert f"{server.url}/manifest.json: ClientResponseError: {status}" in capfd.readouterr().err
    assert server.handler.requests == ["/manifest.json"] * attempts


def test_a_full_memory_is_no_error_of_the_server(server, cache, monkeypatch):
    folder, requests = Folder(server.url, cache, GB), []
    full = SimpleNamespace(cat_file=lambda url: requests.append(url) or throw(MemoryError()))
    monkeypatch.setattr(remote_shards, "filesystem", lambda url, *_, **__: (full, url))
    with pytest.raises(MemoryError):
        folder.shard("train", 0)
    assert len(requests) == 1


def throw(error: Exception) -> None:
    raise error


def test_a_server_that_sends_nothing_is_given_up_and_one_that_is_slow_is_not(server, cache, prepared, monkeypatch):
    monkeypatch.setattr(remote_shards, "TIMEOUT", 0.3)  # seconds without a byte
    fsspec.get_filesystem_class("http").clear_instance_cache()  # connections have the timeout of their start
    folder = Folder(server.url, cache, GB)
    server.handler.fault = partial(send_slowly, pauses=[0.1] * 6)
    assert TokenStream(folder, "train").shard(0).tolist() == TokenStream(Folder(prepared), "train").shard(0).tolist()
    server.handler.requests.clear()
    server.handler.fault = partial(send_slowly, pauses=[60])
    with pytest.raises(UserError, match=r"train-00001.tar cannot be read \(.*Timeout.*; check the address, the server"):
        folder.shard("train", 1, patience=2.0)
    assert len(server.handler.requests) == 2
    fsspec.get_filesystem_class("http").clear_instance_cache()


def test_a_full_disk_is_an_error_of_the_cache(server, cache):
    folder = Folder(server.url, cache, GB)
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1000, hard))  # the kernel refuses longer files
    try:
        with pytest.raises(OSError, match=r"File too large: '.*/cache/shards/.*-train-00000.tar'"):
            folder.shard("train", 0)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert copies(cache) == {}
    folder.shard("train", 0).close()


def test_without_a_server_or_a_manifest_the_message_is_one_line(tmp_path, cache):
    with serving(tmp_path) as server:
        with pytest.raises(UserError, match=r"/manifest.json cannot be read \(FileNotFoundError"):
            Folder(server.url, cache, GB)
        (tmp_path / "manifest.json").write_text("{}")
        with pytest.raises(UserError, match=rf"{server.url}/manifest.json: is not a manifest"):
            Folder(server.url, cache, GB)
    with pytest.raises(UserError, match=rf"{server.url}/manifest.json cannot be read \(ClientConnectorError"):
        Folder(server.url, cache, GB)
    for url in ("pipe://x", "ssh://x", "http://x::file://y", "s3x://b"):
        with pytest.raises(UserError, match=r"data.directory: got .*, expected a local path, or a URL without"):
            Folder(url, cache, GB)


@pytest.mark.parametrize("name", ["train-00000.tar", "tokenizer.json", "test-documents.jsonl"])
def test_a_file_with_another_checksum_is_refused(server, cache, name):
    flip(server.folder / name)
    with pytest.raises(UserError, match=rf"{server.url}/{name}: its sha256 differs from the manifest"):
        verify(Folder(server.url, cache, GB))
    assert name not in copies(cache)


@pytest.mark.parametrize("change", [-1, 1, 10**9])
@pytest.mark.parametrize("protocol", ["http", "file"])
def test_a_shard_of_another_size_than_in_the_manifest_is_refused(server, cache, protocol, change):
    manifest = json.loads((server.folder / MANIFEST_FILE).read_text())
    manifest["splits"]["train"]["shards"][0]["tokens"] += 256 * change  # a tar file is padded to 512 bytes
    (server.folder / MANIFEST_FILE).write_text(json.dumps(manifest))
    url = server.url if protocol == "http" else f"file://{server.folder}"
    with pytest.raises(UserError, match=rf"{url}/train-00000\.tar: is not \d+ bytes long, as in the manifest; copy"):
        TokenStream(Folder(url, cache, 1e4), "train")[:5]


def test_a_copy_that_was_damaged_is_fetched_again(server, cache, prepared):
    expected = tokens(Folder(server.url, cache, GB))
    for path in Path(cache, "shards").glob("[!.]*train-0000*"):
        flip(path)
    assert tokens(Folder(server.url, cache, GB)) == expected == tokens(Folder(prepared))


def test_the_cache_is_bounded_and_keeps_the_files_in_use(server, cache, prepared):
    sizes = sorted(path.stat().st_size for path in prepared.glob("train-*.tar"))
    limit = 3 * sizes[-1] / 1e9
    stream, expected = TokenStream(Folder(server.url, cache, limit), "train", 1), TokenStream(Folder(prepared), "train")
    used = stream.shard(0)  # a view of the file, which keeps it in use
    for number in range(len(stream.shards)):
        assert stream.shard(number).tolist() == expected.shard(number).tolist()
        assert sum(map(len, copies(cache).values())) <= 3 * sizes[-1]
        assert "train-00000.tar" in copies(cache)
    del used, stream
    with pytest.raises(UserError, match=r"data.cache_gb: got .* more, because the other files in .* are in use"):
        tokens(Folder(server.url, cache, limit))


def test_a_file_that_another_process_is_fetching_is_not_deleted_to_make_room(server, cache, prepared):
    part = Path(cache, "shards", "0-train-00000.tar.temp1")
    part.parent.mkdir(parents=True)
    part.write_bytes(bytes(1 << 20))
    part.with_name("1-train-00001.tar").symlink_to("missing")  # like a file that is deleted after it was listed
    stream = TokenStream(Folder(server.url, cache, 1e-3), "train")
    with FileLock(part.with_name(".0.lock")), pytest.raises(UserError, match=r"data.cache_gb: got .* are in use"):
        stream.shard(0)
    assert part.exists()
    assert stream.shard(0).tolist() == TokenStream(Folder(prepared), "train").shard(0).tolist()
    assert not part.exists()  # its process was killed


KILLED = """
import sys
from kerple.data.shards import Folder, TokenStream
stream = TokenStream(Folder(sys.argv[1], sys.argv[2], 1.0), "train")
for number in range(len(stream.shards)):
    print(sum(map(int, stream.shard(number))), flush=True)
"""


def test_a_url_with_a_query_is_refused_without_printing_it(server, cache):
    message = rf"^data.directory: got {server.url}/a with a query, expected a URL without one; .* environment$"
    for end in ("/a?key=secret", "/a#b"):
        with pytest.raises(UserError, match=message):
            Folder(f"{server.url}{end}", cache, GB)
    assert not server.handler.requests


@pytest.mark.slow
def test_readers_that_are_killed_at_any_moment_leave_a_cache_that_others_can_use(server, cache, prepared):
    expected = [str(sum(map(int, TokenStream(Folder(prepared), "train").shard(n)))) for n in range(5)]
    command = [sys.executable, "-c", KILLED, server.url, cache]
    for kill in range(8):
        process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
        for _ in range(kill % 5):
            process.stdout.readline()
        process.kill()
        process.communicate()
    assert subprocess.run(command, capture_output=True, text=True, timeout=60).stdout.split()[:5] == expected
    assert not list(Path(cache, "shards").glob("*.temp*"))


@pytest.mark.slow
def test_no_program_is_started_and_nothing_is_unpickled(server, cache, tmp_path):
    """An audit hook sees both, also in libraries."""
    code = "import sys\nevents = {'subprocess.Popen', 'os.system', 'os.exec', 'os.posix_spawn', 'pickle.find_class'}\n"
    code += "import torch\ndef audit(event, _):\n    if event in events: print('AUDIT', event, flush=True)\n"
    code += f"sys.addaudithook(audit)\n{KILLED}"
    flip(server.folder / "train-00003.tar")
    run = subprocess.run([sys.executable, "-c", code, server.url, cache], capture_output=True, text=True, timeout=100)
    assert "sha256 differs" in run.stderr
    assert len(run.stdout.split()) == 3
    assert "AUDIT" not in run.stdout

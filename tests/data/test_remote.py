"""Shards at a URL: copied once, checked, then read like local ones."""

import shutil
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from kerple.base.errors import UserError
from kerple.cli import prepare
from kerple.data import TokenShards
from kerple.data.prepare.corpora import find_corpus
from kerple.data.prepare.readers import Document
from kerple.data.shards import Folder, verify
from tests.data.test_shards import flip, grow


class Handler(SimpleHTTPRequestHandler):
    """Serves a folder; every second answer breaks off in its middle if ``breaks`` is set."""

    requests: list[str]
    breaks = False

    def do_GET(self) -> None:
        self.requests.append(self.path)
        path = Path(self.translate_path(self.path))
        if not (self.breaks and len(self.requests) % 2) or not path.is_file():
            super().do_GET()
            return
        content = path.read_bytes()
        self.send_response(200)
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        self.wfile.write(content[: len(content) // 2])

    def log_message(self, *arguments: object) -> None: ...


class Server(ThreadingHTTPServer):
    daemon_threads = True

    def __init__(self, folder: Path) -> None:
        self.handler = type("Requests", (Handler,), {"requests": []})
        super().__init__(("127.0.0.1", 0), partial(self.handler, directory=str(folder)))
        self.folder, self.url = folder, f"http://127.0.0.1:{self.server_port}"


@pytest.fixture
def server(prepared, tmp_path):
    server = Server(Path(shutil.copytree(prepared, tmp_path / "served")))
    threading.Thread(target=server.serve_forever, args=(0.05,), daemon=True).start()
    yield server
    server.shutdown()
    server.server_close()


def test_a_folder_at_a_url_is_the_local_one_and_each_file_is_fetched_once(server, prepared, tmp_path):
    cache, local = str(tmp_path / "cache"), Folder(str(prepared))
    expected = local.stream("train").read(0, len(local.stream("train"))).tolist()

    def read(_: int) -> list[int]:
        stream = Folder(server.url, cache).stream("train")
        return stream.read(0, len(stream)).tolist()

    with ThreadPoolExecutor(3) as readers:
        assert list(readers.map(read, range(3))) == [expected] * 3
    verify(Folder(f"{server.url}/", cache))
    assert len(server.handler.requests) == len(set(server.handler.requests)) == len(list(prepared.glob("[!.]*")))
    assert Folder(server.url, cache).documents("test").tolist() == local.documents("test").tolist()


def test_an_answer_that_breaks_off_leaves_nothing_and_the_next_start_goes_on(server, prepared, tmp_path):
    server.handler.breaks, complaints = True, 0
    for _ in range(100):
        try:
            verify(Folder(server.url, str(tmp_path / "cache")))
            break
        except UserError as error:
            complaints += server.url in str(error)
    copies = {path.name: path.read_bytes() for path in tmp_path.glob("cache/*/[!.]*")}
    assert copies == {path.name: path.read_bytes() for path in prepared.glob("[!.]*")}
    assert complaints > 5


def test_with_sections_a_node_fetches_its_own_shards_and_a_step_has_the_samples_of_one_device(server, tmp_path):
    mixture, device = {server.url: 2.0, f"{server.url}/.": 1.0}, SimpleNamespace(root_device=torch.device("cpu"))

    def batches(cache: Path, ranks: int, rank: int, done: int = 0, sections: int = 4) -> Iterator[list[list[int]]]:
        options = {"directory": server.url, "cache": str(cache), "mixture": mixture, "sections": sections}
        data = TokenShards(None, vocabulary=300, length=16, batch_size=8 // ranks, **options)  # type: ignore[arg-type]
        trainer = {"global_rank": rank, "world_size": ranks, "max_steps": 300, "accumulate_grad_batches": 1}
        data.trainer = SimpleNamespace(**trainer, strategy=device)  # type: ignore[assignment]
        loader = data.train_dataloader()
        loader.load_state_dict({"samples_before_epoch": 0, "samples_in_epoch": done * 8})
        return (batch["tokens"].tolist() for batch in loader)

    def fetched(cache: Path) -> int:
        return sum(path.stat().st_size for path in cache.glob("*/train-*.tar"))

    one = list(batches(tmp_path / "one", 1, 0))
    for node in range(4):
        cache = tmp_path / f"node-{node}"
        ranks = [list(batches(cache, 8, rank)) for rank in (2 * node, 2 * node + 1)]
        expected = [batch[2 * node : 2 * node + 2] for batch in one]
        assert [first + second for first, second in zip(*ranks, strict=True)] == expected
        assert fetched(cache) < 0.4 * fetched(tmp_path / "one")
        assert list(batches(cache, 4, node, 100)) == expected[100:]
    with pytest.raises(UserError, match=r"data\.sections: got 3, expected a divisor of 8, a batch"):
        batches(tmp_path / "one", 1, 0, sections=3)


@pytest.mark.parametrize(("name", "damage"), [("train-00000.tar", flip), ("tokenizer.json", grow)])
def test_a_file_that_is_not_the_manifests_is_refused(server, tmp_path, damage, name):
    damage(server.folder / name)
    folder = Folder(server.url, str(tmp_path / "cache"))
    with pytest.raises(UserError, match=rf"http://127\.0\.0\.1:\d+/{name}: its sha256 is not the manifest's"):
        verify(folder)
    assert not (folder.directory / name).exists()


def test_an_address_that_only_a_checkpoint_names_is_not_read(server, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)

    def tested(**options: object) -> TokenShards:
        data = TokenShards(vocabulary=300, length=16, **options)  # type: ignore[arg-type]
        data.reads_only = True  # as `test` does, whose options come from a checkpoint
        data.prepare_data()
        data.setup()
        data.train_dataloader()
        return data

    for options in ({"directory": server.url}, {"directory": str(server.folder), "mixture": {server.url: 1.0}}):
        with pytest.raises(UserError, match=rf"got {server.url}, which nobody has read here before"):
            tested(corpus=None, **options)
    assert server.handler.requests == []
    prepare.main([f"--data.directory={server.url}"])  # the user names it
    assert len(tested(directory=server.url).blocks("test", 16)) > 0


def test_a_corpus_at_a_url(server, tmp_path):
    lines = b"".join(b'{"text": "%d"}\n' % number for number in range(1000))
    (server.folder / "c.jsonl").write_bytes(lines)
    corpus = find_corpus(f"{server.url}/c.jsonl?download=1")
    texts = [document.text for document in corpus.documents() if isinstance(document, Document)]
    assert texts == list(map(str, range(1000)))
    assert corpus.state() is None
    with pytest.raises(UserError, match=r"/none\.jsonl: cannot be read"):
        list(find_corpus(f"{server.url}/none.jsonl").documents())

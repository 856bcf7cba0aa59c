"""Fits that read their shards from a web server, which is stopped, slow, or serves other files."""

import json
import random
import shutil
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from pytorch_lightning import Callback

from kerple.data import remote_shards
from kerple.data.manifest import read_manifest
from tests.disturbed import Fit, assert_same_state, interruption, prepare
from tests.web_server import Clock, Handler, Server, serving

pytestmark = pytest.mark.slow
STEPS = 300


class Impatient(Callback):
    """Repeats requests for shards without a pause."""

    def __init__(self) -> None:
        super().__init__()
        remote_shards.time = Clock()


def gone(after: int) -> Any:
    """Return a fault that answers nothing after a number of requests."""

    def fault(handler: Handler, number: int) -> bool:
        if number > after:
            handler.close_connection = True
        return number > after

    return fault


@pytest.fixture(scope="module")
def shards(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """About 25 shards with 60 samples of 16 tokens each."""
    return prepare(tmp_path_factory.mktemp("streamed"), 200, (100, 100), part=5000)


def fit(
    folder: Path, directory: str | Path, workers: int = 0, sections: int | None = 1, processes: int = 1,
    name: str = "fit", cache_gb: float = 1.0, **trainer: Any,
) -> Fit:  # fmt: skip
    options: dict[str, Any] = {"directory": str(directory), "sections": sections, "workers": workers}
    options |= {"cache": str(folder / "cache"), "cache_gb": cache_gb}
    trainer = {"max_steps": STEPS, "val_check_interval": 20, "accumulate_grad_batches": 1} | trainer
    trainer["callbacks"] = [{"class_path": f"{__name__}.Impatient"}, *trainer.get("callbacks", [])]
    return Fit(folder / name, Path(str(directory)), processes, data=options, trainer=trainer)


def disturbed(folder: Path, server: Server, fit: Fit, kills: int, seed: int) -> None:
    """Start a fit again and again, and stop the server or the fit at random moments. The cache starts empty."""
    draw, record = random.Random(seed), fit.folder / "rank0.jsonl"
    for _ in range(kills):
        shutil.rmtree(folder / "cache", ignore_errors=True)
        server.handler.requests.clear()
        if draw.random() < 0.5:
            earlier = record.read_text().splitlines() if record.exists() else []
            server.handler.fault = gone(draw.randint(1, 5))
            assert fit.start() == 2
            error = [line for line in (fit.folder / "log0.txt").read_text().splitlines() if line.startswith("error:")]
            assert "cannot be read" in error[-1]
            assert "then run the same command again" in error[-1]
            lines = record.read_text().splitlines()[len(earlier) :] if record.exists() else []
            if steps := [number for kind, number, *_ in map(json.loads, lines) if kind == "batch"]:
                assert fit.checkpoint()["global_step"] == steps[-1] + 1  # no step is lost
        else:
            server.handler.fault = None
            assert fit.start(interruption("on_train_batch_start", draw.randint(1, 12))) == -9
    server.handler.fault = None
    assert fit.start() == 0


@pytest.fixture(scope="module")
def whole(shards: Path, tmp_path_factory: pytest.TempPathFactory) -> Fit:
    """A finished fit that reads the shards from this machine."""
    whole = fit(tmp_path_factory.mktemp("whole"), shards)
    assert whole.start() == 0
    return whole


@pytest.mark.parametrize(("workers", "kills"), [(0, 14), (1, 6)])
def test_streamed_fits_that_are_killed_or_lose_their_server_continue_bit_for_bit(
    shards, whole, tmp_path, workers, kills
):
    with serving(shards) as server:
        streamed = fit(tmp_path, server.url, workers)
        disturbed(tmp_path, server, streamed, kills, workers)
    assert streamed.rows() == whole.rows()
    assert_same_state(streamed.checkpoint(), whole.checkpoint())


def test_two_runs_share_a_small_cache_while_one_is_killed(shards, whole, tmp_path):
    largest = max(path.stat().st_size for path in shards.glob("*.tar"))
    with serving(shards) as server, ThreadPoolExecutor() as threads:
        runs = [fit(tmp_path, server.url, name=name, cache_gb=16 * largest / 1e9) for name in ("first", "second")]
        ended = threads.submit(runs[1].start)
        for call in (3, 40, 90):
            assert runs[0].start(interruption("on_train_batch_start", call)) == -9
        assert runs[0].start() == 0
        assert ended.result() == 0
    for run in runs:
        assert run.rows() == whole.rows()
        assert_same_state(run.checkpoint(), whole.checkpoint())
    assert sum(path.stat().st_size for path in (tmp_path / "cache" / "shards").glob("[!.]*")) <= 16 * largest


def test_two_nodes_fetch_different_parts_of_the_corpus(shards, tmp_path):
    """Two ranks with a server and a cache each, and a pass over the training split, in sections of eight shards."""
    samples = sum(max(0, shard.tokens // 16 - 1) for shard in read_manifest(shards).splits["train"].shards)
    corpus, fractions = sum(path.stat().st_size for path in shards.glob("train-*.tar")), {}
    for sections in (8, None):
        folder = tmp_path / str(sections)
        folder.mkdir()
        with serving(shards) as first, serving(shards) as second:
            nodes = {"urls": [first.url, second.url], "folder": str(folder)}
            own = [{"class_path": f"{__name__}.OwnServer", "init_args": nodes}]
            run = fit(folder, first.url, 0, sections, 2, max_steps=samples // 8, limit_val_batches=0, callbacks=own)
            assert run.start() == 0
            fetched = [zip(s.handler.requests, s.handler.sent, strict=True) for s in (first, second)]
            sizes = [sum(size for path, size in answers if "train" in path) for answers in fetched]
        fractions[sections] = [round(size / corpus, 3) for size in sizes]
    print("fractions of the training split that the nodes fetch:", fractions)
    assert max(fractions[8]) < 0.8
    assert fractions[None] == [1.0, 1.0]


class OwnServer(Callback):
    """Gives each rank a server and a cache of its own, as if it were a node."""

    def __init__(self, urls: list[str], folder: str) -> None:
        super().__init__()
        self.urls, self.folder = urls, folder

    def setup(self, trainer: Any, pl_module: Any, stage: str) -> None:
        data = trainer.datamodule
        data.location, data.cache = self.urls[trainer.global_rank], f"{self.folder}/node-{trainer.global_rank}"
        for name in ("folder", "parts", "_texts"):  # computed from the location and cache before
            data.__dict__.pop(name, None)


def test_faults_of_the_server_are_one_line_and_leave_a_checkpoint(shards, tmp_path):
    copy = Path(shutil.copytree(shards, tmp_path / "copy"))
    with serving(copy) as server:
        streamed = fit(tmp_path, server.url)
        assert streamed.start(interruption("on_train_batch_end", 10, 15)) == 143
        shutil.rmtree(tmp_path / "cache")
        for path in copy.glob("train-*.tar"):
            path.write_bytes(path.read_bytes()[:-512])
        assert streamed.start() == 2
        assert "its sha256 differs from the manifest" in (streamed.folder / "log0.txt").read_text().splitlines()[-1]
        for path in shards.glob("train-*.tar"):
            shutil.copy(path, copy)
        streamed.config["data"]["init_args"]["cache_gb"] = 1e-7
        assert streamed.start() == 2
        assert "data.cache_gb: got 1e-07, expected" in (streamed.folder / "log0.txt").read_text().splitlines()[-1]
        assert streamed.checkpoint()["global_step"] == 10

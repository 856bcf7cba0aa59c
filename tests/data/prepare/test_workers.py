import contextlib
import multiprocessing
import os
import shutil
import socket
import subprocess
import sys
import tempfile
import time
import types
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import psutil
import pytest

import kerple
from kerple.base.errors import UserError
from kerple.data.manifest import Manifest
from kerple.data.prepare import build as builder
from kerple.data.prepare import workers as pool
from kerple.data.prepare.encode import Encoded, Raw
from kerple.data.prepare.sources import Record
from tests.inline_ray import Inline

ROOT = Path(__file__).parents[3]

Build = Callable[..., Manifest]
Contents = Callable[[Path], dict[str, bytes]]


def batches_of(sizes: list[int]) -> Iterator[pool.Portion]:
    for number, size in enumerate(sizes):
        yield 0, [Record(b"x" * size, f"{number}", (0, number + 1), False, 0)]


@pytest.mark.parametrize(("most", "limit"), [(1, 100), (3, 100), (50, 100), (50, 7), (50, 1)])
def test_results_keep_their_order_and_what_is_on_its_way_is_bounded(
    most: int, limit: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pool, "WAITING_BYTES", limit)
    sizes = [int(size) for size in np.random.default_rng(0).integers(1, 6, 40)]
    sent: list[int] = []
    seen: list[tuple[int, int]] = []

    def send(raw: list[Raw]) -> Encoded:
        sent.append(len(raw[0][0]))
        return Encoded([], [], [len(sent) - 1], np.empty(0, np.int64), np.empty(0, np.uint32))

    for (_, (record,)), result in pool.in_order(batches_of(sizes), send, lambda result: result, most):
        waiting = sent[len(seen) :]
        assert len(waiting) <= most + 1  # the one that is handed over now among them
        assert len(waiting) <= 2 or sum(waiting[:-1]) <= limit
        seen.append((int(record.name), result.sizes[0]))

    assert seen == [(n, n) for n in range(40)]


def test_two_processes_write_what_one_does(
    json_lines: Path,
    prepared: Path,
    tmp_path: Path,
    small_build: Build,
    contents: Contents,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(builder, "PORTION_RECORDS", 7)

    small_build(tmp_path, json_lines, workers=2)

    assert contents(tmp_path) == contents(prepared)


def die(portion: list[Raw]) -> Encoded:
    os._exit(1)


def test_a_worker_that_dies_is_replaced_and_leaves_no_trace(
    json_lines: Path,
    prepared: Path,
    tmp_path: Path,
    small_build: Build,
    contents: Contents,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(builder, "PORTION_RECORDS", 7)
    original, killed = builder.Writing.take, set[int]()

    def take(self: builder.Writing, *arguments: object) -> None:
        original(self, *arguments)  # type: ignore[arg-type]
        alive = [child for child in multiprocessing.active_children() if child.pid not in killed]
        if len(killed) < 2 and alive:
            alive[0].kill()
            killed.add(alive[0].pid)

    monkeypatch.setattr(builder.Writing, "take", take)

    small_build(tmp_path, json_lines, workers=2)

    assert len(killed) == 2
    assert contents(tmp_path) == contents(prepared)


@pytest.mark.slow
def test_a_portion_that_kills_every_worker_ends_the_preparation_in_one_line(
    json_lines: Path, prepared: Path, tmp_path: Path, small_build: Build, contents: Contents
) -> None:
    with pytest.MonkeyPatch.context() as context:
        context.setattr(pool, "encode_in_worker", die)
        with pytest.raises(UserError, match=r"prepare_workers: tokenising the same documents failed 4 times"):
            small_build(tmp_path, json_lines, workers=2)
    small_build(tmp_path, json_lines)
    assert contents(tmp_path) == contents(prepared)


def test_ray_that_is_not_there_is_named(
    json_lines: Path, tmp_path: Path, small_build: Build, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(ValueError, match=r"prepare_engine: got 'ray'.*pip install 'kerple\[ray\]'"):
        small_build(tmp_path, json_lines, engine="ray")


def test_a_cluster_that_does_not_answer_is_named(
    json_lines: Path, tmp_path: Path, small_build: Build, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Ray(types.ModuleType):
        is_initialized = staticmethod(lambda: False)

        @staticmethod
        def init(address: str, **_: object) -> None:
            raise ConnectionError(f"no {address}")

    monkeypatch.setitem(sys.modules, "ray", Ray("ray"))
    monkeypatch.setenv("RAY_ADDRESS", "10.0.0.1:6379")
    with pytest.raises(ValueError, match=r"prepare_engine: .*no 10\.0\.0\.1:6379.*RAY_ADDRESS"):
        small_build(tmp_path, json_lines, engine="ray")


def test_portions_sent_to_a_cluster_are_those_of_one_process(
    json_lines: Path,
    prepared: Path,
    tmp_path: Path,
    small_build: Build,
    contents: Contents,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    ray = Inline()
    monkeypatch.setitem(sys.modules, "ray", ray)
    monkeypatch.setenv("TOKENIZERS_PARALLELISM", "false")  # a worker sets it, which is this process here
    monkeypatch.setattr(builder, "PORTION_RECORDS", 7)
    small_build(tmp_path, json_lines, workers=2, engine="ray")
    assert ray.sent > 40
    assert contents(tmp_path) == contents(prepared)


def test_an_engine_that_there_is_not(json_lines: Path, tmp_path: Path, small_build: Build) -> None:
    with pytest.raises(ValueError, match="prepare_engine: got 'dask', expected one of local, ray"):
        small_build(tmp_path, json_lines, engine="dask")


def ray_workers(*doing: str) -> list[psutil.Process]:
    """Processes of a cluster started here, by what they do; with no name, all of them, its own services included."""
    names = [f"ray::{name}" for name in doing]
    children = psutil.Process().children(recursive=True)
    return [p for p in children if (p.name() in names if names else p.name().startswith(("ray", "gcs")))]


@pytest.mark.slow
@pytest.mark.parametrize("kills", [0, 2])
def test_two_ray_workers_write_what_one_process_does(
    documents: list[str],
    tmp_path: Path,
    small_build: Build,
    contents: Contents,
    monkeypatch: pytest.MonkeyPatch,
    kills: int,
) -> None:
    pytest.importorskip("ray")
    corpus = tmp_path / "corpus"
    corpus.mkdir()
    for number in range(12):  # large enough for a worker to be met at work
        (corpus / f"{number}.txt").write_text("".join(documents[number:]) * 15)
    small_build(tmp_path / "one", corpus)
    monkeypatch.setattr(builder, "PORTION_RECORDS", 1)
    original, killed = builder.Writing.take, set[int]()

    def take(self: builder.Writing, *arguments: object) -> None:
        original(self, *arguments)  # type: ignore[arg-type]
        at_work = [p for p in ray_workers("encode_from_store") if p.pid not in killed]
        if len(killed) < kills and at_work:
            at_work[0].kill()
            killed.add(at_work[0].pid)

    monkeypatch.setattr(builder.Writing, "take", take)

    small_build(tmp_path / "two", corpus, workers=2, engine="ray")

    assert len(killed) == kills
    assert contents(tmp_path / "two") == contents(tmp_path / "one")
    assert no_more_ray_workers()


@pytest.mark.slow
def test_an_error_ends_the_cluster_that_was_started_here(
    json_lines: Path, tmp_path: Path, small_build: Build, monkeypatch: pytest.MonkeyPatch
) -> None:
    ray = pytest.importorskip("ray")
    monkeypatch.setattr(builder, "PORTION_RECORDS", 7)
    monkeypatch.setattr(builder.Writing, "take", lambda *_: (_ for _ in ()).throw(KeyboardInterrupt))
    with pytest.raises(KeyboardInterrupt):
        small_build(tmp_path, json_lines, workers=2, engine="ray")
    assert not ray.is_initialized()
    assert no_more_ray_workers()


@pytest.mark.slow
def test_a_cluster_that_was_joined_before_stays_joined(
    json_lines: Path,
    prepared: Path,
    tmp_path: Path,
    small_build: Build,
    contents: Contents,
) -> None:
    ray = pytest.importorskip("ray")
    package = {"py_modules": [str(Path(kerple.__file__).parent)]}
    ray.init(num_cpus=1, log_to_driver=False, include_dashboard=False, runtime_env=package)
    try:
        small_build(tmp_path, json_lines, workers=0, engine="ray")
        assert ray.is_initialized()
    finally:
        ray.shutdown()
    assert contents(tmp_path) == contents(prepared)


@pytest.fixture
def address(tmp_path: Path) -> Iterator[str]:
    """Of a cluster of one machine that somebody else has started, as `ray start` does by default: with a token."""
    pytest.importorskip("ray")
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{free.getsockname()[1]}"
    folder = tempfile.mkdtemp(prefix="ray")  # sockets have short paths
    command = [sys.executable, "-m", "ray.scripts.scripts", "start", "--head", "--block", "--num-cpus=2"]
    command += ["--include-dashboard=false", "--node-ip-address=127.0.0.1", f"--port={address.partition(':')[2]}"]
    head = subprocess.Popen([*command, f"--temp-dir={folder}"], start_new_session=True, stdout=subprocess.DEVNULL)
    services = psutil.Process(head.pid)
    try:
        yield address
        assert head.poll() is None  # who joins a cluster leaves it running
    finally:
        for process in [*services.children(recursive=True), services]:
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()
        head.wait()
        shutil.rmtree(folder, ignore_errors=True)


@pytest.mark.slow
def test_a_cluster_that_the_environment_names_is_joined(address: str, json_lines: Path, tmp_path: Path) -> None:
    def prepare(name: str, engine: str) -> dict[str, bytes]:
        command = [sys.executable, str(ROOT / "run.py"), "prepare", f"--data.corpus={json_lines}"]
        command += ["--data.vocabulary=300", f"--data.directory={tmp_path / name}", f"--data.prepare_engine={engine}"]
        environment = os.environ | {"RAY_ADDRESS": address, "RAY_AUTH_MODE": "token"}
        subprocess.run(command, env=environment, check=True)
        return {path.name: path.read_bytes() for path in (tmp_path / name).iterdir()}

    assert prepare("spread", "ray") == prepare("here", "local")


@pytest.mark.slow
def test_other_tokenizers_on_the_cluster_are_refused(
    json_lines: Path, tmp_path: Path, small_build: Build, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("ray")
    monkeypatch.setattr(pool.tokenizers, "__version__", "0.0.1")  # of this process only
    with pytest.raises(ValueError, match=r"^prepare_engine: machine .* has tokenizers .*, this one 0\.0\.1"):
        small_build(tmp_path, json_lines, workers=1, engine="ray")


def no_more_ray_workers() -> bool:
    """Whether all ended within ten seconds: they are told to, and not waited for."""
    for _ in range(100):
        if not ray_workers():
            return True
        time.sleep(0.1)
    return False

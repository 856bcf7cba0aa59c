"""Commands killed, stopped and interrupted at random moments, as a user or a cluster does it, and started again.

What stands at the end has to be what an undisturbed run leaves, in every bit. Each test prints what it did.
"""

import os
import random
import re
import signal
import subprocess
import sys
import time
from itertools import count
from pathlib import Path

import pytest
import torch
import yaml

from tests.disturbed import ROOT, assert_same_state, prepare

pytestmark = pytest.mark.slow
FIT = {
    "seed_everything": 7,
    "model": {"position": "KerpleLog", "layers": 1, "dim": 16, "heads": 2, "lr": 0.01, "dropout": 0.2},
    "trainer": {
        "accelerator": "cpu",
        "max_steps": 400,
        "accumulate_grad_batches": 2,
        "val_check_interval": 200,
        "check_val_every_n_epoch": None,
        "gradient_clip_val": 1.0,
        "logger": False,
        "enable_progress_bar": False,
        "callbacks": [{"class_path": "LastCheckpoint", "init_args": {"every_n_train_steps": 20}}],
    },
}


def start(folder: Path, *arguments: str) -> subprocess.Popen[bytes]:
    environment = os.environ | {"PYTHONPATH": f"{ROOT / 'src'}{os.pathsep}{ROOT}", "OMP_NUM_THREADS": "1"}
    log = (folder / "log.txt").open("ab")
    command = [sys.executable, str(ROOT / "run.py"), *arguments]
    return subprocess.Popen(command, cwd=folder, env=environment, stdout=log, stderr=log, preexec_fn=_hear_ctrl_c)


def _hear_ctrl_c() -> None:
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # a shell has what it starts in the background ignore it


def disturb(folder: Path, arguments: list[str], number: int, times: int, begun: str, window: float) -> int:
    """Send a signal at random moments until the command has been hit so often; how often it was at work by then.

    Args:
        folder: Where the command works and logs.
        arguments: Of the command; the same every time.
        number: The signal.
        times: How often to hit it. A command that ends by itself first is not started again.
        begun: Pattern of files that are there once the command has begun its work.
        window: A moment is uniform in so many seconds from the start of the process, or from the beginning of work.
    """
    draw, hits = random.Random(number), 0
    while hits < times:
        process = start(folder, *arguments)
        if draw.random() < 0.75:  # else it is hit while it still loads its libraries
            before = {path: path.stat().st_mtime_ns for path in folder.glob(begun)}
            while process.poll() is None:
                if any(before.get(path) != path.stat().st_mtime_ns for path in folder.glob(begun)):
                    break
                time.sleep(0.02)
        time.sleep(draw.uniform(0, window))
        if process.poll() is not None:
            assert process.returncode == 0, (folder / "log.txt").read_text()[-3000:]
            break
        process.send_signal(number)
        status = process.wait(120)
        assert status in (-number, 128 + number, 1, 0), (status, (folder / "log.txt").read_text()[-3000:])
        hits += 1
    return hits


@pytest.fixture(scope="module")
def shards(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return prepare(tmp_path_factory.mktemp("shards"))


def fit_arguments(folder: Path, shards: Path) -> list[str]:
    data = {"corpus": None, "directory": str(shards), "vocabulary": 300, "length": 16, "batch_size": 4}
    config = FIT | {"data": {"class_path": "TokenShards", "init_args": data | {"validation_segments": 8}}}
    (folder / "config.yaml").write_text(yaml.safe_dump(config | {"run_dir": str(folder / "run")}))
    return ["fit", "--config", "config.yaml", "--ckpt_path", "last"]


def last_of(folder: Path) -> dict[str, object]:
    newest = max(folder.glob("run*/checkpoints/last.ckpt"), key=lambda path: path.stat().st_mtime_ns)
    return torch.load(newest, weights_only=True)


@pytest.fixture(scope="module")
def undisturbed(shards: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, object]:
    folder = tmp_path_factory.mktemp("undisturbed")
    assert start(folder, *fit_arguments(folder, shards)).wait() == 0
    return last_of(folder)


@pytest.mark.timeout(3000)
@pytest.mark.parametrize(("number", "times"), [(signal.SIGKILL, 20), (signal.SIGTERM, 5), (signal.SIGINT, 5)])
def test_a_fit_stopped_at_any_moment_ends_as_an_undisturbed_one(
    shards: Path, undisturbed: dict[str, object], tmp_path: Path, number: int, times: int
) -> None:
    hits = 0
    for run in count():
        folder = tmp_path / str(run)
        folder.mkdir()
        arguments = fit_arguments(folder, shards)
        hits += disturb(folder, arguments, number, min(times - hits, 5), "run*/checkpoints/last.ckpt", 3.0)
        assert start(folder, *arguments).wait() == 0, (folder / "log.txt").read_text()[-3000:]
        assert_same_state(last_of(folder), undisturbed)
        newest = max(folder.glob("run*/checkpoints/last.ckpt"), key=lambda path: path.stat().st_mtime_ns)
        assert [path.name for path in newest.parent.iterdir()] == ["last.ckpt"]
        if hits >= times:
            break
    print(f"fit: {hits} × {signal.Signals(number).name} in {run + 1} runs, nothing lost")


@pytest.mark.timeout(3000)
@pytest.mark.parametrize(("number", "times"), [(signal.SIGKILL, 20), (signal.SIGTERM, 5), (signal.SIGINT, 5)])
def test_a_preparation_stopped_at_any_moment_leaves_the_same_shards(tmp_path: Path, number: int, times: int) -> None:
    corpus = tmp_path / "corpus.txt.d"
    corpus.mkdir()
    draw = random.Random(0)
    words = [f"word{i}" for i in range(3000)]
    for document in range(600):
        (corpus / f"{document:04}.txt").write_text(" ".join(draw.choices(words, k=2000)))

    def arguments(workers: int) -> list[str]:
        options = {"corpus": corpus, "vocabulary": 600, "directory": "shards", "prepare_workers": workers}
        return ["prepare", *(f"--data.{key}={value}" for key, value in options.items())]

    def contents(folder: Path) -> dict[str, bytes]:
        found = {path.name: path.read_bytes() for path in (folder / "shards").iterdir() if path.name[0] != "."}
        assert not [name for name in found if re.search(r"tmp|part", name)]
        return found

    whole = tmp_path / "whole"
    whole.mkdir()
    assert start(whole, *arguments(1)).wait() == 0
    hits = 0
    for run in count():
        folder = tmp_path / str(run)
        folder.mkdir()
        hits += disturb(folder, arguments(1 + run % 2), number, min(times - hits, 5), "shards/parts/*", 3.0)
        assert start(folder, *arguments(1 + run % 2)).wait() == 0, (folder / "log.txt").read_text()[-3000:]
        assert contents(folder) == contents(whole)
        if hits >= times:
            break
    print(f"prepare: {hits} × {signal.Signals(number).name} in {run + 1} folders, nothing lost")

"""Commands that are killed, stopped and interrupted at random moments, and started again.

The files at the end must equal those of an undisturbed run, bit for bit. Each test prints its signals.
"""

import os
import random
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from itertools import count
from pathlib import Path

import pytest
import torch

from tests.disturbed import ROOT, Fit, assert_same_state, prepare

CASES = [([signal.SIGKILL], 20), *(([number], 5) for number in (signal.SIGTERM, signal.SIGHUP, signal.SIGINT))]
CASES += [([signal.SIGINT, signal.SIGINT], 5)]
pytestmark = [pytest.mark.slow, pytest.mark.timeout(7200), pytest.mark.parametrize(("numbers", "times"), CASES)]


def start(folder: Path, *arguments: str) -> subprocess.Popen[bytes]:
    environment = os.environ | {"PYTHONPATH": f"{ROOT / 'src'}{os.pathsep}{ROOT}", "OMP_NUM_THREADS": "1"}
    log, command = (folder / "log.txt").open("ab"), [sys.executable, str(ROOT / "run.py"), *arguments]
    return subprocess.Popen(command, cwd=folder, env=environment, stdout=log, stderr=log, preexec_fn=_hear_ctrl_c)


def _hear_ctrl_c() -> None:
    for number in (signal.SIGINT, signal.SIGHUP):  # a shell or nohup starts processes with these signals ignored
        signal.signal(number, signal.SIG_DFL)


def log_of(folder: Path) -> str:
    return (folder / "log.txt").read_text()[-3000:]


def modified(folder: Path, pattern: str) -> dict[Path, int]:
    """Return the times at which files that match a pattern were modified."""
    times = {}
    for path in folder.glob(pattern):
        with suppress(FileNotFoundError):  # a temporary file, which was renamed
            times[path] = path.stat().st_mtime_ns
    return times


def disturb(
    folder: Path, arguments: list[str], numbers: list[int], times: int, at_work: str,
    after_interruption: Callable[[Path], None],
) -> int:  # fmt: skip
    """Send signals to a command at random moments, and return the number of interruptions, at most `times`.

    Three quarters of the signals are sent up to 3 seconds after a file that matches the pattern `at_work` has changed.
    The others are sent up to 3 seconds after the start of the process. Each of several signals is sent up to a second
    after the previous one. A command that ends without a signal is not started again.
    """
    draw, hits = random.Random(sum(numbers)), 0
    while hits < times:
        process = start(folder, *arguments)
        if draw.random() < 0.75:
            before = modified(folder, at_work)
            while process.poll() is None and modified(folder, at_work).items() <= before.items():
                time.sleep(0.02)
        time.sleep(draw.uniform(0, 3.0))
        if process.poll() is not None:
            assert process.returncode == 0, log_of(folder)
            break
        for number in numbers:
            process.send_signal(number)
            time.sleep(draw.uniform(0, 1.0) if len(numbers) > 1 else 0)
        status = process.wait(120)
        assert status in (-number, 128 + number, 1, 0), (status, log_of(folder))
        after_interruption(folder)
        hits += 1
    return hits


def soak(
    folder: Path, command: Callable[[int, Path], list[str]], numbers: list[int], times: int, at_work: str,
    assert_right: Callable[[Path], None], after_interruption: Callable[[Path], None] = lambda folder: None,
) -> None:  # fmt: skip
    """Interrupt runs of a command, at most five times each, finish each run and check its files; print the counts."""
    hits = 0
    for run in count():
        place = folder / str(run)
        place.mkdir()
        arguments = command(run, place)
        hits += disturb(place, arguments, numbers, min(times - hits, 5), at_work, after_interruption)
        assert start(place, *arguments).wait() == 0, log_of(place)
        assert_right(place)
        if hits >= times:
            break
    print(f"{arguments[0]}: {hits} × {[signal.Signals(n).name for n in numbers]} in {run + 1} runs, nothing lost")


def test_a_fit_with_random_stops_equals_an_undisturbed_one(tmp_path: Path, numbers: list[int], times: int) -> None:
    shards, callback = prepare(tmp_path), {"class_path": "LastCheckpoint", "init_args": {"every_n_train_steps": 20}}
    last, steps = "fit/run*/checkpoints/last.ckpt", 400
    trainer = {"max_steps": steps, "val_check_interval": 200}
    reached = []  # step of the newest checkpoint after each interruption

    def command(run: int, folder: Path) -> list[str]:
        config = Fit(folder / "fit", shards, trainer=trainer).write_config(callback)
        return ["fit", "--config", str(config), "--ckpt_path", "last"]

    def newest(folder: Path) -> Path:
        return max(folder.glob(last), key=lambda path: path.stat().st_mtime_ns)

    def record_step(folder: Path) -> None:
        if any(folder.glob(last)):
            reached.append(torch.load(newest(folder), weights_only=True)["global_step"])

    def assert_whole(folder: Path) -> None:
        names = {path.name for path in newest(folder).parent.iterdir()}
        unfinished = {name for name in names if re.fullmatch(r"\.last\.ckpt\.\w+\.part", name)}
        assert names - unfinished == {"last.ckpt"}
        assert not unfinished or signal.SIGKILL in numbers  # `writing` removes them after an hour
        assert_same_state(torch.load(newest(folder), weights_only=True), expected)

    whole = tmp_path / "whole"
    whole.mkdir()
    assert start(whole, *command(0, whole)).wait() == 0
    expected = torch.load(newest(whole), weights_only=True)
    soak(tmp_path, command, numbers, times, last, assert_whole, record_step)
    print(f"steps of the newest checkpoints after interruptions: {reached}")
    assert any(0 < step < steps for step in reached)


def test_a_preparation_stopped_at_random_moments_writes_the_same_shards(tmp_path, numbers, times):
    corpus = tmp_path / "corpus.txt.d"
    corpus.mkdir()
    draw, words = random.Random(0), [f"word{i}" for i in range(3000)]
    for document in range(600):
        (corpus / f"{document:04}.txt").write_text(" ".join(draw.choices(words, k=2000)))

    def command(run: int, folder: Path) -> list[str]:
        options = {"corpus": corpus, "vocabulary": 600, "directory": "shards", "prepare_workers": 1 + run % 2}
        return ["prepare", *(f"--data.{key}={value}" for key, value in options.items())]

    def assert_whole(folder: Path) -> None:
        shards = {path.name: path.read_bytes() for path in (folder / "shards").iterdir() if path.name[0] != "."}
        assert not (folder / "shards" / ".parts").exists()
        assert not [name for name in shards if "tmp" in name]
        assert shards == expected

    whole = tmp_path / "whole"
    whole.mkdir()
    assert start(whole, *command(0, whole)).wait() == 0
    expected = {path.name: path.read_bytes() for path in (whole / "shards").iterdir() if path.name[0] != "."}
    soak(tmp_path, command, numbers, times, "shards/.parts/*", assert_whole)

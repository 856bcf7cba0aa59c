"""Real runs: `compare` is killed while it fits and while it tests, and ends with the same results.csv."""

import contextlib
import json
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import yaml

ROOT = Path(__file__).parents[2]
WORDS = ["kernel", "distance", "attention", "token", "position", "learns", "decays", "bias", "head", "far", "near"]


@pytest.fixture
def comparison(tmp_path: Path) -> Path:
    generator = random.Random(0)
    with (tmp_path / "text.jsonl").open("w") as file:
        for _ in range(200):
            words = generator.choices(WORDS, k=generator.randint(50, 400))
            file.write(json.dumps({"text": " ".join(words)}) + "\n")
    base = {
        "model": {"layers": 2, "dim": 32, "heads": 2, "lr": 3e-3, "warmup": 0.1},
        "data": {
            "class_path": "TokenShards",
            "init_args": {
                "corpus": str(tmp_path / "text.jsonl"), "directory": str(tmp_path / "shards"), "vocabulary": 300,
                "length": 16, "batch_size": 8, "prepare_workers": 1,
            },
        },
        "trainer": {
            "max_steps": 100, "accelerator": "cpu", "val_check_interval": 50, "check_val_every_n_epoch": None,
            "num_sanity_val_steps": 0, "limit_val_batches": 2, "log_every_n_steps": 10, "enable_progress_bar": False,
            "callbacks": [
                {"class_path": "LastCheckpoint", "init_args": {"every_n_train_steps": 10}},
                {"class_path": "Throughput"},
                {"class_path": "Extrapolation", "init_args": {"lengths": [16, 32, 64]}},
            ],
        },
    }  # fmt: skip
    (tmp_path / "base.yaml").write_text(yaml.safe_dump(base))
    settings = {"name": "small", "base": [str(tmp_path / "base.yaml")], "strategies": {"KerpleLog": {}, "ALiBi": {}}}
    settings |= {"seeds": [1], "baseline": "KerpleLog"}
    (tmp_path / "compare.yaml").write_text(yaml.safe_dump(settings, sort_keys=False))
    return tmp_path / "compare.yaml"


Start = Callable[[str], subprocess.Popen]


@pytest.fixture
def start(comparison: Path) -> Iterator[Start]:
    """Starts the comparison into a folder of that name; what is still alive at the end is killed."""
    started: list[subprocess.Popen] = []

    def call(name: str) -> subprocess.Popen:
        started.append(_start(comparison, name))
        return started[-1]

    yield call
    for process in started:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)  # children too, when compare itself is dead


def _start(comparison: Path, name: str) -> subprocess.Popen:
    folder = comparison.parent / name
    command = [sys.executable, str(ROOT / "run.py"), "compare", "--config", str(comparison)]
    command += ["--runs", str(folder / "runs"), "--output", str(folder / "report")]
    environment = os.environ | {"PYTHONPATH": str(ROOT / "src"), "OMP_NUM_THREADS": "1"}
    return subprocess.Popen(command, env=environment, start_new_session=True, cwd=comparison.parent)


def wait_for(path: Path, process: subprocess.Popen) -> None:
    for _ in range(6000):
        if path.exists():
            return
        assert process.poll() is None, f"ended before {path} was there"
        time.sleep(0.1)
    pytest.fail(f"{path} was not there after ten minutes")


@pytest.mark.slow
@pytest.mark.timeout(3600)  # ten starts of Lightning, which a busy machine takes its time for
def test_killed_and_started_again_it_gives_the_same_results(comparison: Path, start: Start) -> None:
    assert start("undisturbed").wait() == 0

    run = comparison.parent / "killed" / "runs" / "KerpleLog" / "seed-1"
    # with its child in the middle of a fit; with its child before the first checkpoint of a fit; alone, in a test
    for sign, whole_group in (
        (run / "checkpoints" / "last.ckpt", True),
        (run / "test", False),
        (run.parent.parent / "ALiBi" / "seed-1.json", True),
    ):
        process = start("killed")
        wait_for(sign, process)
        (os.killpg if whole_group else os.kill)(process.pid, signal.SIGKILL)
        process.wait()
    assert start("killed").wait() == 0

    expected, found = (comparison.parent / name / "report" / "results.csv" for name in ("undisturbed", "killed"))
    assert found.read_bytes() == expected.read_bytes()
    fits = [
        line
        for line in run.with_name("seed-1.log").read_text().splitlines()
        if line.startswith("$") and " fit " in line
    ]
    assert f"--ckpt_path={run / 'checkpoints' / 'last.ckpt'}" in fits[-1]  # it was resumed, not started afresh

"""`python -m benchmarks.gpu` with toy sizes: a killed run keeps its measurements and does not repeat them."""

import json
import random
import shutil
import subprocess
import sys
import tarfile
import time
from pathlib import Path

import pytest

from benchmarks.gpu import trainings
from benchmarks.gpu.__main__ import measurements, read


def started(out: Path, *flags: str) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "benchmarks.gpu", "--toy", "attention-64", "--out", str(out), *flags]
    return subprocess.Popen(command, cwd=Path(__file__).parents[1], text=True, stdout=subprocess.PIPE)


@pytest.mark.slow
def test_a_killed_run_continues_in_another_folder(tmp_path: Path) -> None:
    names = [name for name in measurements(True, tmp_path) if name.startswith("attention-64")]
    rows, first = tmp_path / "1" / "rows.jsonl", started(tmp_path / "1")
    while first.poll() is None and not (rows.exists() and rows.stat().st_size):
        time.sleep(0.01)
    first.kill()
    first.communicate()
    done = [json.loads(line)["name"] for line in rows.read_text().splitlines() if line.endswith("}")]
    rows.write_bytes(rows.read_bytes() + b'\n1\n{}\n\xff\n{"name": "attention')  # an incomplete line, and damaged lines
    out = started(tmp_path / "2", "--resume", str(rows)).communicate(timeout=300)[0]
    assert [line[3:] for line in out.splitlines() if line.startswith("==")] == [n for n in names if n not in done]
    report = (tmp_path / "2" / "report.md").read_text()
    assert all(part in report for part in (*(f"| {n} | the CPU | {{" for n in names), "- step-NoPE: not run"))
    assert [*read([tmp_path / "2" / "rows.jsonl"])] == names  # including those of the first run
    for here in ('"code": "', '"torch": "'):  # rows of other code or another version of torch are not read
        rows.write_text((tmp_path / "2" / "rows.jsonl").read_text().replace(here, f"{here}0"))
        assert read([rows]) == {}


@pytest.mark.slow  # compresses for two seconds
def test_shards_that_were_unpacked_in_part_are_unpacked_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trainings, "ROOT", tmp_path)
    shards, archive, size = tmp_path / trainings.SHARDS, tmp_path / trainings.ARCHIVE, 300_000
    shards.mkdir(parents=True)
    for name in ("manifest.json", "train-00000.tar"):
        (shards / name).write_bytes(random.Random(name).randbytes(size))
    trainings.pack()
    shutil.rmtree(shards)
    content = archive.read_bytes()
    archive.write_bytes(content[: int(0.8 * len(content))])  # as if the process was stopped then
    with pytest.raises((OSError, tarfile.ReadError)):
        trainings.unpack()
    assert not (shards / "manifest.json").exists()  # `rank` unpacks again if this file is missing
    archive.write_bytes(content)
    shards.mkdir(exist_ok=True)
    (shards / "validation-00000.tar").touch()  # of a preparation that was stopped
    trainings.unpack()
    assert sorted((path.name, path.stat().st_size) for path in shards.iterdir()) == [
        ("manifest.json", size), ("train-00000.tar", size),
    ]  # fmt: skip
    assert not [*archive.parent.glob("tmp*")]


@pytest.mark.slow  # imports torch in another process
def test_a_deadline_in_a_destructor_stops_the_run() -> None:
    code = """
import time
from benchmarks.gpu.__main__ import stop_by_signals

class Graph:
    def __del__(self):
        time.sleep(3)

stop_by_signals(1)
graph = Graph()
del graph
print("the destructor ended", flush=True)
time.sleep(15)
"""
    run = subprocess.run([sys.executable, "-c", code], cwd=Path(__file__).parents[1], capture_output=True, text=True)
    assert run.stderr == "stopped by a signal or the deadline; the same command continues\n"
    assert run.returncode == 1
    assert run.stdout == "the destructor ended\n"

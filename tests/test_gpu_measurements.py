"""`python -m benchmarks.gpu` with toy sizes: a killed run keeps its measurements and does not repeat them."""

import json
import subprocess
import sys
import time
from pathlib import Path

import pytest

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

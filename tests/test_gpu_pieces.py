"""`python -m benchmarks.gpu`: pieces are done once, one that fails is told, and the report knows what is missing."""

import json
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

import benchmarks.gpu.__main__ as command
from benchmarks.measure import Row


def test_a_piece_is_not_done_again_and_the_report_tells_what_is_missing(tmp_path: Path, monkeypatch, capsys) -> None:
    done: list[str] = []

    def good(out: Path) -> command.Found:
        done.append("good")
        return [Row("one / other", 1.5, 2.0), Row("another", None, 1.0)], {"more": 1}

    def bad(out: Path) -> command.Found:
        done.append("bad")
        raise RuntimeError("no room")

    monkeypatch.setattr(command, "all_pieces", lambda toy, again: {"step-good": good, "step-bad": bad, "never": bad})
    monkeypatch.setattr(sys, "argv", ["gpu", "--toy", "--out", str(tmp_path), "step-good", "step-bad"])
    command.main()
    command.main()
    assert done == ["good", "bad", "bad"]
    record = json.loads((tmp_path / "step.json").read_text())
    assert set(record) == {"step-good", "step-bad"}
    assert record["step-good"]["more"] == 1
    assert record["step-good"]["device"] == "cpu"
    assert record["step-good"]["machine"]["torch"]
    report = (tmp_path / "report.md").read_text()
    assert "| step-good | one / other | cpu | 1.5 × | ≤ 2 | dry run |" in report
    assert "| step-good | another | cpu | not measured | ≤ 1 | dry run |" in report
    assert "- step-bad: RuntimeError: no room" in report
    assert "- never: not run" in report
    assert report.strip() in capsys.readouterr().out


@pytest.mark.parametrize(("value", "least", "verdict"), [
    (1, False, "holds"), (3, False, "misses"), (1, True, "misses"), (3, True, "holds"),
])  # fmt: skip
def test_a_goal_is_an_upper_or_a_lower_bound(value: float, least: bool, verdict: str) -> None:
    assert Row("", value, 2.0, at_least=least).verdict == verdict


def test_a_piece_that_takes_too_long_is_cut_off_with_what_it_started(tmp_path: Path) -> None:
    def slow(out: Path) -> command.Found:
        writes = f"open({str(tmp_path / 'pid')!r}, 'w').write(str(os.getpid()))"
        subprocess.run([sys.executable, "-c", f"import os, time; {writes}; time.sleep(60)"])
        return [], {}

    start = time.monotonic()
    command.run("step-slow", slow, tmp_path, limit=3)
    assert time.monotonic() - start < 50
    assert not psutil.pid_exists(int((tmp_path / "pid").read_text()))
    assert json.loads((tmp_path / "step.json").read_text())["step-slow"]["error"] == "TimeoutError: cut off after 3 s"


def test_every_goal_has_a_piece_and_an_unknown_piece_is_refused(monkeypatch, capsys) -> None:
    names = list(command.all_pieces(toy=False))
    for kind in ("parity-other", "parity-bf16", "parity-fp16", "attention", "step", "evaluation", "trained-2000-T5"):
        assert kind in names
    monkeypatch.setattr(sys, "argv", ["gpu", "--toy", "stepp"])
    with pytest.raises(SystemExit):
        command.main()
    assert "got 'stepp', expected some of parity-other" in capsys.readouterr().err

"""`python -m benchmarks.gpu`: a measurement is a line when it is made, one that fails is told and made again."""

import json
import sys
import time
from pathlib import Path

import pytest

import benchmarks.gpu.__main__ as command


def test_what_is_measured_is_not_measured_again_and_what_fails_or_takes_too_long_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: list[str] = []

    def bad() -> dict[str, object]:
        calls.append("bad")
        raise RuntimeError("no room")

    def good() -> dict[str, object]:
        calls.append("good")
        return {"milliseconds": 2.0}

    run = {"step-KerpleLog": good, "step-NoPE": bad, "trained-300-T5": lambda: time.sleep(60)}
    monkeypatch.setattr(command, "measurements", lambda toy, out: run)
    monkeypatch.setattr(sys, "argv", ["gpu", "--toy", "--out", str(tmp_path), "--deadline", "2"])
    for _ in range(2):
        with pytest.raises(SystemExit):
            command.main()
        with (tmp_path / "rows.jsonl").open("a") as file:
            file.write('{"name": "cut off')  # by a kill while the last line was written
            file.write("\n")

    assert calls == ["good", "bad", "bad"]
    lines = (tmp_path / "rows.jsonl").read_text().splitlines()
    assert [json.loads(line)["error"] for line in lines[:2]] == [None, "RuntimeError: no room"]
    report = (tmp_path / "report.md").read_text()
    assert "- step-NoPE: RuntimeError: no room" in report
    assert "- trained-300-T5: not run" in report

    run["step-NoPE"] = good
    monkeypatch.setattr(
        sys, "argv", ["gpu", "--toy", "--out", str(tmp_path / "next"), "--resume", str(tmp_path / "rows.jsonl"), "step"]
    )
    command.main()
    assert calls[-2:] == ["bad", "good"]
    assert "| a step: KerpleLog / NoPE | 1 | ≤ 1.03 | dry run |" in (tmp_path / "next" / "report.md").read_text()

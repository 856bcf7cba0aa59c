"""Each start of a run says what made it."""

import json
from importlib.metadata import version
from pathlib import Path

from kerple.callbacks.provenance import Provenance
from tests.callbacks.line import Line, fit


def test_provenance_of_each_start(tmp_path: Path) -> None:
    for _ in range(2):
        fit(tmp_path, Line(-1, "loss"), Provenance())
    assert sorted(p.name for p in (tmp_path / "provenance").iterdir()) == ["0", "1"]
    run = json.loads((tmp_path / "provenance" / "1" / "run.json").read_text())
    assert run["command"][1:]
    assert run.keys() >= {"revision", "changed", "started", "devices", "resumed_from"}
    assert f"torch=={version('torch')}" in (tmp_path / "provenance" / "1" / "lock.txt").read_text().splitlines()

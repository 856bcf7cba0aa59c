"""Each start of a run says what made it."""

import json
import shutil
from importlib.metadata import version
from pathlib import Path

import pytest

from kerple.training import provenance
from kerple.training.provenance import Provenance
from tests.analyses.line import Line, fit


def test_provenance_of_each_start(tmp_path: Path) -> None:
    for _ in range(2):
        fit(tmp_path, Line(), Provenance())
    assert sorted(p.name for p in (tmp_path / "provenance").iterdir()) == ["0", "1"]
    shutil.rmtree(tmp_path / "provenance" / "0")  # a user tidies up
    fit(tmp_path, Line(), Provenance())
    assert sorted(p.name for p in (tmp_path / "provenance").iterdir()) == ["1", "2"]
    run = json.loads((tmp_path / "provenance" / "1" / "run.json").read_text())
    assert run["command"][1:]
    assert run.keys() >= {"started", "devices", "resumed_from"}
    assert f"torch=={version('torch')}" in (tmp_path / "provenance" / "1" / "lock.txt").read_text().splitlines()


@pytest.mark.parametrize(("diff", "added"), [("", []), ("+ changed\n", ["src/new.py", "b.py"])])
def test_a_start_says_what_git_says(diff: str, added: list[str], tmp_path: Path, monkeypatch) -> None:
    output = {"rev-parse": "f00d\n", "diff": diff, "ls-files": "".join(f"{name}\n" for name in added)}
    monkeypatch.setattr(provenance, "git", lambda *arguments: output[arguments[0]])
    fit(tmp_path, Line(), Provenance())
    run = json.loads((tmp_path / "provenance/0/run.json").read_text())
    assert (run["revision"], run["changed"], run["added"]) == ("f00d", bool(diff or added), added)
    patch = tmp_path / "provenance/0/changes.patch"
    assert (patch.read_text() if patch.exists() else "") == diff

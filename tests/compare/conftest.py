"""A comparison of stand-in runs, which the command starts as it starts real ones."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml

from kerple.cli import compare
from kerple.compare import job as jobs
from kerple.compare.comparison import Job
from tests.compare import fake_run


def resolve(job: Job) -> dict[str, Any]:
    """The flags stand for the configuration, so that no model is needed."""
    settings = dict(flag.removeprefix("--").split("=", 1) for flag in job.fit if "run_dir" not in flag)
    return {"flags": settings, "data": {"class_path": "none"}}


def stand_in(patch: Callable[[object, str, object], None] = setattr) -> None:
    """Make `compare` start stand-in runs in this process; a test gives ``monkeypatch.setattr``."""
    patch(jobs, "PROGRAM", fake_run.PROGRAM)
    patch(compare, "resolve", resolve)
    patch(compare, "check_test", lambda job, config: None)
    patch(compare, "fingerprint", lambda data: "a checksum")


@pytest.fixture
def config(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, undrawn: None) -> Path:
    """A comparison of 2 strategies × 2 seeds."""
    stand_in(monkeypatch.setattr)
    monkeypatch.setenv("FAKE_STEP", "0.001")
    (tmp_path / "base.yaml").write_text("{}")
    settings = {
        "name": "small",
        "base": [str(tmp_path / "base.yaml")],
        "strategies": {"KerpleLog": {}, "ALiBi": None},
        "seeds": [1, 2],
        "baseline": "KerpleLog",
        "runs": str(tmp_path / "runs"),
        "output": str(tmp_path / "report"),
    }
    path = tmp_path / "compare.yaml"
    path.write_text(yaml.safe_dump(settings, sort_keys=False))
    return path


def change(config: Path, **settings: Any) -> None:
    """Change settings of a comparison."""
    config.write_text(yaml.safe_dump(yaml.safe_load(config.read_text()) | settings, sort_keys=False))


def fits(config: Path) -> dict[str, int]:
    """How often each run was fitted, resumed fits too."""
    starts = sorted(config.parent.glob("runs/**/*.starts"))
    return {f"{path.parent.name} {path.stem}": len(path.read_text().splitlines()) for path in starts}

"""Fixtures of a comparison whose runs are replaced by `fake_run`. The fake runs are forks of a server, to save time."""

import multiprocessing
import os
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pandas as pd
import pytest
import yaml

from kerple.cli import compare
from kerple.compare import committed_records, comparison_duration, comparison_report, engines, resolution, workflow
from kerple.compare.finished_runs import read_runs
from kerple.compare.planned_run import PlannedRun
from tests.compare import fake_run
from tests.compare.runs_on_disk import CURVES, write_runs

WHOLE_TABLE = "results.csv"
start = engines.LocalProcesses.start  # before `use_fake_runs` replaces it
SERVER = multiprocessing.get_context("forkserver")
SERVER.set_forkserver_preload(["tests.compare.fake_run", "kerple.compare.run_process"])


class Fork:
    """A fake run in a fork of a server process. It has the methods of `subprocess.Popen` that `compare` calls."""

    def __init__(self, run: PlannedRun) -> None:
        log = run.sidecar(".log")
        log.parent.mkdir(parents=True, exist_ok=True)
        self._process = SERVER.Process(target=fake_run.forked, args=(run.description(), str(log), dict(os.environ)))
        self._process.start()
        self.terminate = self._process.terminate

    def poll(self) -> int | None:
        return self._process.exitcode

    def wait(self) -> int | None:
        self._process.join()
        return self._process.exitcode


def resolve(job: PlannedRun) -> PlannedRun:
    """Replacement of `resolution.resolve`: the configuration contains the flags, and no model is built."""

    def settings(flags: list[str]) -> dict[str, Any]:
        return dict(flag.removeprefix("--").split("=", 1) for flag in flags)

    config = {"flags": settings([*job.fit_flags, *job.position_flags]), "data": {"class_path": "none"}}
    test = settings(job.test_flags)
    file = yaml.safe_load(Path(test.pop("config")).read_text()) if "config" in test else {}
    return replace(job, config=config, test_config=config | file | test)


def use_fake_runs(patch: Callable[[object, str, object], None], processes: bool = False) -> None:
    """Make `compare` start fake runs, with ``patch(module, name, value)``; ``processes``: not as forks."""
    patch(engines, "PROCESS", fake_run.PROCESS)
    patch(engines.LocalProcesses, "start", start if processes else lambda engine, run: Fork(run))
    patch(engines, "TICK", 0.01)
    patch(resolution, "resolve", resolve)
    patch(workflow, "resolve", resolve)
    patch(comparison_duration, "training_seconds", lambda configs, parallel: None)
    patch(resolution, "prepare_and_checksum", lambda data: "a checksum")
    patch(committed_records, "parent_digest", fake_run.parent_digest)


def start_command(config: Path) -> Any:
    """Start `compare` in another process. Its runs are processes of 2 s."""

    def main() -> None:
        os.environ["FAKE_STEP"] = "0.1"
        use_fake_runs(setattr, processes=True)
        compare.main(["--config", str(config), "--parallel", "2"])

    process = multiprocessing.get_context("fork").Process(target=main)
    process.start()
    return process


@pytest.fixture
def config(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, without_figures: None) -> Path:
    """A comparison of 2 strategies × 2 seeds."""
    use_fake_runs(monkeypatch.setattr)
    monkeypatch.setenv("FAKE_STEP", "0.001")
    return write_file(tmp_path)


@pytest.fixture
def base(tmp_path: Path) -> str:
    """Path of an empty configuration."""
    path = tmp_path / "base.yaml"
    path.write_text("{}")
    return str(path)


def write_file(folder: Path, sections: dict[str, Any] | None = None, **changes: Any) -> Path:
    """Write the file of a comparison of 2 strategies × 2 seeds, with sections of the fits, and return its path."""
    folder.mkdir(exist_ok=True)
    (folder / "base.yaml").write_text(yaml.safe_dump(sections or {}))
    settings = {"name": "small", "base": [str(folder / "base.yaml")], "strategies": {"KerpleLog": {}, "ALiBi": None}}
    settings |= {"seeds": [1, 2], "baseline": "KerpleLog"}
    settings |= {"runs": str(folder / "runs"), "output": str(folder / "report")}
    path = folder / "compare.yaml"
    path.write_text(yaml.safe_dump(settings | changes, sort_keys=False))
    return path


def change(config: Path, **settings: Any) -> None:
    """Change settings in the file of a comparison."""
    config.write_text(yaml.safe_dump(yaml.safe_load(config.read_text()) | settings, sort_keys=False))


def fits(config: Path) -> dict[str, int]:
    """Number of fits of each run, including resumed fits."""
    folder = config.parent / "runs"
    starts = {path: len(path.read_text().splitlines()) for path in sorted(folder.rglob("*.starts"))}
    return {" ".join(path.relative_to(folder).with_suffix("").parts): number for path, number in starts.items()}


def run(config: Path, *arguments: str) -> bytes:
    """Run the comparison, and return the bytes of its results."""
    compare.main(["--config", str(config), *arguments])
    return (config.parent / "report" / WHOLE_TABLE).read_bytes()


def runs_in(folder: Path) -> set[tuple[str, int]]:
    """Strategy and seed of each run in a report."""
    table = pd.read_csv(folder / WHOLE_TABLE)
    return set(zip(table["strategy"], table["seed"], strict=True))


@pytest.fixture(scope="session")
def hostile_report(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The page of a report whose labels contain markup of HTML, LaTeX, Markdown, matplotlib and paths."""
    root = tmp_path_factory.mktemp("hostile")
    curves = {"<b>|$&": (19.0, 40.0, 300.0, 2000.0), "_low & 50%": CURVES["ALiBi"]}
    curves |= {"base/line": CURVES["KerpleLog"], r"$\nosuch$": CURVES["RoPE"]}
    runs = write_runs(root, curves, (1235, 1236))
    options = {"name": "<b>&", "baseline": "base/line", "missing": ["<i>"]}
    return comparison_report.write_comparison(read_runs(runs), root / "report", **options)

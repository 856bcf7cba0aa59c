"""`Job`: description of one run of a comparison."""

from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

from kerple.compare.configuration import flat
from kerple.compare.runs import Run


@dataclass(frozen=True, eq=False)
class Job:
    """A fit and its test. When they are finished, `kerple.compare.runs.Run` describes the results.

    Args:
        label: Label of the strategy.
        seed: Seed of the run.
        part: Part of the comparison; empty if it has only one.
        directory: Folder of the run. Its lock and its output are next to it: ``seed-1.lock``, ``seed-1.log``.
        test_folder: Folder of the test, inside the folder of the run.
        test_flags: Arguments of ``run.py test``, except checkpoint and folder.
        fit_flags: Arguments of ``run.py fit``, except strategy and folder; empty for a pretrained model.
        position_flags: Arguments of the strategy.
        config: Resolved configuration of the fit, nested; empty before `resolve` and for a pretrained model.
        test_config: Resolved configuration of the test, nested.
        data: Checksum of the data; None if it is not known or the run reads none.
        inputs: Digests of a model's files by its path, and of the source of the user's own classes by import path.
            The keys of classes that only the test uses begin with ``test``.
        plan: Digests of the files of the comparison's plan, by path.
        parallel: Number of runs at a time.
    """

    label: str
    seed: int
    part: str
    directory: Path
    test_folder: Path
    test_flags: list[str]
    fit_flags: list[str] = field(default_factory=list)
    position_flags: list[str] = field(default_factory=list)
    config: dict[str, Any] = field(default_factory=dict)
    test_config: dict[str, Any] = field(default_factory=dict)
    data: str | None = None
    inputs: dict[str, str] = field(default_factory=dict)
    plan: dict[str, str] = field(default_factory=dict)
    parallel: int = 1

    @cached_property
    def training(self) -> dict[str, Any]:
        """Configuration of the fit with dotted keys; for a pretrained model, configuration of the test."""
        return flat(self.config or self.test_config)

    @cached_property
    def test(self) -> dict[str, Any]:
        """Options of the test that the fit lacks or that have another value there, nested."""
        return _changed(self.config, self.test_config)

    @property
    def name(self) -> str:
        """Name of the run in messages."""
        return f"{self.part} {self.label} seed {self.seed}".strip()

    @property
    def checkpoint(self) -> Path:
        """The checkpoint from which a stopped fit resumes, and which is tested."""
        return self.directory / "checkpoints" / "last.ckpt"

    @property
    def as_run(self) -> Run:
        """The run for a report. Its files exist only when it is finished."""
        return Run(self.label, self.seed, self.test_folder, self.part)

    def beside(self, suffix: str) -> Path:
        """Path of a file next to the run's folder, such as its ``.lock`` or ``.log``."""
        return self.directory.with_name(self.directory.name + suffix)

    def record(self, folder: Path) -> Path:
        """Folder of the record of this run, below a folder of records."""
        return folder / self.part / self.label / f"seed-{self.seed}"


def _changed(before: Any, after: dict[str, Any]) -> dict[str, Any]:
    """The options of ``after`` that ``before`` lacks or that have another value there, nested."""
    if not isinstance(before, dict) or before.get("class_path") != after.get("class_path"):
        return after
    return {
        name: _changed(before.get(name), value) if isinstance(value, dict) else value
        for name, value in after.items()
        if name == "class_path" or value != before.get(name)
    }

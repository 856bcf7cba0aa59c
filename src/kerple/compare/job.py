"""`Job`: a run of a comparison that is to be done."""

from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

from kerple.compare.configuration import flat
from kerple.compare.runs import Run


@dataclass(frozen=True, eq=False)
class Job:
    """A run to be done: a fit and its test. What it leaves when it is finished is a `kerple.compare.runs.Run`.

    Args:
        label: Label of the strategy.
        seed: Seed of the run.
        part: Part of the comparison, empty if it has only one.
        directory: Folder of the run. Its lock and what it prints are beside it: ``seed-1.lock``, ``seed-1.log``.
        test_folder: Folder in it that the test writes to.
        test_flags: Arguments of ``run.py test``, without those of checkpoint and folder.
        fit_flags: Arguments of ``run.py fit``, without those of strategy and folder; none for a pretrained model.
        position_flags: Arguments for its strategy.
        config: Resolved configuration of the fit, nested; empty until it is resolved, and for a pretrained model.
        tested: Resolved configuration of the test, nested.
        data: Checksum of its data, None if that is not known or there is none.
        inputs: Digests of what the configuration only names: a model's files, by its path; the source of the user's own
            classes, by import path; and of those of the test, by ``test`` and import path.
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
    tested: dict[str, Any] = field(default_factory=dict)
    data: str | None = None
    inputs: dict[str, str] = field(default_factory=dict)
    plan: dict[str, str] = field(default_factory=dict)
    parallel: int = 1

    @cached_property
    def training(self) -> dict[str, Any]:
        """What the run was trained with, with dotted keys; of a pretrained model, which is not, that of its test."""
        return flat(self.config or self.tested)

    @cached_property
    def test(self) -> dict[str, Any]:
        """The options of the test that the fit lacks or has otherwise, nested."""
        return _changed(self.config, self.tested)

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
        """The run as reports read it; its files exist only once it is finished."""
        return Run(self.label, self.seed, self.test_folder, self.part)

    def beside(self, suffix: str) -> Path:
        """Path of a file beside the run's folder: its ``.lock``, or the ``.log`` of its output."""
        return self.directory.with_name(self.directory.name + suffix)

    def record(self, folder: Path) -> Path:
        """Folder of the finished run's numbers, below a folder of records."""
        return folder / self.part / self.label / f"seed-{self.seed}"


def _changed(before: Any, after: dict[str, Any]) -> dict[str, Any]:
    """The options of a nested configuration that another one lacks or has otherwise."""
    if not isinstance(before, dict) or before.get("class_path") != after.get("class_path"):
        return after
    return {
        name: _changed(before.get(name), value) if isinstance(value, dict) else value
        for name, value in after.items()
        if name == "class_path" or value != before.get(name)
    }

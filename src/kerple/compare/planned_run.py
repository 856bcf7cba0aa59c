"""`PlannedRun`: a run of a comparison, with the flags, configurations and folders for its execution."""

from dataclasses import asdict, dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import yaml

from kerple.base.run_folder import LAST
from kerple.compare.finished_runs import FinishedRun
from kerple.config.flat_configuration import flat, same_value

PATHS = ("directory", "test_folder", "weights")  # fields that are paths


@dataclass(frozen=True, eq=False)
class PlannedRun:
    """A fit and its test. `kerple.compare.finished_runs.FinishedRun` describes the results of both.

    The flags describe the run before `kerple.compare.resolution.resolve`, and the configurations after it.

    Args:
        label: Label of the strategy.
        seed: Seed of the run.
        part: Part of the comparison; empty if it has only one.
        directory: Folder of the run. Its lock and its output are next to it: ``seed-1.lock``, ``seed-1.log``.
        test_folder: Folder of the test, inside the folder of the run.
        test_flags: Arguments of ``run.py test``, except checkpoint and folder.
        fit_flags: Arguments of ``run.py fit``, except strategy and folder; empty for a pretrained model.
        position_flags: Arguments of ``run.py fit`` that set the strategy and its options.
        config: Resolved configuration of the fit, nested; empty for a pretrained model.
        test_config: Resolved configuration of the test, nested.
        data: Checksum of the data; None if it is not known or the run reads no data.
        inputs: Digests of models by path or name, and of the source code of the user's own classes by import path.
            The keys of classes that only the test uses begin with ``test`` and a space.
        plan: Digests of the files of the comparison's plan, by path.
        parallel: Number of runs that are executed at a time.
        parent: Name of the run from which this run starts; None if it starts from none.
        weights: Checkpoint of the parent, from whose weights the fit starts; None without a parent.
    """

    label: str
    seed: int
    part: str
    directory: Path
    test_folder: Path
    test_flags: list[str] = field(default_factory=list)
    fit_flags: list[str] = field(default_factory=list)
    position_flags: list[str] = field(default_factory=list)
    config: dict[str, Any] = field(default_factory=dict)
    test_config: dict[str, Any] = field(default_factory=dict)
    data: str | None = None
    inputs: dict[str, str] = field(default_factory=dict)
    plan: dict[str, str] = field(default_factory=dict)
    parallel: int = 1
    parent: str | None = None
    weights: Path | None = None

    @classmethod
    def read(cls, description: str) -> "PlannedRun":
        """Return the run with a `description`."""
        content = yaml.safe_load(description)
        content |= {name: Path(content[name]) for name in PATHS if content.get(name)}
        return cls(**{name: value for name, value in content.items() if name in cls.__dataclass_fields__})

    def description(self) -> str:
        """The run as YAML, without flags. A process that executes the run reads it, and stores it in ``run.yaml``."""
        content = {name: value for name, value in asdict(self).items() if not name.endswith("_flags")}
        content |= {name: str(content[name]) for name in PATHS if content[name]}
        return yaml.safe_dump(content, sort_keys=False)

    @cached_property
    def training(self) -> dict[str, Any]:
        """Configuration of the fit, or of the test if the model is pretrained and has no fit, with dotted keys.

        With a parent, ``weights`` is the parent's label, which does not depend on the folder of the runs.
        """
        stage = {"weights": self.weights.parents[2].name} if self.weights else {}
        return flat(self.config or self.test_config) | stage

    @cached_property
    def test(self) -> dict[str, Any]:
        """Options of the test, nested, that the fit lacks or that have another value in the fit."""
        return _changed(self.config, self.test_config)

    @property
    def data_options(self) -> dict[str, Any] | None:
        """The section ``data`` of the configuration: ``class_path`` and ``init_args``."""
        return (self.config or self.test_config).get("data")

    @property
    def name(self) -> str:
        """Name of the run in messages: part, label and seed."""
        return f"{self.part} {self.label} seed {self.seed}".strip()

    @property
    def checkpoint(self) -> Path:
        """Path of the last checkpoint, from which a stopped fit resumes and which the test reads."""
        return self.directory / LAST

    @property
    def finished_run(self) -> FinishedRun:
        """The description of the results for a report. Their files exist only after the test."""
        return FinishedRun(self.label, self.seed, self.test_folder, self.part)

    def sidecar(self, suffix: str) -> Path:
        """Path next to the run's folder with the folder's name and a suffix, such as ``.lock`` or ``.log``."""
        return self.directory.with_name(self.directory.name + suffix)

    def record(self, folder: Path) -> Path:
        """Path of this run's record, a committed copy of its results, inside a folder of records."""
        return folder / self.part / self.label / f"seed-{self.seed}"


def _changed(before: Any, after: dict[str, Any]) -> dict[str, Any]:
    """The options of ``after``, nested, that ``before`` lacks or that have another value in ``before``.

    If an object has another class, all its options are returned. ``class_path`` is always returned, because the options
    of an object are invalid without it.
    """
    if not isinstance(before, dict) or before.get("class_path") != after.get("class_path"):
        return after
    return {
        name: _changed(before.get(name), value) if isinstance(value, dict) else value
        for name, value in after.items()
        if name == "class_path" or not same_value(name, value, before.get(name))
    }

"""`Comparison`: the content of a comparison's file, which describes one `Job` per strategy, seed and part."""

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from kerple.base.errors import UserError
from kerple.base.shipped_configs import config_path, with_shipped_configs
from kerple.compare.job import Job
from kerple.compare.run_folders import record_folders

SET_BY_COMPARE = {  # flags that a comparison sets for every run, and their replacement
    "run_dir": "use runs and test_folder",
    "ckpt_path": "leave it out: a stopped run is resumed, and the last checkpoint of each run is tested",
    "model.position": "use position and options of a strategy",
}
RESERVED = ("checkpoints", "logs", "tensorboard")  # folders in a run that cannot be the folder of its test


@dataclass
class Strategy:
    """One strategy of a comparison.

    Args:
        position: Class name of the positional strategy; null for the label.
        options: Options of the strategy, such as ``{floor: 0.05}``.
        flags: Further flags of `fit` for this strategy only, such as ``{data.length: 128}``.
        hf: A pretrained model in place of a position: a folder, a GGUF file or a name. It is not fitted, and it is
            tested once instead of once per seed. Its options are those of `kerple.hf.pretrained.read_network`, such as
            ``{scaling: yarn, factor: 2}``. Its flags are those of `test`.
        seeds: Number of seeds, the first ones of the comparison; null for all.
    """

    position: str | None = None
    options: dict[str, Any] = field(default_factory=dict)
    flags: dict[str, Any] = field(default_factory=dict)
    hf: str | None = None
    seeds: int | None = None


@dataclass
class Comparison:
    """Strategies × seeds over one configuration.

    Args:
        name: Name of the comparison and of its folders.
        base: Configurations of every fit; later ones replace earlier ones. Empty if nothing is fitted.
        strategies: The strategies by label. ``KerpleLog: {}`` is the strategy of that name with its defaults.
        seeds: Seeds of the initialisation and the order of data.
        baseline: Label of the strategy with which the others are compared.
        flags: Flags of every fit; they replace options of the configurations.
        parts: Further flags by the name of a part, such as a task or a corpus: ``{sort: {data.task: Sort}}``. Every
            strategy and seed has a run in each part, and one report has the results of all.
        test: Flags of every test; they replace options of the checkpoint. ``config`` is the path of a configuration.
        test_folder: Name of the folder of the test in each run. Two comparisons with different names can test the
            same runs with different options.
        seeded: Flags of `fit` whose value is the seed.
        runs: Folder of the runs; null for logs/compare/<name>.
        output: Folder of the report; null for results/<name>.
        reuse_from: Folders of other reports. Their committed runs are reused for the same part, label and seed.
        plan: Configuration of the comparison as planned. The first line of the report lists deviations from it.
        plan_page: Page that describes the plan. Each run records the digests of the page and of the configuration.
        planned_data: Planned checksum of the data of all runs; null for any.
        planned_code: Planned digest of the package's source, see `kerple.base.sources.package_digest`; null for any.
        looked_at: Seeds whose results were known before the plan was written.

    Raises:
        UserError: If a list is empty or has a seed twice, the baseline is not among the strategies, a configuration
            does not exist, a name is not a valid name of a folder, or flags set an option that the comparison sets.
    """

    name: str
    base: list[str]
    strategies: dict[str, Strategy | None]
    seeds: list[int]
    baseline: str
    flags: dict[str, Any] = field(default_factory=dict)
    parts: dict[str, dict[str, Any]] = field(default_factory=dict)
    test: dict[str, Any] = field(default_factory=dict)
    test_folder: str = "test"
    seeded: list[str] = field(default_factory=lambda: ["seed_everything", "data.seed"])
    runs: str | None = None
    output: str | None = None
    reuse_from: list[str] = field(default_factory=list)
    plan: str | None = None
    plan_page: str | None = None
    planned_data: str | None = None
    planned_code: str | None = None
    looked_at: list[int] = field(default_factory=list)

    def __post_init__(self) -> None:
        fitted = any(s is None or s.hf is None for s in self.strategies.values())
        for key in ("strategies", "seeds", "seeded", *(["base"] if fitted else [])):
            if not getattr(self, key):
                raise UserError(f"compare: {key}: got none, expected at least one")
        if len(set(self.seeds)) < len(self.seeds) or not all(0 <= seed < 1 << 32 for seed in self.seeds):
            raise UserError(f"compare: seeds: got {self.seeds}, expected numbers from 0 to 2^32 - 1, each once")
        if self.baseline not in self.strategies:
            raise UserError(f"compare: baseline: got {self.baseline!r}, expected one of {', '.join(self.strategies)}")
        folders = {"name": [self.name], "strategies": self.strategies, "parts": self.parts}
        for key, names in (folders | {"test_folder": [self.test_folder]}).items():
            for name in names:
                if Path(name).name != name or name.startswith(".") or (key == "test_folder" and name in RESERVED):
                    raise UserError(
                        f"compare: {key}: got {name!r}, expected a folder name without / and without a leading dot"
                        + (f", and not {' or '.join(RESERVED)}" if key == "test_folder" else "")
                    )
        configs = (flags["config"] for flags in (self.test, *self.parts.values()) if "config" in flags)
        for path in (*self.base, *configs):
            if not isinstance(path, str) or not Path(config_path(path)).is_file():
                raise UserError(
                    f"compare: base, test or parts: got {path!r}, expected the path of a configuration, relative to "
                    f"{Path.cwd()}"
                )
        if self.runs_folder.resolve().is_relative_to((self.report_folder / "runs").resolve()):
            raise UserError(
                f"compare: runs: got {self.runs_folder}, which is inside the folder of records; choose another folder"
            )
        advice = dict.fromkeys(self.seeded, "use seeds") | SET_BY_COMPARE
        _refuse("flags", self.flags, advice)
        _refuse("test", self.test, SET_BY_COMPARE)
        for name, flags in self.parts.items():
            _refuse(f"parts: {name}", flags, advice)
        for label, strategy in self.strategies.items():
            _refuse(f"strategies: {label}: flags", strategy.flags if strategy else {}, advice)
            number = strategy.seeds if strategy else None
            if number is not None and not 1 <= number <= len(self.seeds):
                raise UserError(f"compare: strategies: {label}: seeds: got {number}, expected 1..{len(self.seeds)}")

    @property
    def report_folder(self) -> Path:
        """Folder of the report."""
        return Path(self.output or f"results/{self.name}")

    @property
    def records(self) -> dict[Path, Path]:
        """Folders of records, each with its report; those of this comparison's report are first."""
        reports = [self.report_folder, *map(Path, self.reuse_from)]
        return {folder: report for report in reports for folder in record_folders(report)}

    @property
    def runs_folder(self) -> Path:
        """Folder of the runs."""
        return Path(self.runs or f"logs/compare/{self.name}")

    def jobs(self) -> list[Job]:
        """All runs, seed by seed; the strategies with most seeds are first."""
        chosen = {label: strategy or Strategy() for label, strategy in self.strategies.items()}
        seeds = {label: 1 if of.hf else of.seeds or len(self.seeds) for label, of in chosen.items()}
        return [
            self._job(part, label, strategy, seed)
            for number in sorted(set(seeds.values()), reverse=True)
            for seed in self.seeds[:number]
            for part in self.parts or [""]
            for label, strategy in chosen.items()
            if seeds[label] == number
        ]

    def _job(self, part: str, label: str, strategy: Strategy, seed: int) -> Job:
        directory = self.runs_folder / part / label / f"seed-{seed}"
        run = (label, seed, part, directory, directory / self.test_folder)
        test = as_flags(self.test)
        if strategy.hf:
            options = {"hf": strategy.hf} | {f"model.{key}": value for key, value in strategy.options.items()}
            return Job(*run, [*as_flags(options | strategy.flags), *test])
        fit = [f"--config={config_path(path)}" for path in self.base]
        fit += as_flags(self.parts.get(part, {}))
        fit += as_flags(self.flags | strategy.flags)
        # the last flags win: a seed in a configuration would give all runs the same seed
        fit += as_flags(dict.fromkeys(self.seeded, seed))
        options = {f"model.position.{key}": value for key, value in strategy.options.items()}
        return Job(*run, test, fit, as_flags({"model.position": strategy.position or label} | options))


def _refuse(where: str, flags: Mapping[str, Any], advice: Mapping[str, str]) -> None:
    """Raise a UserError if a flag, or an option below it, is set by the comparison.

    Args:
        where: Name of the setting that has the flags.
        flags: The flags.
        advice: The flags that the comparison sets, each with its replacement.
    """
    for key in flags:
        for flag, instead in advice.items():
            if re.match(rf"{re.escape(flag)}(\.|$)", key.replace(".init_args.", ".")):  # optional in flags
                raise UserError(f"compare: {where}: got {key}, which compare sets for every run; {instead}")


def as_flags(values: Mapping[str, Any]) -> list[str]:
    """Command line flags with these values. Values other than strings are JSON, which is also YAML."""
    flags = [f"--{key}={value if isinstance(value, str) else json.dumps(value)}" for key, value in values.items()]
    return with_shipped_configs(flags)

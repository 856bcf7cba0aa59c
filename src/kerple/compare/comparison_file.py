"""`Comparison`: the content of a comparison's configuration file, and its conversion into one `PlannedRun` per run."""

import json
from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from itertools import product
from pathlib import Path
from typing import Any

from jsonargparse import ArgumentParser, Namespace

from kerple.base.errors import UserError, require
from kerple.compare.planned_run import PlannedRun
from kerple.compare.run_discovery import FOLDER_NAME, is_folder_name, record_folders
from kerple.config.files import config_path, with_shipped_configs
from kerple.config.options import command_parser, rename_options
from kerple.config.parsing import parse

SET_BY_COMPARE = {  # flags that a comparison sets for every run, and advice for users who set them
    "output": "use runs and test_folder",
    "ckpt_path": "leave it out: a stopped run is resumed, and the last checkpoint of each run is tested",
    "model.position": "use position and options of a strategy",
}
RESERVED = ("checkpoints", "logs", "tensorboard")  # folders of a run, which test_folder cannot be


# Options are annotated as `dict`. In values of type Any, the parser replaces a mapping with the key class_path by a
# Namespace with the defaults of the class.
@dataclass
class Strategy:
    """One strategy of a comparison.

    Args:
        position: Class name of the positional strategy; null if the label is the class name.
        options: Options of the strategy, such as ``{floor: 0.05}``.
        flags: Further flags of `fit` for this strategy only, such as ``{data.length: 128}``.
        hf: A pretrained model in place of ``position``: a folder, a GGUF file or a name on the Hugging Face hub. It is
            not fitted, and it is tested once instead of once per seed. ``options`` are then those of
            `kerple.hf.pretrained_model_reader.read_network`, such as ``{scaling: yarn, factor: 2}``, and ``flags``
            those of `test`. ``base``, ``flags`` and ``parts`` of the comparison are options of fits, and have no effect
            on it.
        seeds: Number n of seeds: the first n seeds of the comparison are used; null for all.
        parent: Label of a strategy above this one. Each fit is then a second stage: it starts from the weights of the
            parent's run with the same seed and part, or from the parent's model ``hf``. It has the flags of the parent,
            replaced by ``stage`` of the comparison, if the parent is no stage, and by ``flags``. The strategy is that
            of ``position``, not that of the parent.
    """

    position: str | None = None
    options: dict = field(default_factory=dict)
    flags: dict = field(default_factory=dict)
    hf: str | None = None
    seeds: int | None = None
    parent: str | None = None


@dataclass
class Comparison:
    """One run for each strategy, seed and part, such as a task. A strategy or part can set further flags for its runs.

    Args:
        name: Title of the report, and name of the default folders.
        base: Paths of the configurations of every fit. Options in later files replace those in earlier files. Empty if
            nothing is fitted.
        strategies: The strategies by label. ``KerpleLog: {}`` is the strategy of that name with its defaults. The keys
            of an entry are ``position``, ``options``, ``flags``, ``hf``, ``seeds`` and ``parent``.
        seeds: Seeds of the initialisation and of the order of data.
        baseline: Label of the strategy with which the others are compared.
        flags: Flags of every fit. They replace options of ``base`` and flags of ``parts``.
        stage: Flags of every fit with a ``parent``. A flag of ``seeded`` replaces the seed there. With another value of
            ``data.seed``, a stage reads the text in another order than its parent.
        parts: Further flags of `fit` by the name of a part, such as a task or a corpus: ``{sort: {data.task: Sort}}``.
            Every strategy and seed has a run in each part. One report contains all parts.
        test: Flags of every test. They replace options of the checkpoint. The flag ``config`` is the path of a
            configuration file.
        test_folder: Name of the folder of test results, inside the folder of each run. Comparisons in which this name
            differs can test the same runs with different options.
        seeded: Flags of `fit` whose value is the seed.
        runs: Folder of the runs; null for logs/compare/<name>.
        output: Folder of the report; null for results/<name>.
        reuse_from: Folders of other reports. A run is not trained if one of them has its record: the committed results
            of a run with the same part, label, seed, data and options. A line is printed for a folder that is missing.
        plan: Path of a comparison's configuration file that was committed before the runs. The first line of the report
            lists deviations from it.
        plan_page: Path of the page that explains the plan. Each run records the digests of this page and of ``plan``.
        planned_data: In a plan: checksum of the data of all runs; null for any data.
        planned_code: In a plan: digest of the package's source by `kerple.config.user_code_digests.package_digest`;
            null for any source.
        seeds_seen_before_plan: In a plan: seeds whose results were known before the plan was written. The report lists
            their runs as deviations.

    Raises:
        UserError: If

            - ``strategies``, ``seeds``, ``seeded`` or, for fits, ``base`` is empty,
            - a seed is repeated or out of range, or a strategy has more seeds than the comparison, or is a pretrained
              model and has a number of seeds,
            - the baseline is not among the strategies,
            - a parent is not above its stages, has fewer seeds, or has other options than ``hf``, or a pretrained model
              has a parent,
            - a configuration does not exist,
            - a name or a flag is not text,
            - a name cannot be the name of a folder, two runs have the same name, or ``runs`` is inside
              ``<output>/runs``, the folder of records,
            - flags set an option that the comparison sets.
    """

    name: str
    base: list[str]
    strategies: dict[str, Strategy | None]
    seeds: list[int]
    baseline: str
    flags: dict = field(default_factory=dict)
    stage: dict = field(default_factory=dict)
    parts: dict[str, dict] = field(default_factory=dict)
    test: dict = field(default_factory=dict)
    test_folder: str = "test"
    seeded: list[str] = field(default_factory=lambda: ["seed_everything", "data.seed"])
    runs: str | None = None
    output: str | None = None
    reuse_from: list[str] = field(default_factory=list)
    plan: str | None = None
    plan_page: str | None = None
    planned_data: str | None = None
    planned_code: str | None = None
    seeds_seen_before_plan: list[int] = field(default_factory=list)

    @classmethod
    def from_options(cls, options: Namespace) -> "Comparison":
        """Return the comparison with the options of a parser that has the arguments of this class."""
        values = _without_null(options.as_dict())
        strategies = {label: Strategy(**_without_null(each or {})) for label, each in values["strategies"].items()}
        given = {each.name: values[each.name] for each in fields(cls) if each.name in values}
        return cls(**given | {"strategies": strategies})

    def __post_init__(self) -> None:
        for where in ("strategies", "parts"):
            self._check_keys(where, getattr(self, where))
        fitted = any(strategy.hf is None for strategy in self._strategies.values())
        for key in ("strategies", "seeds", "seeded", *(["base"] if fitted else [])):
            require(bool(getattr(self, key)), f"compare: {key}", "none", "at least one")
        valid = len(set(self.seeds)) == len(self.seeds) and all(0 <= seed < 1 << 32 for seed in self.seeds)
        require(valid, "compare: seeds", self.seeds, "numbers from 0 to 2^32 - 1, each once")
        for label, strategy in self._strategies.items():
            expected = f"a number from 1 to {len(self.seeds)}, the number of the comparison's seeds"
            valid = strategy.seeds is None or 1 <= strategy.seeds <= len(self.seeds)
            require(valid, f"compare: strategies: {label}: seeds", strategy.seeds, expected)
            expected = "null, because a pretrained model is tested once"
            valid = not strategy.hf or strategy.seeds is None
            require(valid, f"compare: strategies: {label}: seeds", strategy.seeds, expected)
        self._check_parents()
        expected = f"one of {', '.join(self.strategies)}"
        require(self.baseline in self.strategies, "compare: baseline", repr(self.baseline), expected)
        self._check_folders()
        self._check_flags()

    def _check_keys(self, where: str, section: Mapping[Any, Any]) -> None:
        for key in section:
            require(isinstance(key, str), f"compare: {where}", repr(key), "text; put it in quotes")

    def _check_parents(self) -> None:
        """Raise a UserError if a run could not start from the run of its parent."""
        above = dict[str, Strategy]()
        for label, strategy in self._strategies.items():
            option = f"compare: strategies: {label}"
            if strategy.parent is not None:
                expected = f"one of the strategies above: {', '.join(above) or 'none'}"
                require(strategy.parent in above, f"{option}: parent", repr(strategy.parent), expected)
                require(strategy.hf is None, f"{option}: hf", strategy.hf, "null, because a stage is fitted")
                parent, most = above[strategy.parent], len(self.seeds)
                expected = "null for the model of a parent, because a stage starts from the unchanged weights"
                require(not (parent.hf and parent.options), f"{option}: parent: options", parent.options, expected)
                seeds = (strategy.seeds or most, most if parent.hf else parent.seeds or most)
                require(seeds[0] <= seeds[1], f"{option}: seeds", seeds[0], f"at most {seeds[1]}, those of its parent")
            above[label] = strategy

    def _check_folders(self) -> None:
        """Raise a UserError if a name cannot be the name of a folder, or `runs_folder` is in the folder of records."""
        names = [*product(["strategies"], self.strategies), *product(["parts"], self.parts)]
        for key, name in [("name", self.name), *names]:
            require(is_folder_name(name), f"compare: {key}", repr(name), FOLDER_NAME)
        joined = [f"{part} {label}" for part, label in product(self.parts, self.strategies)]  # as in `PlannedRun.name`
        twice = next((name for name in joined if joined.count(name) > 1), "")
        require(not twice, "compare: parts", f"two runs with the name {twice}", "other names of parts or strategies")
        valid = is_folder_name(self.test_folder) and self.test_folder not in RESERVED
        expected = f"{FOLDER_NAME}, other than {', '.join(RESERVED)}"
        require(valid, "compare: test_folder", repr(self.test_folder), expected)
        records = self.report_folder / "runs"
        valid = not self.runs_folder.resolve().is_relative_to(records.resolve())
        expected = f"a folder outside of {records}, where the report keeps its records"
        require(valid, "compare: runs", self.runs_folder, expected)

    def _check_flags(self) -> None:
        """Raise a UserError if flags set an option that the comparison sets, or a configuration does not exist."""
        flags = {"test": self.test, "flags": self.flags, "stage": self.stage}
        flags |= {f"parts: {name}": part for name, part in self.parts.items()}
        flags |= {f"strategies: {label}: flags": strategy.flags for label, strategy in self._strategies.items()}
        stages = ["stage", *(f"strategies: {label}: flags" for label, each in self._strategies.items() if each.parent)]
        for where, values in flags.items():
            self._check_keys(where, values)
            advice = SET_BY_COMPARE | dict.fromkeys([] if where in ("test", "stage") else self.seeded, "use seeds")
            advice |= {"weights": "use parent"} if where in stages else {}
            for key, flag in product(values, advice):
                # the entry model.position of `advice` also forbids model.position.floor and model.init_args.position
                if f"{_short(key)}.".startswith(f"{flag}."):
                    raise UserError(f"compare: {where}: got {key}, which compare sets for every run; {advice[flag]}")
        configs = [(f"{where}: config", values["config"]) for where, values in flags.items() if "config" in values]
        configs += [(name, path) for name in ("plan", "plan_page") if (path := getattr(self, name)) is not None]
        for where, path in [*product(["base"], self.base), *configs]:
            valid = isinstance(path, str) and Path(config_path(path)).is_file()
            require(valid, f"compare: {where}", repr(path), f"the path of a file, relative to {Path.cwd()}")

    @property
    def _strategies(self) -> dict[str, Strategy]:
        """The strategies by label; `Strategy` with its defaults in place of None."""
        return {label: strategy or Strategy() for label, strategy in self.strategies.items()}

    @property
    def report_folder(self) -> Path:
        """Folder of the report."""
        return Path(self.output or f"results/{self.name}")

    @property
    def records(self) -> dict[Path, Path]:
        """The folders of records, those of this comparison's own report first, each with the folder of its report."""
        reports = [self.report_folder, *map(Path, self.reuse_from)]
        return {folder: report for report in reports for folder in record_folders(report)}

    @property
    def runs_folder(self) -> Path:
        """Folder of the runs."""
        return Path(self.runs or f"logs/compare/{self.name}")

    def planned_runs(self) -> list[PlannedRun]:
        """All runs, ordered by the number of seeds of their strategy (largest first), seed, part and strategy."""
        strategies = self._strategies
        seeds = {label: 1 if s.hf else s.seeds or len(self.seeds) for label, s in strategies.items()}
        runs = [
            self._planned_run(part, label, strategy, seed)
            for i, seed in enumerate(self.seeds)
            for part in self.parts or [""]
            for label, strategy in strategies.items()
            if i < seeds[label]
        ]
        return sorted(runs, key=lambda run: -seeds[run.label])

    def _planned_run(self, part: str, label: str, strategy: Strategy, seed: int) -> PlannedRun:
        directory = self.runs_folder / part / label / f"seed-{seed}"
        run = (label, seed, part, directory, directory / self.test_folder)
        test = as_flags(self.test)
        if strategy.hf:
            options = {"hf": strategy.hf} | {f"model.{key}": value for key, value in strategy.options.items()}
            return PlannedRun(*run, [*as_flags(options), *test, *as_flags(strategy.flags)])
        fit = [f"--config={config_path(path)}" for path in self.base] + as_flags(self.parts.get(part, {}))
        fit += as_flags(self._flags(strategy))
        # the last value of a flag counts, so these values replace a seed in a configuration
        fit += as_flags(dict.fromkeys(self.seeded, seed))
        stage = {_short(key): value for key, value in self.stage.items() if strategy.parent}
        fit += as_flags({flag: stage[_short(flag)] for flag in self.seeded if _short(flag) in stage})
        options = {f"model.position.{key}": value for key, value in strategy.options.items()}
        planned = PlannedRun(*run, test, fit, as_flags({"model.position": strategy.position or label} | options))
        if strategy.parent is None:
            return planned
        if model := self._strategies[strategy.parent].hf:
            return replace(planned, fit_flags=[*fit, f"--weights={model}"])
        directory = self.runs_folder / part / strategy.parent / f"seed-{seed}"
        parent = replace(planned, label=strategy.parent, directory=directory)
        return replace(planned, parent=parent.name, weights=parent.checkpoint)

    def _flags(self, strategy: Strategy) -> dict[str, Any]:
        """The flags of the fits of a strategy, other than its position, its part and its seed."""
        if strategy.parent is None:
            return self.flags | ({} if strategy.hf else strategy.flags)
        parent = self._strategies[strategy.parent]
        return self._flags(parent) | ({} if parent.parent else self.stage) | strategy.flags


def _short(option: str) -> str:
    """Return the shorter of an option's two names, ``data.seed`` for ``data.init_args.seed``."""
    return option.replace(".init_args.", ".")


def _without_null(options: Mapping[str, Any]) -> dict[str, Any]:
    """Leave out the options that are null, as those of a section without lines, so that they have their defaults."""
    return {key: value for key, value in options.items() if value is not None}


def comparison_parser(about: str | None = None) -> ArgumentParser:
    """Return a parser of `Comparison`, with the description ``about`` for the help of the command."""
    parser = command_parser("compare", about)
    parser.add_argument("--config", action="config", help="file that defines the comparison; see configs/compare")
    parser.add_class_arguments(Comparison)
    rename_options(parser, looked_at="seeds_seen_before_plan")  # the name in committed plans
    return parser


def read_comparison(path: str) -> Comparison:
    """Read a comparison's configuration file."""
    return Comparison.from_options(parse(comparison_parser(), ["--config", config_path(path)]))


def as_flags(values: Mapping[str, Any]) -> list[str]:
    """Command-line flags with these values. Values other than strings are written as JSON, which is also YAML."""
    texts = {key: value if isinstance(value, str) else json.dumps(value) for key, value in values.items()}
    return with_shipped_configs([f"--{key}={text}" for key, text in texts.items()])

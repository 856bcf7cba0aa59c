"""Description of a comparison, as its configuration file gives it, and its runs (`Job`), one a strategy and seed."""

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from kerple.base.errors import UserError
from kerple.base.shipped_configs import found


@dataclass
class Strategy:
    """One strategy of a comparison.

    Args:
        position: Class name of the positional strategy; null for the label.
        options: Options of the strategy, for instance ``{floor: 0.05}``.
        flags: Further flags of `fit` for this strategy alone, for instance ``{data.length: 128}``.
        hf: A pretrained model in place of a position: a folder, a GGUF file or a name. It is not fitted, and tested
            once instead of for each seed. Its options are those of `kerple.hf.pretrained.Pretrained`, for instance
            ``{scaling: yarn, factor: 2}``, its flags those of `test`.
        seeds: Number of the comparison's seeds that it is trained with, the first ones; null for all.
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
        base: Configurations of every fit; later ones win. Empty if nothing is fitted.
        strategies: The strategies by their labels; ``KerpleLog: {}`` is the strategy of that name with its defaults.
        seeds: Seeds of the initialisation and the order of data. Runs of the same seed are compared in pairs.
        baseline: Label of the strategy against which the others are tested.
        flags: Flags of every fit, which win over the configurations.
        parts: Further configurations by the name of a part, such as a task or a corpus. Every strategy and seed has a
            run in each part, and one report has the results of all. Without parts, there is one nameless part.
        test: Flags of every test, which win over the checkpoint: ``{config: configs/compare/demo-test.yaml}``.
        test_folder: Name of the folder in a run that its test writes to. So two comparisons can test the same runs in
            two ways.
        seeded: Flags of `fit` that are set to the seed.
        runs: Folder of the runs; null for logs/compare/<name>.
        output: Folder of the report; null for results/<name>.
        also: Further folders of reports whose committed runs may be taken for runs of this comparison, if part, label
            and seed are the same.
        minutes: Number of minutes that the comparison should take. If it will take longer, ``smaller`` is suggested.
        smaller: A command for a smaller comparison, with ``{steps}`` in place of its number of steps.

    Raises:
        UserError: If a list is empty or has an entry twice, the baseline is not among the strategies, a configuration
            does not exist, a name cannot be that of a folder, or flags set what the comparison sets itself.
    """

    name: str
    base: list[str]
    strategies: dict[str, Strategy | None]
    seeds: list[int]
    baseline: str
    flags: dict[str, Any] = field(default_factory=dict)
    parts: dict[str, list[str]] = field(default_factory=dict)
    test: dict[str, Any] = field(default_factory=dict)
    test_folder: str = "test"
    seeded: list[str] = field(default_factory=lambda: ["seed_everything", "data.seed"])
    runs: str | None = None
    output: str | None = None
    also: list[str] = field(default_factory=list)
    minutes: float | None = None
    smaller: str | None = None

    def __post_init__(self) -> None:
        fitted = any(s is None or s.hf is None for s in self.strategies.values())
        for key in ("strategies", "seeds", "seeded", *(["base"] if fitted else [])):
            if not getattr(self, key):
                raise UserError(f"compare: {key}: got none, expected at least one")
        if twice := sorted({s for s in self.seeds if self.seeds.count(s) > 1}):
            raise UserError(f"compare: seeds: got {twice} twice, expected every seed once")
        if outside := [seed for seed in self.seeds if not 0 <= seed < 1 << 32]:
            raise UserError(f"compare: seeds: got {outside[0]}, expected a number from 0 to 2^32 - 1")
        if odd := [name for name in self.seeded if not re.fullmatch(r"[a-z_]\w*(\.\w+)*", name)]:
            raise UserError(f"compare: seeded: got {odd[0]!r}, expected names of options of fit, such as data.seed")
        if self.baseline not in self.strategies:
            known = ", ".join(self.strategies)
            raise UserError(f"compare: baseline: got {self.baseline!r}, expected one of the strategies: {known}")
        for kind, names in (
            ("strategies", self.strategies),
            ("parts", self.parts),
            ("test_folder", [self.test_folder]),
        ):
            if odd := [name for name in names if name in ("", "..") or Path(name).name != name]:
                raise UserError(
                    f"compare: {kind}: got {odd[0]!r}, expected the plain name of a folder, without slashes"
                )
        tests = [self.test["config"]] if "config" in self.test else []
        if any(not isinstance(path, str) for path in tests):
            raise UserError(f"compare: test: config: got {tests[0]!r}, expected the path of one file")
        for key, paths in {"base": self.base, "test: config": tests, **self.parts}.items():
            for path in paths:
                if not Path(found(path)).is_file():
                    raise UserError(f"compare: {key}: got {path!r}, which is no file; paths start from where you are")
        own = dict.fromkeys(self.seeded, "use seeds instead, or take it out of seeded") | {
            "run_dir": "use runs instead",
            "ckpt_path": "stopped runs are resumed without it",
            "model.position": "use position and options of a strategy instead",
        }
        _refuse("flags", self.flags, own)
        for label, strategy in self.strategies.items():
            _refuse(f"strategies: {label}: flags", strategy.flags if strategy else {}, own)
            number = strategy.seeds if strategy else None
            if number is not None and not 1 <= number <= len(self.seeds):
                raise UserError(
                    f"compare: strategies: {label}: seeds: got {number}, expected 1..{len(self.seeds)}, how many of "
                    "the comparison's seeds it has"
                )
        own = {"run_dir": "use test_folder instead", "ckpt_path": "each run's last checkpoint is tested"}
        _refuse("test", self.test, own)

    @property
    def runs_folder(self) -> Path:
        """Folder of the runs."""
        return Path(self.runs or f"logs/compare/{self.name}")

    @property
    def report_folder(self) -> Path:
        """Folder of the report."""
        return Path(self.output or f"results/{self.name}")

    @property
    def committed(self) -> list[Path]:
        """Folders of reports that may hold committed runs, in the order of preference."""
        return [self.report_folder, *map(Path, self.also)]

    def jobs(self) -> list["Job"]:
        """All runs, seed by seed, so that the first seeds give a complete comparison early."""
        parts = list(self.parts) or [""]
        return [
            self._job(part, label, seed)
            for seed in self.seeds
            for part in parts
            for label, strategy in self.strategies.items()
            if seed in self._seeds_of(strategy)
        ]

    def _seeds_of(self, strategy: Strategy | None) -> list[int]:
        if strategy is None:
            return self.seeds
        return self.seeds[: 1 if strategy.hf else strategy.seeds]

    def _job(self, part: str, label: str, seed: int) -> "Job":
        strategy = self.strategies[label] or Strategy()
        directory = self.runs_folder / part / label / f"seed-{seed}"
        test = as_flags(self.test | {"run_dir": str(directory / self.test_folder)})
        if strategy.hf:
            own = {"hf": strategy.hf} | {f"model.{key}": value for key, value in strategy.options.items()}
            return Job(label, seed, directory, (), (*as_flags(own), *as_flags(strategy.flags), *test), part)
        fit = [f"--config={found(path)}" for path in (*self.base, *self.parts.get(part, []))]
        fit += as_flags(self.flags | strategy.flags)
        # after all other flags, so that they win: a seed in a configuration would make all runs the same
        fit += as_flags(dict.fromkeys(self.seeded, seed) | {"run_dir": str(directory)})
        fit += [f"--model.position={strategy.position or label}"]
        fit += as_flags({f"model.position.{key}": value for key, value in strategy.options.items()})
        return Job(label, seed, directory, tuple(fit), tuple(test), part)


@dataclass(frozen=True)
class Job:
    """One run: a fit and its test.

    Args:
        label: Label of the strategy.
        seed: Seed of the run.
        directory: The run directory. Files about the run, such as its log, are beside it and have the same stem.
        fit: Arguments of ``run.py fit``; none for a pretrained model.
        test: Arguments of ``run.py test`` without the checkpoint; the last is the folder that it writes to.
        part: Part of the comparison, empty if it has only one.
    """

    label: str
    seed: int
    directory: Path
    fit: tuple[str, ...]
    test: tuple[str, ...]
    part: str = ""

    @property
    def name(self) -> str:
        """Name of the run in messages."""
        return f"{self.part} {self.label} seed {self.seed}".strip()

    @property
    def test_folder(self) -> Path:
        """Folder that the test writes to."""
        return Path(self.test[-1].removeprefix("--run_dir="))

    @property
    def pretrained(self) -> bool:
        """Whether this is a pretrained model, which is not fitted."""
        return not self.fit

    @property
    def checkpoint(self) -> Path:
        """The checkpoint from which a stopped fit resumes, and which is tested."""
        return self.directory / "checkpoints" / "last.ckpt"

    def beside(self, suffix: str) -> Path:
        """Path of a file beside the run directory: ``.json`` for its state, ``.lock``, ``.log`` for its output."""
        return self.directory.with_name(self.directory.name + suffix)


def _refuse(where: str, flags: Mapping[str, Any], own: dict[str, str]) -> None:
    """Refuse flags that the comparison sets itself; they would replace its value, or be lost.

    Args:
        where: The option that holds the flags, for messages.
        flags: The flags of the user.
        own: The flags that the comparison sets, with advice on what to use instead.

    Raises:
        UserError: One of them, or a part of one, is among the flags.
    """
    for key in flags:
        name = key.replace(".init_args.", ".")  # flags may leave it out
        for flag, advice in own.items():
            if name == flag or name.startswith(f"{flag}."):
                raise UserError(f"compare: {where}: got {key}, which is set for every run; {advice}")


def as_flags(values: Mapping[str, Any]) -> list[str]:
    """Command line flags with these values; values other than text are written as JSON, which is also YAML."""
    return [f"--{key}={value if isinstance(value, str) else json.dumps(value)}" for key, value in values.items()]

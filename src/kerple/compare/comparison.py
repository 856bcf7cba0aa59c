"""What is compared: a file says it once, every run follows from it."""

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from kerple.errors import UserError
from kerple.runs.configs import found


@dataclass
class Strategy:
    """One line of the comparison.

    Args:
        position: Class name of the positional strategy; the label if null.
        options: Options of its own, for instance ``{floor: 0.05}``.
        flags: Further flags of `fit` for this line alone, for instance ``{data.length: 128}``.
        hf: A pretrained model in place of a position: a folder, a GGUF file, a name. It is tested once, whatever the
            seeds, and never fitted; its options are those of `kerple.hf.pretrained.Pretrained`, for instance
            ``{scaling: yarn, factor: 2}``, its flags those of `test`.
        seeds: How many of the comparison's seeds it has, the first ones; all if null.
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
        name: Of the comparison; names its folders.
        base: Configs of every fit, later ones win; none where nothing is fitted.
        strategies: Label -> what it is; ``KerpleLog: {}`` is the strategy of that name as it is.
        seeds: Of initialisation and order of data; the tests pair by them.
        baseline: Label every other strategy is tested against.
        flags: Flags of every fit, on top of the configs.
        parts: Name -> further configs. Every strategy and seed has a run in each part, as of tasks or corpora; results
            of all parts are in one report. None: one nameless part.
        test: Flags of every test, on top of what the checkpoint says, for instance ``{config: configs/analysis.yaml}``.
        test_folder: Of a run, that its test writes to: two comparisons may test the same runs in two ways.
        seeded: Flags of fit that are given the seed.
        runs: Where runs are kept; logs/compare/<name> if null.
        output: Where the report goes; results/<name> if null.
        also: Further folders of reports whose committed runs may stand for runs of this comparison, found by part,
            label and seed as its own are.
        minutes: How long it is meant to take; where it takes longer, ``smaller`` is offered.
        smaller: A command for less, with ``{steps}`` where its number of steps belongs.

    Raises:
        UserError: If a list is empty or has something twice, the baseline is not among the strategies, a config is
            not there, what names a folder is no plain name, or flags set what is set for every run here.
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
        tests = [path for key, path in self.test.items() if key == "config" and isinstance(path, str)]
        for path in (*self.base, *(path for paths in self.parts.values() for path in paths), *tests):
            if not Path(found(path)).is_file():
                raise UserError(
                    f"compare: config: got {path}, which is not a file; paths are relative to where you are"
                )
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
        """Where runs are kept."""
        return Path(self.runs or f"logs/compare/{self.name}")

    @property
    def report_folder(self) -> Path:
        """Where the report goes."""
        return Path(self.output or f"results/{self.name}")

    @property
    def committed(self) -> list[Path]:
        """Folders of reports that may hold committed runs, in the order in which they are asked."""
        return [self.report_folder, *map(Path, self.also)]

    def jobs(self) -> list["Job"]:
        """All runs, seed by seed: after the first seeds there is a whole, if noisy, comparison."""
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
        # the last wins: a seed in a config file among the flags must not make one run of all seeds
        fit += as_flags(dict.fromkeys(self.seeded, seed) | {"run_dir": str(directory)})
        fit += [f"--model.position={strategy.position or label}"]
        fit += as_flags({f"model.position.{key}": value for key, value in strategy.options.items()})
        return Job(label, seed, directory, tuple(fit), tuple(test), part)


@dataclass(frozen=True)
class Job:
    """One run: a fit and its test.

    Args:
        label: Of the strategy.
        seed: Of the run.
        directory: Of the run; what belongs to the run but not in it lies beside, with the same stem.
        fit: Arguments of ``run.py fit``; none for a pretrained model.
        test: Arguments of ``run.py test``, without the checkpoint; the last is the folder it writes to.
        part: Of the comparison, empty if it has only one.
    """

    label: str
    seed: int
    directory: Path
    fit: tuple[str, ...]
    test: tuple[str, ...]
    part: str = ""

    @property
    def name(self) -> str:
        """How the run is called in messages."""
        return f"{self.part} {self.label} seed {self.seed}".strip()

    @property
    def test_folder(self) -> Path:
        """Where the test writes."""
        return Path(self.test[-1].removeprefix("--run_dir="))

    @property
    def pretrained(self) -> bool:
        """Whether there is nothing to fit."""
        return not self.fit

    @property
    def checkpoint(self) -> Path:
        """What a stopped fit resumes from and what is tested."""
        return self.directory / "checkpoints" / "last.ckpt"

    def beside(self, suffix: str) -> Path:
        """A file beside the run directory: ``.json`` its state, ``.lock``, ``.log`` what it printed."""
        return self.directory.with_name(self.directory.name + suffix)


def _refuse(where: str, flags: Mapping[str, Any], own: dict[str, str]) -> None:
    """Flags, or parts of them, that compare sets itself would win over it or be lost, without a word."""
    for key in flags:
        name = key.replace(".init_args.", ".")  # may be left out of a flag
        for flag, advice in own.items():
            if name == flag or name.startswith(f"{flag}."):
                raise UserError(f"compare: {where}: got {key}, which is set for every run; {advice}")


def as_flags(values: Mapping[str, Any]) -> list[str]:
    """Command line flags; what is not text or a number is written as JSON, which is YAML too."""
    return [f"--{key}={value if isinstance(value, str) else json.dumps(value)}" for key, value in values.items()]

"""Calls every option of every command with wrong values, and says how each call ended.

The options are those of the parsers themselves and of the signatures of all classes that may stand in them. A case is a
real call of the command, in this process, on the smallest run there is.
"""

import re
import shutil
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import yaml
from jsonargparse import ArgumentParser, capture_parser
from pytorch_lightning import Callback

from kerple.base.signatures import options
from kerple.cli.main import main
from kerple.data.datamodule import TokenShards
from kerple.positions import Position
from kerple.tasks import Task, TaskData
from tests.cli.tiny import TINY

VALUES = {"zero": "0", "negative": "-1", "huge": str(10**15), "nan": ".nan", "empty": "", "wrong type": "[{a: b}]"}
LEFT_OUT = {"help", "print_config", "print_shtab"}  # they say something and end
# where to write
ELSEWHERE = {"run_dir", "logs", "experiment", "to", "output", "runs", "directory", "default_root_dir", "dirpath"}
SHARDS = {
    "class_path": "TokenShards",
    "init_args": {"corpus": "FOLDER/text.jsonl", "directory": "FOLDER/shards", "vocabulary": 300, "length": 8}
    | {"batch_size": 2, "prepare_workers": 1},
}
# a message may use the name of what an option becomes part of
ALIASES = {
    "max_time": ("Timer",),
    **dict.fromkeys(("r1", "r2", "r3", "r4"), ("strength", "rate", "exponent", "factor")),
}
# how our own lines say what is expected, and how Lightning's and the parser's do
EXPECTED = re.compile(
    "[Ee]xpected|[Mm]ust|should|is not|is no|cannot|needs|name another|does not exist|[Aa]llowed|not supported"
    "|: You |can be |can only be |Possible choices are|use any of|was prepared otherwise"
)
REQUIRED = {
    "Extrapolation": {"lengths": [8]},
    "PositionWisePerplexity": {"length": 8},
    "EarlyStopping": {"monitor": "train/loss"},
    "LongPerplexity": {"lengths": [8], "short": 4, "stride": 2},
}


@dataclass(frozen=True)
class Option:
    """One to be walked: the line before it, its flag (without dashes: a place in the line), what is in ``CONFIG``."""

    line: tuple[str, ...]
    flag: str
    config: dict[str, Any] = field(default_factory=lambda: TINY, hash=False)
    afresh: tuple[str, ...] = ()  # folders that each case has to find missing

    @property
    def name(self) -> str:
        return self.flag.strip("-+").rpartition(".")[2]


def parser_of(*line: str, command: str | None = None) -> ArgumentParser:
    parser = capture_parser(lambda: main(list(line)))
    return parser._subcommands_action.choices[command] if command else parser


def flags(parser: ArgumentParser) -> list[str]:
    """The long names of a parser's own options."""
    found = [max(action.option_strings, key=len) for action in parser._actions if action.option_strings]
    return [
        flag
        for flag in found
        if flag.lstrip("-") not in LEFT_OUT and not flag.endswith(".help") and "-->" not in flag  # a link is no option
    ]


def with_data(**options: Any) -> dict[str, Any]:
    return TINY | {"data": TINY["data"] | {"init_args": TINY["data"]["init_args"] | options}}


def below(classes: dict[type, tuple[type, ...]], line: tuple[str, ...]) -> Iterator[Option]:
    """Options of the classes that may stand in a fit's configuration, given beside it on the command line."""
    for name in options(TaskData):
        yield Option(line, f"--data.{name}")
    for name in options(TokenShards):
        yield Option(line, f"--data.{name}", TINY | {"data": SHARDS, "trainer": TINY["trainer"] | {"callbacks": []}})
    for strategy in classes[Position]:
        places = {"class_path": "Addition", "init_args": {"order": "reversed"}}  # a task that tells places
        config = with_data(task=places, length=32)
        config |= {"model": TINY["model"] | {"position": strategy.__name__}}
        for name in list(options(strategy))[1:]:
            yield Option(line, f"--model.position.{name}", config)
    for task in classes[Task]:
        for name in options(task):
            config = with_data(task={"class_path": task.__name__}, length=256)
            yield Option(line, f"--data.task.{name}", config)
    for callback in classes[Callback]:
        given = {"class_path": callback.__name__, "init_args": REQUIRED.get(callback.__name__, {})}
        shown = {"enable_progress_bar": True, "enable_model_summary": True, "callbacks": [given]}
        config = TINY | {"trainer": TINY["trainer"] | shown}
        config |= {} if callback.__name__ == "TaskAccuracy" else {"data": SHARDS}
        for name in options(callback):
            yield Option(line, f"--trainer.callbacks.{name}", config)


def outcome(option: Option, value: str, folder: Path, capsys: pytest.CaptureFixture[str]) -> tuple[str, str]:
    """What became of one case: "ran", "refused", or what is wrong with it, and the line."""
    trainer = option.config.get("trainer", {}) | {"max_time": "00:00:00:02"}
    config = option.config | {"trainer": trainer} if "trainer" in option.config else option.config
    for left in option.afresh:
        shutil.rmtree(folder / left, ignore_errors=True)
    (folder / "walk.yaml").write_text(yaml.safe_dump(config).replace("FOLDER", str(folder)))
    line = [part.replace("CONFIG", f"{folder}/walk.yaml").replace("FOLDER", str(folder)) for part in option.line]
    capsys.readouterr()
    try:
        main([*line, f"{option.flag}={VALUES[value]}" if option.flag.startswith("-") else VALUES[value]])
    except SystemExit as ended:
        lines = [line for line in capsys.readouterr().err.splitlines() if "rror: " in line]
        if ended.code in (0, 1) and not lines:  # 1: `check` found a property that does not hold
            return "ran", ""
        if ended.code != 2 or len(lines) != 1 or not lines[0].startswith("error: "):
            return "no line", f"{ended.code} {lines}"
        return judged(option, VALUES[value], lines[0])
    except BaseException as error:
        return "traceback", f"{type(error).__name__}: {str(error)[:200]}"
    return "ran", ""


def judged(option: Option, value: str, line: str) -> tuple[str, str]:
    """Whether a line names the option and says what was given and what is expected."""
    if not any(name in line for name in (option.name, *ALIASES.get(option.name, ()))):
        return "not named", line
    given = re.sub(r"\W", "", value)
    if given not in re.sub(r"\W", "", line):
        return "not said what was given", line
    if not EXPECTED.search(line):
        return "not said what is expected", line
    return "refused", line


def walk(cases: list[tuple[Option, str]], folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Try cases, print how many came to what, fail with those that came to neither end or wrote where they stood."""
    counts: Counter[str] = Counter()
    wrong = []
    for option, value in cases:
        became, line = outcome(option, value, folder, capsys)
        counts[became] += 1
        written = sorted(path.name for path in Path().iterdir())
        stray = f"wrote {written}" if written and option.name not in ELSEWHERE else ""
        if stray or became not in ("ran", "refused"):
            wrong.append(f"{option.line[0]} {option.flag}={VALUES[value]}: {stray} {became}: {line}")
            with capsys.disabled():  # at once, since all of them take an hour
                print(wrong[-1], flush=True)
        for name in written:
            shutil.rmtree(name, ignore_errors=True)
            Path(name).unlink(missing_ok=True)
    with capsys.disabled():
        print(f"\noptions walked: {len({(o.line[0], o.flag) for o, _ in cases})}, cases: {dict(counts)}")
    assert not wrong, "\n".join(wrong)

"""Every option of every command, given a zero, a negative, a huge, a NaN, an empty and a wrong-typed value.

What has to come of it is a run that works, or one line with the option, what was given and what is expected.
`make test` tries a part of the cases, `make test-slow` all of them; each says how many.
"""

from collections.abc import Callable, Iterator
from itertools import islice
from pathlib import Path
from typing import Any

import pytest

import kerple.cli.check
import kerple.cli.run_comparison
from kerple.base.signatures import options
from kerple.cli.allowed_classes import offer
from kerple.cli.main import COMMANDS, main
from kerple.data.datamodule import TokenShards
from kerple.positions import KerpleLog, Position
from kerple.tasks import TaskData
from kerple.testing import outcomes
from tests.cli.tiny import fit
from tests.cli.walk import SHARDS, VALUES, Option, below, flags, parser_of, walk

Walk = Callable[[list[tuple[Option, str]]], None]
CHECKPOINT = "--ckpt_path=FOLDER/run/checkpoints/last.ckpt"
COMPARISON: dict[str, Any] = {
    "name": "walked",
    "base": ["FOLDER/tiny.yaml"],
    "strategies": {"NoPE": {}, "ALiBi": {}},
    "seeds": [1, 2],
    "baseline": "NoPE",
    "runs": "FOLDER/runs",
    "output": "FOLDER/report",
}


def of_fit() -> Iterator[Option]:
    line = ("fit", "--config=CONFIG", "--run_dir=FOLDER/fit")
    for flag in flags(parser_of("fit", command="fit")):
        yield Option(line, flag)
    yield from below(offer().classes, line)


def of_a_checkpoint(command: str, *more: str) -> Iterator[Option]:
    line = (command, CHECKPOINT, f"--run_dir=FOLDER/{command}")
    for flag in (*flags(parser_of("fit", command=command)), *more):
        yield Option(line, flag)
    yield from (Option(line, f"--data.{name}") for name in options(TaskData))
    yield from (Option(line, f"--model.position.{name}") for name in list(options(KerpleLog))[1:])


def of_predict() -> Iterator[Option]:
    line = ("predict", CHECKPOINT, "--prompt=ab=", "--tokens=3")
    return (Option(line, flag) for flag in flags(parser_of("predict")))


def of_export() -> Iterator[Option]:
    line = ("export", CHECKPOINT, "--to=FOLDER/exported")
    return (Option(line, flag, afresh=("exported",)) for flag in flags(parser_of("export")))


def of_prepare() -> Iterator[Option]:
    line = ("prepare", "--config=CONFIG")
    for flag in (*flags(parser_of("prepare")), *(f"--data.{name}" for name in options(TokenShards))):
        yield Option(line, flag, {"data": SHARDS}, afresh=("shards",))


def of_inspect() -> Iterator[Option]:
    yield Option(("inspect",), "directory")
    for flag in flags(parser_of("inspect", "somewhere")):
        yield Option(("inspect", "FOLDER/kept"), flag)


def of_plan() -> Iterator[Option]:
    line = ("plan", "--config=CONFIG")
    for flag in flags(parser_of("plan")):
        yield Option(line, flag)
    yield from (Option(line, f"--model.position.{name}") for name in list(options(KerpleLog))[1:])


def of_check() -> Iterator[Option]:
    yield Option(("check",), "--model.position")
    for strategy in offer().classes[Position]:
        for name in list(options(strategy))[1:]:
            yield Option(("check", f"--model.position={strategy.__name__}"), f"--model.position.{name}")


def of_compare() -> Iterator[Option]:
    for flag in flags(parser_of("compare")):
        yield Option(("compare", "--config=CONFIG"), flag, COMPARISON, afresh=("runs", "report"))
    line = ("compare", "--report_only", "--directories=FOLDER/run", "--baseline=KerpleLog", "--output=FOLDER/report")
    for flag in flags(parser_of("compare", "--directories=.")):
        yield Option(line, flag, afresh=("report",))


WALKS: dict[str, Callable[[], Iterator[Option]]] = {
    "fit": of_fit,
    "test": lambda: of_a_checkpoint("test", "--hf"),
    "validate": lambda: of_a_checkpoint("validate"),
    "predict": of_predict,
    "export": of_export,
    "prepare": of_prepare,
    "inspect": of_inspect,
    "plan": of_plan,
    "check": of_check,
    "compare": of_compare,
}


def cases(command: str) -> list[tuple[Option, str]]:
    return [(option, value) for option in WALKS[command]() for value in VALUES]


@pytest.fixture
def walking(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Walk:
    """A checkpoint and shards to walk with; comparisons go as far as the first run, checks as far as the first."""
    documents = [f'{{"text": "words and numbers, {number}"}}\n' for number in range(400)]  # of all splits
    (tmp_path / "text.jsonl").write_text("".join(documents))
    fit(tmp_path, "--data.vocabulary=82")  # what it writes is to be text
    main(["test", f"--ckpt_path={tmp_path}/run/checkpoints/last.ckpt"])
    given = SHARDS["init_args"] | {"corpus": f"{tmp_path}/text.jsonl", "directory": f"{tmp_path}/kept"}
    TokenShards(**given).prepare_data()
    nothing = dict.fromkeys(("local", "ray"), lambda work, parallel: (one for one in ()))
    monkeypatch.setattr(kerple.cli.run_comparison, "ENGINES", nothing)
    monkeypatch.setattr(kerple.cli.run_comparison, "_report", lambda comparison, work: None)
    monkeypatch.setattr(kerple.cli.check, "outcomes", lambda build: islice(outcomes(build), 1))
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    return lambda cases: walk(cases, tmp_path, capsys)


def test_every_command_is_walked() -> None:
    assert WALKS.keys() | {"lm_eval"} == COMMANDS.keys()  # the harness reads its own command line


def test_a_part_of_the_options(walking: Walk) -> None:
    walking([case for command in WALKS for case in cases(command)][::199])


@pytest.mark.slow
@pytest.mark.timeout(6000)
@pytest.mark.parametrize("command", WALKS)
def test_all_options(command: str, walking: Walk) -> None:
    walking(cases(command))

"""Every option of `fit` with values that are not what it is for: a run that works, or one line that names it.

The options are those of the parser itself and of the signatures of all classes that may stand in it; every case is a
real run of one step, in this process. `make test` does a part of it, `make test-slow` all.
"""

from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from jsonargparse import ArgumentParser, capture_parser
from pytorch_lightning import Callback

from kerple.cli.main import main
from kerple.cli.offered import offer
from kerple.positions import Position
from kerple.runs.signatures import options
from kerple.tasks import Task, TaskData
from tests.cli.tiny import TINY

VALUES = {"zero": "0", "negative": "-1", "huge": str(10**15), "nan": ".nan", "empty": "", "wrong type": "[{a: b}]"}
# what would write beside the folder of the test, start processes or ask for a machine that is not here
LEFT_OUT = {"config", "help", "run_dir", "print_config", "logs", "experiment", "trust", "hf", "weights"}
SHARDS = {
    "class_path": "TokenShards",
    "init_args": {"corpus": "FOLDER/text.jsonl", "directory": "FOLDER/shards", "vocabulary": 300, "length": 8}
    | {"batch_size": 2, "prepare_workers": 1},
}
ALIASES = {
    "max_time": ("Timer",),
    **dict.fromkeys(("r1", "r2", "r3", "r4"), ("strength", "rate", "exponent", "factor")),
}
REQUIRED = {
    "Extrapolation": {"lengths": [8]},
    "PositionWisePerplexity": {"length": 8},
    "EarlyStopping": {"monitor": "train/loss"},
    "LongPerplexity": {"lengths": [8], "short": 4, "stride": 2},
}


def subparser() -> ArgumentParser:
    parser = capture_parser(lambda: main(["fit"]))
    return parser._subcommands_action.choices["fit"]


def walked() -> Iterator[tuple[str, str, dict[str, Any]]]:
    """Option on the command line, what a message has to name, and the configuration it is tried in."""
    kinds = offer().classes
    for action in subparser()._actions:
        name = action.dest
        if name.split(".")[0] in LEFT_OUT or name in (
            "data",
            "model",
            "trainer",
            "model.position",
            "trainer.callbacks",
        ):
            continue
        if "." in name or name in ("seed_everything", "ckpt_path", "weights_only", "auto_precision"):
            yield f"--{name}", name.rpartition(".")[2], TINY
    for name in options(TaskData):
        yield f"--data.{name}", name, TINY
    for strategy in kinds[Position]:
        data = TINY["data"]["init_args"] | {"task": {"class_path": "Addition"}, "length": 32}
        changed = TINY | {"model": TINY["model"] | {"position": strategy.__name__}}
        changed |= {"data": TINY["data"] | {"init_args": data}}
        for name in list(options(strategy))[1:]:
            yield f"--model.position.{name}", name, changed
    for task in kinds[Task]:
        data = TINY["data"]["init_args"] | {"task": {"class_path": task.__name__}, "length": 256}
        changed = TINY | {"data": TINY["data"] | {"init_args": data}}
        for name in options(task):
            yield f"--data.task.{name}", name, changed
    for callback in kinds[Callback]:
        for name in options(callback):
            given = {"class_path": callback.__name__, "init_args": REQUIRED.get(callback.__name__, {})}
            shown = {"enable_progress_bar": True, "enable_model_summary": True}
            changed = TINY | {"trainer": TINY["trainer"] | shown | {"callbacks": [given]}}
            changed |= {} if callback.__name__ == "TaskAccuracy" else {"data": SHARDS}
            yield f"--trainer.callbacks.{name}", name, changed


CASES = [(option, word, config, value) for option, word, config in walked() for value in VALUES]


def outcome(
    option: str, word: str, config: dict[str, Any], value: str, folder: Path, capsys: pytest.CaptureFixture[str]
) -> tuple[str, str]:
    """What became of one case: "ran", "refused", or what is wrong with it, and the line."""
    trainer = config["trainer"] | {"max_time": "00:00:00:02"}
    text = yaml.safe_dump(config | {"trainer": trainer}).replace("FOLDER", str(folder))
    (folder / "walk.yaml").write_text(text)
    capsys.readouterr()
    try:
        main(["fit", f"--config={folder}/walk.yaml", f"--run_dir={folder}/run", f"{option}={VALUES[value]}"])
    except SystemExit as ended:
        lines = [line for line in capsys.readouterr().err.splitlines() if line.startswith("error: ")]
        if ended.code != 2 or len(lines) != 1:
            return "no line", f"{ended.code} {lines}"
        named = [word, *ALIASES.get(word, ())]
        return ("refused", lines[0]) if any(name in lines[0] for name in named) else ("not named", lines[0])
    except BaseException as error:
        return "traceback", f"{type(error).__name__}: {str(error)[:200]}"
    return "ran", ""


def walk(cases: list[Any], folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    (folder / "here").mkdir()
    (folder / "text.jsonl").write_text('{"text": "words and numbers, 1 2 3"}\n{"text": "more of both, 4 5 6"}\n' * 200)
    monkeypatch.chdir(folder / "here")
    counts: Counter[str] = Counter()
    wrong = []
    for option, word, config, value in cases:
        became, line = outcome(option, word, config, value, folder, capsys)
        counts[became] += 1
        if became not in ("ran", "refused"):
            wrong.append(f"{option}={VALUES[value]}: {became}: {line}")
    with capsys.disabled():
        print(f"\noptions walked: {len({case[0] for case in cases})}, cases: {dict(counts)}")
    assert not wrong, "\n".join(wrong)
    assert not list((folder / "here").iterdir())  # a run writes where it is told


def test_a_part_of_the_options(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    # not those of strategies: where one is itself a strategy, the parser's message does not name it yet
    walk([c for c in CASES if not c[0].startswith("--model.position.")][::41], tmp_path, monkeypatch, capsys)


@pytest.mark.slow
@pytest.mark.parametrize("part", range(8))
def test_all_options(
    part: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    walk(CASES[part::8], tmp_path, monkeypatch, capsys)

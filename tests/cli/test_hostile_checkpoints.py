"""A stranger's checkpoint runs nothing, opens nothing and writes nothing: each way in that was found, and its kin."""

import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml

from kerple.cli.main import main
from tests.cli.tiny import TINY, fit

Config = dict[str, Any]


@pytest.fixture(scope="module")
def genuine(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return fit(tmp_path_factory.mktemp("genuine"))


@pytest.fixture
def stranger(genuine: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., list[str]]]:
    """Changes the genuine checkpoint's configuration; gives the option that names the result."""
    (tmp_path / "here").mkdir()
    (tmp_path / "kept").mkdir()
    (tmp_path / "kept" / "thesis.txt").write_text("years of work")
    monkeypatch.chdir(tmp_path / "here")

    def change(change: Callable[[Config, Path], object]) -> list[str]:
        content = torch.load(genuine, weights_only=True)
        config = yaml.safe_load(content["config"])
        change(config, tmp_path)
        content.pop("sha256", None)
        torch.save({**content, "config": yaml.safe_dump(config)}, tmp_path / "here" / "theirs.ckpt")
        return ["--ckpt_path", "theirs.ckpt"]

    yield change
    assert (tmp_path / "kept" / "thesis.txt").exists()
    assert {path.name for path in tmp_path.iterdir()} <= {"here", "kept", "hub", "weights.pt"}  # what the tests wrote
    assert len(list((tmp_path / "kept").iterdir())) == 1


def callback(class_path: str, **options: Any) -> Callable[[Config, Path], object]:
    return lambda config, folder: config["trainer"]["callbacks"].append(
        {"class_path": class_path, "init_args": {k: str(v).format(folder=folder) for k, v in options.items()}}
    )


def position(class_path: Any, **options: Any) -> Callable[[Config, Path], object]:
    given = {"class_path": class_path, "init_args": options} if options else class_path
    return lambda config, folder: config["model"].update(
        position=yaml.safe_load(yaml.safe_dump(given).replace("{folder}", str(folder)))
    )


def data(**options: Any) -> Callable[[Config, Path], object]:
    return lambda config, folder: config["data"]["init_args"].update(options)


def hub(config: Config, folder: Path) -> None:
    (folder / "hub").mkdir()
    (folder / "hub" / "hubconf.py").write_text(f"open({str(folder / 'ran')!r}, 'w')\ndef f(*a): pass")
    options = {"repo_or_dir": str(folder / "hub"), "model": "f", "source": "local"}
    config["model"]["position"] = {"class_path": "torch.hub.load", "init_args": options}


def weights(config: Config, folder: Path) -> None:
    torch.save({"a": 1}, folder / "weights.pt")
    options = {"url": f"file://{folder}/weights.pt", "model_dir": f"{folder}/opened"}
    config["model"]["position"] = {"class_path": "torch.hub.load_state_dict_from_url", "init_args": options}


def further(config: Config, folder: Path) -> None:
    Path("more.yaml").write_text(
        yaml.safe_dump({"class_path": "os.system", "init_args": {"command": f"touch {folder}/ran"}})
    )
    config["model"]["position"] = "more.yaml"


RUN = {"command": "touch {folder}/ran"}
WAYS_IN = {
    "a module's own import, as a callback": callback("torch.serialization.os.system", **RUN),
    "a module's own import, as a strategy": position("torch.serialization.os.system", **RUN),
    "our own module's import": position("kerple.cli.lightning.os.system", **RUN),
    "a process": position("kerple.base.signals.subprocess.getoutput", cmd="touch {folder}/ran"),
    "a package of functions": position("kerple.training.bolts.sys.modules", x=1),
    "a hub on this disk": hub,
    "weights from a URL": weights,
    "a function as an option": callback("pytorch_lightning.callbacks.LambdaCallback", on_test_start="shutil.rmtree"),
    "a function as text": callback("pytorch_lightning.callbacks.LambdaCallback", setup="os.system"),
    "a function of ours": position("kerple.base.atomic.write", path="{folder}/kept/thesis.txt"),
    "an abstract class of ours": position("kerple.positions.base.Position"),
    "a class of another kind": position("kerple.callbacks.LastCheckpoint"),
    "a strategy as data": lambda config, folder: config.update(data="kerple.positions.RoPE"),
    "a file of configuration": further,
    "configuration as text": position("{class_path: os.system, init_args: {command: touch {folder}/ran}}"),
    "a key with dots": lambda config, folder: config["model"].update(
        {"position.class_path": "os.system", "position.init_args.command": f"touch {folder}/ran"}
    ),
    "a key of the parser": lambda config, folder: config["model"].update(__path__="evil"),
    "a class within options": data(task={"class_path": "os.system", "init_args": {"command": "true"}}),
    "a class within a class": data(
        task={"class_path": "Copy", "init_args": {"symbols": {"class_path": "os.system", "init_args": {"command": ""}}}}
    ),
    "a class within a list": data(test_lengths=[{"class_path": "os.getcwd"}]),
    "a class within a strategy": position(
        "RandomizedPositions", position={"class_path": "os.system", "init_args": {"command": "touch {folder}/ran"}}
    ),
    "a strategy's function within a strategy": position("RandomizedPositions", position="torch.hub.help"),
    "further options": lambda config, folder: config["data"].update(dict_kwargs={"x": "os.system"}),
    "a relative name": position("..os.system", command="true"),
    "a name that is none": position("kerple.positions.RoPE; import os", command="true"),
    "an option that is not there": callback("ModelCheckpoint", hook="os.system"),
    "bytes": data(length=b"8"),
    "a date": data(length=yaml.safe_load("2001-01-01")),
    "callbacks that are none": lambda config, folder: config["trainer"].update(callbacks="os.system"),
    "a precision that is a class": lambda config, folder: config["trainer"].update(
        precision={"class_path": "os.getcwd"}
    ),
    "an experiment that is a class": lambda config, folder: config.update(experiment={"class_path": "os.getcwd"}),
}


@pytest.mark.parametrize("way", WAYS_IN)
@pytest.mark.parametrize("command", ["test", "predict"])
def test_nothing_is_let_in(
    command: str, way: str, stranger: Callable[..., list[str]], capsys: pytest.CaptureFixture[str]
) -> None:
    options = stranger(WAYS_IN[way])
    before = set(os.listdir())
    with pytest.raises(SystemExit) as ended:
        main([command, *options, *(["--prompt=ab="] if command == "predict" else [])])
    assert ended.value.code == 2
    (line,) = [line for line in capsys.readouterr().err.splitlines() if "rror" in line]
    assert line.startswith("error: ckpt_path: theirs.ckpt")
    assert set(os.listdir()) == before


def test_an_endless_configuration_is_no_configuration(
    stranger: Callable[..., list[str]], capsys: pytest.CaptureFixture[str]
) -> None:
    """Ten lines of aliases that stand for 10^9 values."""

    def laugh(config: Config, folder: Path) -> None:
        value: list[Any] = ["ha"] * 10
        for _ in range(8):
            value = [value] * 10
        config["data"]["init_args"]["test_lengths"] = value

    with pytest.raises(SystemExit):
        main(["test", *stranger(laugh)])
    assert "theirs.ckpt is not a checkpoint" in capsys.readouterr().err


def shards(config: Config, folder: Path) -> None:
    text = folder / "here" / "text.jsonl"
    text.write_text('{"text": "some text, in a file of theirs, with words and words"}\n' * 200)
    options = {"corpus": str(text), "directory": str(folder / "kept" / "shards"), "vocabulary": 300, "length": 8}
    config["data"] = {"class_path": "kerple.data.TokenShards", "init_args": options}


def test_shards_are_not_written_where_a_checkpoint_says(
    stranger: Callable[..., list[str]], capsys: pytest.CaptureFixture[str]
) -> None:
    options = stranger(shards)
    with pytest.raises(SystemExit):
        main(["test", *options, "--trainer.callbacks=[]"])
    assert "kept/shards" in capsys.readouterr().err


def test_other_files_are_not_written_where_a_checkpoint_says(
    stranger: Callable[..., list[str]], tmp_path: Path
) -> None:
    def change(config: Config, folder: Path) -> None:
        callback("ModelCheckpoint", dirpath="{folder}/kept/checkpoints")(config, folder)

    main(["test", *stranger(change)])
    assert {path.name for path in (tmp_path / "here").iterdir()} == {"theirs.ckpt", "test"}


def test_a_resumed_run_removes_no_file_that_a_checkpoint_names(genuine: Path, tmp_path: Path) -> None:
    """Best checkpoints of before are removed when there are better ones; a checkpoint says what they were called."""
    victims = [tmp_path / "thesis.txt", tmp_path / "folder" / "thesis.txt"]
    for victim in victims:
        victim.parent.mkdir(exist_ok=True)
        victim.write_text("years of work")
    run = tmp_path / "run"
    folder = run / "checkpoints"
    for named in (f"{folder}/../../thesis.txt", f"local://{tmp_path}/folder", f"{folder}/../../folder/thesis.txt"):
        content = torch.load(genuine, weights_only=True)
        content.pop("sha256", None)
        state = {"best_model_score": torch.tensor(99.0), "best_model_path": named, "current_score": torch.tensor(99.0)}
        state |= {"best_k_models": {named: torch.tensor(99.0)}, "kth_best_model_path": named, "last_model_path": named}
        state |= {"kth_value": torch.tensor(99.0)}
        key = (
            "ModelCheckpoint{'monitor': 'val/loss', 'mode': 'min', 'every_n_train_steps': 0, 'every_n_epochs': 1, "
            "'train_time_interval': None}"
        )
        content["callbacks"][key] = state
        torch.save(content, tmp_path / "theirs.ckpt")
        best = [{"class_path": "ModelCheckpoint", "init_args": {"monitor": "val/loss"}}]
        config = TINY | {"trainer": TINY["trainer"] | {"max_steps": 3, "limit_val_batches": 1, "callbacks": best}}
        (tmp_path / "more.yaml").write_text(yaml.safe_dump(config))
        options = [f"--config={tmp_path}/more.yaml", f"--run_dir={run}", f"--ckpt_path={tmp_path}/theirs.ckpt"]
        main(["fit", *options])
        assert (folder / "last.ckpt").exists()
        assert all(victim.exists() for victim in victims), named

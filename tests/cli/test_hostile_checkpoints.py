"""A hostile checkpoint runs no code, and opens and writes no other files."""

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml

from kerple.cli.main import main
from tests.cli.tiny import TINY, complaint

Config = dict[str, Any]


@pytest.fixture
def hostile_options(genuine, tmp_path, monkeypatch):
    """A function that changes the configuration of a checkpoint and returns the option with its path."""
    for name in ("here", "kept", "hostile"):
        (tmp_path / name).mkdir()
    (tmp_path / "kept" / "thesis.txt").write_text("years of work")
    run = {"class_path": "os.system", "init_args": {"command": f"touch {tmp_path}/ran"}}
    (tmp_path / "hostile" / "more.yaml").write_text(yaml.safe_dump(run))
    monkeypatch.chdir(tmp_path / "here")

    def change(change: Callable[[Config, Path], object]) -> list[str]:
        content = torch.load(genuine, weights_only=True)
        change(content["config"], tmp_path)
        torch.save(content, tmp_path / "here" / "theirs.ckpt")
        return ["--ckpt_path", "theirs.ckpt"]

    yield change
    assert {path.name for path in tmp_path.iterdir()} == {"here", "kept", "hostile"}
    assert [path.name for path in (tmp_path / "kept").iterdir()] == ["thesis.txt"]


def position(class_path: Any, **options: Any) -> Callable[[Config, Path], object]:
    text = yaml.safe_dump({"class_path": class_path, "init_args": options} if options else class_path)
    return lambda config, folder: config["model"].update(position=yaml.safe_load(text.replace("{folder}", str(folder))))


RUN = {"command": "touch {folder}/ran"}
SYSTEM = {"class_path": "os.system", "init_args": RUN}
ATTACKS = {
    "a module's own import": position("torch.serialization.os.system", **RUN),
    "a function of this package": position("kerple.base.atomic.write", path="{folder}/kept/thesis.txt"),
    "a file of configuration": position("../hostile/more.yaml"),
    "a class of another kind": position("LastCheckpoint"),
    "a strategy as data": lambda config, folder: config.update(data="kerple.positions.RoPE"),
    "a precision that is a class": lambda config, folder: config["trainer"].update(precision={"class_path": "os.abc"}),
    "a key with dots": lambda config, folder: config["model"].update({"position.class_path": "os.system"}),
    "a class within options": lambda config, folder: config["data"]["init_args"].update(task=SYSTEM),
    "a class within a strategy": position("RandomizedPositions", position=SYSTEM),
}


@pytest.mark.parametrize("attack", ATTACKS)
def test_hostile_configurations_are_refused(attack, hostile_options, capsys):
    options, before = hostile_options(ATTACKS[attack]), set(os.listdir())
    for command in (["test"], ["predict", "--prompt=ab="]):
        assert complaint(capsys, *command, *options)
    assert set(os.listdir()) == before


def test_loggers_and_libraries_callbacks_in_a_checkpoint_are_left_out(hostile_options):
    def change(config: Config, folder: Path) -> None:
        config["trainer"]["logger"] = {"class_path": "os.system", "init_args": {"command": f"touch {folder}/ran"}}
        options = {"LambdaCallback": {"on_test_start": "os.system"}, "ModelCheckpoint": {"dirpath": f"{folder}/kept/a"}}
        nodes = [{"class_path": f"pytorch_lightning.{name}", "init_args": options[name]} for name in options]
        config["trainer"]["callbacks"] += nodes

    main(["test", *hostile_options(change)])
    assert set(os.listdir()) == {"theirs.ckpt", "test"}


def test_shards_are_not_written_to_a_folder_that_a_checkpoint_names(hostile_options):
    def change(config: Config, folder: Path) -> None:
        (folder / "here" / "text.jsonl").write_text('{"text": "words of theirs, and words and words"}\n' * 200)
        options = {"corpus": "text.jsonl", "directory": f"{folder}/kept/shards", "vocabulary": 300, "length": 8}
        config["data"] = {"class_path": "kerple.data.TokenShards", "init_args": options}

    with pytest.raises(SystemExit):
        main(["test", *hostile_options(change), "--trainer.callbacks=KernelCurves"])


@pytest.mark.slow
def test_a_resumed_run_removes_no_file_that_a_checkpoint_names(genuine, tmp_path):
    """A resumed run removes an earlier best checkpoint after a better one. The checkpoint contains its path."""
    victim, run = tmp_path / "folder" / "thesis.txt", tmp_path / "run"
    victim.parent.mkdir()
    victim.write_text("years of work")
    best = [{"class_path": "ModelCheckpoint", "init_args": {"monitor": "val/loss"}}]
    trainer = TINY["trainer"] | {"max_steps": 3, "limit_val_batches": 1, "callbacks": best}
    (tmp_path / "more.yaml").write_text(yaml.safe_dump(TINY | {"trainer": trainer}))
    for named in (f"{run}/checkpoints/../../folder/thesis.txt", f"local://{tmp_path}/folder"):
        content = torch.load(genuine, weights_only=True)
        state = dict.fromkeys(("best_model_score", "current_score", "kth_value"), score := torch.tensor(99.0))
        paths = dict.fromkeys(("best_model_path", "kth_best_model_path", "last_model_path"), named)
        state |= paths | {"best_k_models": {named: score}}
        options = "'every_n_train_steps': 0, 'every_n_epochs': 1, 'train_time_interval': None"
        content["callbacks"][f"ModelCheckpoint{{'monitor': 'val/loss', 'mode': 'min', {options}}}"] = state
        content["config"]["trainer"]["max_steps"] = 3
        torch.save(content, tmp_path / "theirs.ckpt")
        main(["fit", f"--config={tmp_path}/more.yaml", f"--output={run}", f"--ckpt_path={tmp_path}/theirs.ckpt"])
        assert (run / "checkpoints" / "last.ckpt").exists()
        assert victim.exists(), named

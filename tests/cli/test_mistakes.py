"""Mistakes that a user made once: each is one line with the option, what was given and what is expected."""

import multiprocessing
import os
import resource
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml

from kerple.base.errors import UserError
from kerple.cli.main import main
from kerple.cli.resolve import prepare
from kerple.training import provenance
from tests.cli.tiny import TINY, fit

FORK = multiprocessing.get_context("fork")
SHARDS = {"class_path": "TokenShards", "init_args": {"corpus": "text.jsonl", "directory": "shards", "vocabulary": 300}}


@pytest.fixture(scope="module")
def genuine(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return fit(tmp_path_factory.mktemp("genuine"))


def complaint(capsys: pytest.CaptureFixture[str], *arguments: object) -> str:
    with pytest.raises(SystemExit) as ended:
        main([str(argument) for argument in arguments])
    assert ended.value.code == 2
    return only_line(capsys.readouterr().err)


def only_line(said: str) -> str:
    (line,) = [line for line in said.splitlines() if line.startswith("error: ")]
    return line


def config(folder: Path, **sections: Any) -> str:
    (folder / "walk.yaml").write_text(yaml.safe_dump(TINY | sections))
    return f"--config={folder}/walk.yaml"


@pytest.mark.parametrize(
    ("option", "said"),
    [
        ("--data.length=0", "data.length: got 0, expected a number from 1 to"),
        ("--data.length=-4", "data.length: got -4, expected a number from 1 to"),
        ("--data.batch_size=0", "data.batch_size: got 0, expected a number from 1 to"),
        ("--data.seed=-3", "data.seed: got -3, expected a number from 0 to"),
        ("--model.betas=[2,3]", "model.betas: got 2.0, expected a number from 0 to 1"),
        ("--model.adam_eps=-1", "model.adam_eps: got -1.0, expected a number from 0 to 1"),
        ("--model.eps=-1", "model.eps: got -1.0, expected a number from 0 to 1"),
        ("--model.weight_decay=-1", "model.weight_decay: got -1.0, expected a number from 0 to"),
        ("--model.hidden=0", "model.hidden: got 0, expected a number from 1 to"),
        ("--seed_everything=-3", "seed_everything: got -3, expected a number from 0 to"),
        ("--trainer.overfit_batches=1", "trainer.overfit_batches: got 1, expected 0"),
        ("--trainer.max_steps=-7", "trainer.max_steps: got -7, expected a number from 1 to"),
        ("--model.layers=two", "model.layers: got 'two', expected a whole number"),
        ("--model.position.floor=[{a: b}]", "model.position.floor: got '[{a: b}]', expected a number"),
        ("--model.optimizer=sgd", "model.optimizer: got 'sgd', expected one of 'adamw', 'muon'"),
        ("--trainer.max_epochs=x", "trainer.max_epochs: got 'x', expected a whole number or null"),
        ("--trainer.accelerator=[{a: b}]", "trainer.accelerator: got [{'a': 'b'}], expected a single value"),
        ("--data.task.symbols=1000000000000000", "data.task.symbols: got 1000000000000000, expected a number up to 16"),
    ],
)
def test_an_option_of_fit(option: str, said: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert said in complaint(capsys, "fit", config(tmp_path), f"--run_dir={tmp_path}/run", option)
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--model.position=my_gaus.X"], "model.position: got 'my_gaus.X', which cannot be imported (No module named "),
        (
            ["--model.position=kerple.training.language_model.X"],
            "(module 'kerple.training.language_model' has no attribute 'X'); expected a class by the path",
        ),
        (
            ["--model.position=ALiBi", "--model.position.slop=3"],
            "position.slop: got '3', but ALiBi has no option slop; expected ",
        ),
        (
            ["--model.position=Layers", "--model.position.near=RoPE", "--model.position.near.bse=3"],
            "model.position.near.bse: got '3', but RoPE has no option bse; expected base, ",
        ),
        (
            ["--model.position=Layers", "--model.position.near=my_gaus.X"],
            "model.position.near: got 'my_gaus.X', which cannot be imported",
        ),
        (
            ["--trainer.callbacks+=kerple.training.language_model.TopOn"],
            "trainer.callbacks+: got 'kerple.training.language_model.TopOn', which cannot be imported",
        ),
        (
            ["--trainer.callbacks+=top.One"],
            "trainer.callbacks+: got 'top.One', which cannot be imported (No module named",
        ),
        (
            ["--trainer.callbacks+=kerple.training.language_model.LanguageModel"],
            "expected the name of a Callback or null",
        ),
        (
            ["--trainer.callbacks+=ShiftTest", "--trainer.callbacks.block=3"],
            "trainer.callbacks.block: got '3', but ShiftTest has no option block; expected ",
        ),
        (
            ["--model.position=Coupled", "--model.position.position=[{a: b}]"],
            "model.position.position: got [{'a': 'b'}], expected a single value",
        ),
        (["--trainer.callbacks+=Timer", "--trainer.callbacks.verbose=x"], "verbose: got 'x', expected true or false"),
        (["--data.lenght=3"], "data.lenght: got '3', but TaskData has no option lenght; expected task, length, "),
    ],
)
def test_a_class_or_an_option_of_a_class_that_is_not_there(
    arguments: list[str], said: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert said in complaint(capsys, "fit", config(tmp_path), f"--run_dir={tmp_path}/run", *arguments)


@pytest.mark.parametrize(
    ("position", "said"),
    [
        ({"class_path": "my_gaus.X"}, "model.position: got 'my_gaus.X', which cannot be imported (No module named"),
        ({"class_path": "ALiBi", "init_args": {"slop": 3}}, "model.position.slop: ALiBi has no option slop; expected "),
    ],
)
def test_a_file_that_names_a_class_or_an_option_that_is_not_there(
    position: Any, said: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model = TINY["model"] | {"position": position}
    assert said in complaint(capsys, "fit", config(tmp_path, model=model), f"--run_dir={tmp_path}/run")


@pytest.mark.parametrize(
    ("section", "content", "expected"),
    [
        ("trainer", None, "trainer: got None, expected a mapping"),
        ("trainer", TINY["trainer"] | {"accumulate_grad_batches": None}, "trainer.accumulate_grad_batches: got null"),
        ("trainer", [], "trainer: got [], expected a mapping"),
        ("model", None, "are required: fit.model.position"),
        ("model", [], "are required: fit.model.position"),
        ("model", {"position": []}, "model.position: got [], expected the name of a class"),
        ("data", {}, "expected the name of a class that is a LightningDataModule"),
        ("data", None, "are required: fit.data"),
    ],
)
def test_a_section_without_content(
    section: str, content: Any, expected: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    said = complaint(capsys, "fit", config(tmp_path, **{section: content}), f"--run_dir={tmp_path}/run")
    assert expected in said


@pytest.mark.parametrize(
    ("callback", "option", "said"),
    [
        ("RichProgressBar", "theme=[{a: b}]", "callbacks.theme: got [{'a': 'b'}], expected a single value"),
        ("ModelCheckpoint", "monitor=", "callbacks.monitor: got '', expected the name of a metric that is logged"),
        ("ModelCheckpoint", "train_time_interval=0", "train_time_interval: got '0', expected a string with form"),
        ("EarlyStopping", "monitor=val/los", "metric `val/los` which is not available"),
        ("ModelCheckpoint", "monitor=val/los", "monitor='val/los')` could not find the monitored key"),
    ],
)
def test_an_option_of_lightnings_callbacks(
    callback: str, option: str, said: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    given = {"class_path": callback, "init_args": {"monitor": "val/loss"} if callback == "EarlyStopping" else {}}
    trainer = TINY["trainer"] | {"callbacks": [given], "limit_val_batches": 1, "num_sanity_val_steps": 0}
    told = complaint(
        capsys, "fit", config(tmp_path, trainer=trainer), f"--run_dir={tmp_path}/run", f"--trainer.callbacks.{option}"
    )
    assert said in told
    assert told.startswith("error: trainer")


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["check", "--model.position=0"], "model.position: got '0', expected the name of a class"),
        (["check", "--model.position=[{a: b}]"], "model.position: got [{'a': 'b'}], expected the name of a class"),
        (["check", "--model.position=DAPE", "--model.position.over=[{a: b}]"], "model.position.over: got [{'a': 'b'}]"),
        (
            ["check", "--model.position=T5", "--model.position.buckets=1000000000000000"],
            "buckets: got 1000000000000000",
        ),
        (["predict", "--ckpt_path=x.ckpt", "--prompt=a", "--tokens=1000000000000000"], "tokens: got 1000000000000000"),
        (["fit", "--weights=", "--config=x.yaml"], "weights: got '', expected a folder, a .gguf file or a name"),
    ],
)
def test_an_option_of_another_command(arguments: list[str], said: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert said in complaint(capsys, *arguments)


def test_data_of_a_comparison_that_cannot_be_made() -> None:
    data = TINY["data"] | {"init_args": TINY["data"]["init_args"] | {"length": 5}}
    with pytest.raises(UserError, match=r"^data.length: got 5 tokens, but copy .* set it to 6 or more"):
        prepare(data)


def test_a_corpus_that_is_none_needs_shards(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    data = {"class_path": "TokenShards", "init_args": {"vocabulary": 300}}
    said = complaint(capsys, "fit", config(tmp_path, data=data), f"--run_dir={tmp_path}/run", "--data.corpus=null")
    assert "directory: got null, expected a folder of shards" in said


def test_a_sample_of_a_negative_size(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert "tokens: got -5, expected 0 or more" in complaint(capsys, "inspect", tmp_path, "--tokens=-5")


@pytest.mark.parametrize(
    ("command", "content"),
    [
        ("fit", b""),
        ("test", b"no checkpoint"),
        ("validate", b"PK\x03\x04" + b"\0" * 200),
        ("predict", b"PK\x03\x04" + b"\0" * 200),
        ("export", b"no checkpoint"),
        ("predict", b"\x80\x04no text"),
    ],
)
def test_a_file_that_is_no_checkpoint(
    command: str, content: bytes, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "last.ckpt"
    path.write_bytes(content)
    given = {"fit": [config(tmp_path), f"--run_dir={tmp_path}/run"], "export": [f"--to={tmp_path}/to"]}.get(command, [])
    line = complaint(capsys, command, *given, f"--ckpt_path={path}")
    assert line.startswith(f"error: ckpt_path: {path} is not a checkpoint written by `python run.py fit`")
    assert "mmap" not in line


def _fit_on_a_full_disk(folder: Path, log: Path) -> None:
    file = os.open(log, os.O_WRONLY | os.O_CREAT)
    os.dup2(file, 2)
    resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, 20_000))  # the kernel refuses what goes beyond
    sys.stdout = sys.stderr = os.fdopen(2, "w", buffering=1)  # what captures stdout may be at its limit
    provenance.git = lambda *_: ""  # a long diff of what is not committed here would meet the limit first
    try:
        main(["fit", f"--config={folder}/walk.yaml", f"--run_dir={folder}/run"])
    except SystemExit as ended:
        os._exit(ended.code)


def test_a_disk_that_is_full(tmp_path: Path) -> None:
    config(tmp_path)
    process = FORK.Process(target=_fit_on_a_full_disk, args=(tmp_path, tmp_path / "log.txt"))
    process.start()
    process.join()
    assert process.exitcode == 2
    line = only_line((tmp_path / "log.txt").read_text())
    assert line.startswith(f"error: no room for the checkpoint {tmp_path}/run/checkpoints/last.ckpt (File too large)")
    assert "free some space and resume with --ckpt_path last" in line
    assert not list((tmp_path / "run" / "checkpoints").iterdir())


def test_a_run_that_diverges(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    # each step multiplies the matrices by 1 - lr · weight_decay = -1e9
    options = ["--model.lr=1000", "--model.weight_decay=1000000", "--model.warmup=0", "--trainer.max_steps=40"]
    line = complaint(capsys, "fit", config(tmp_path), f"--run_dir={tmp_path}/run", *options)
    assert line.startswith("error: step ")
    assert "not finite" in line
    assert "Lower the learning rate or clip the gradient" in line


def test_an_unsealed_checkpoint_is_read_with_one_line_of_warning(
    genuine: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    content = torch.load(genuine, weights_only=True)
    del content["sha256"]
    torch.save(content, tmp_path / "old.ckpt")
    main(["test", f"--ckpt_path={tmp_path}/old.ckpt", f"--run_dir={tmp_path}/test"])
    (line,) = [line for line in capsys.readouterr().err.splitlines() if "old.ckpt" in line]
    assert line == (
        f"warning: ckpt_path: {tmp_path}/old.ckpt has no checksum, as those of earlier versions: damage and changes go "
        "unnoticed"
    )


def test_a_configuration_that_is_no_text(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "last.ckpt").write_bytes(b"PK\x03\x04\x80\xff\xfe")
    assert "last.ckpt" in complaint(capsys, "fit", f"--config={tmp_path}/last.ckpt")


@pytest.mark.parametrize(
    ("section", "option", "value"), [("data", "length", 0), ("model", "dim", "wide"), ("model", "position", None)]
)
def test_a_configuration_in_a_checkpoint_that_makes_no_model(
    genuine: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], section: str, option: str, value: object
) -> None:
    content = torch.load(genuine, weights_only=True)
    del content["sha256"]
    config = yaml.safe_load(content["config"])
    options = config["data"]["init_args"] if section == "data" else config["model"]
    if value is None:
        del options[option]
    else:
        options[option] = value
    torch.save(content | {"config": yaml.safe_dump(config)}, tmp_path / "odd.ckpt")
    with pytest.raises(SystemExit) as ended:
        main(["predict", f"--ckpt_path={tmp_path}/odd.ckpt"])
    assert ended.value.code == 2
    told = [line for line in capsys.readouterr().err.splitlines() if not line.startswith("warning: ")]
    assert len(told) == 1
    assert told[0].startswith(f"error: ckpt_path: {tmp_path}/odd.ckpt")


@pytest.mark.parametrize("options", [["--config=configs/tasks/addition.yaml"], ["--data=kerple.tasks.TaskData"]])
def test_a_task_has_nothing_to_prepare(options: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    more = [] if options[0].startswith("--config") else ["--data.task=Copy", "--data.length=100"]
    line = complaint(capsys, "prepare", *options, *more)
    assert "TaskData, which has no shards to prepare" in line

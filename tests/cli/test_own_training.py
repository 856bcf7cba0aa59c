"""Optimisers, schedules and loggers by class name, from the command line."""

import subprocess
import sys
from pathlib import Path

import pytest
import torch
import yaml

from kerple.cli.main import main
from tests.disturbed import prepare

SGD_WSD_CSV = {
    "seed_everything": 3,
    "model": {
        "position": "KerpleLog",
        "layers": 1,
        "dim": 16,
        "heads": 2,
        "optimizer": {"class_path": "torch.optim.SGD", "init_args": {"momentum": 0.9}},
        "schedule": "wsd",
        "lr": 0.1,
    },
    "data": {"class_path": "tests.toy.ToyData"},
    "trainer": {
        "max_steps": 12,
        "accelerator": "cpu",
        "precision": "32-true",
        "enable_progress_bar": False,
        "logger": {"class_path": "CSVLogger", "init_args": {"save_dir": "."}},
        "log_every_n_steps": 1,
        "callbacks": [
            {
                "class_path": "ModelCheckpoint",
                "init_args": {"every_n_train_steps": 5, "filename": "{step}", "save_top_k": -1},
            }
        ],
    },
}


def fit(config: dict, folder: Path, *flags: str) -> None:
    path = folder.with_suffix(".yaml")
    path.write_text(yaml.safe_dump(config))
    main(["fit", "--config", str(path), "--run_dir", str(folder), *flags])


def test_a_fit_with_an_optimiser_a_schedule_and_a_logger_by_name_is_resumed(tmp_path: Path) -> None:
    whole, resumed = tmp_path / "whole", tmp_path / "resumed"
    shards = prepare(tmp_path)
    options = {"corpus": str(tmp_path / "text"), "vocabulary": 300, "directory": str(shards), "length": 8}
    config = SGD_WSD_CSV | {"data": {"class_path": "TokenShards", "init_args": options}}
    fit(config, whole)
    (middle,) = whole.rglob("step=5.ckpt")
    fit(config, resumed, "--ckpt_path", str(middle))

    ends = [torch.load(folder / "checkpoints" / "last.ckpt", weights_only=True) for folder in (whole, resumed)]
    assert ends[0]["global_step"] == ends[1]["global_step"] == 12
    for name, value in ends[0]["state_dict"].items():
        assert torch.equal(value, ends[1]["state_dict"][name]), name
    (metrics,) = resumed.rglob("metrics.csv")
    assert "train/loss" in metrics.read_text()


def test_a_logger_whose_package_is_missing_is_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        fit(SGD_WSD_CSV, tmp_path / "run", "--trainer.logger", "CometLogger")
    assert "comet" in capsys.readouterr().err.splitlines()[-1]


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--model.position", "KerplLog"], "model.position: got KerplLog, expected a class path or one of ALiBi, "),
        (["--config", "configs/dmo.yaml"], "config: got configs/dmo.yaml, which does not exist"),
    ],
)
def test_a_misspelt_name_is_said_before_lightning_is_imported(flags: list[str], message: str) -> None:
    program = "import sys; from kerple.cli.main import main\ntry:\n main(sys.argv[1:])\nfinally:\n print(*sys.modules)"
    process = subprocess.run([sys.executable, "-c", program, "fit", *flags], text=True, capture_output=True)
    assert process.returncode == 2
    assert message in process.stderr
    assert "pytorch_lightning" not in process.stdout.split()

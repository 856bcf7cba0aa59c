"""The smallest real run for tests of the command line: one step on a task, without anything to prepare."""

from pathlib import Path
from typing import Any

import yaml

import kerple.cli.fit  # noqa: F401 (its parser is then built once for all tests)
from kerple.cli.main import main

TINY: dict[str, Any] = {
    "seed_everything": 3,
    "experiment": "tiny",
    "model": {"position": "KerpleLog", "layers": 1, "dim": 8, "heads": 2},
    "data": {
        "class_path": "TaskData",
        "init_args": {
            "task": {"class_path": "Copy", "init_args": {"symbols": 4}},
            "length": 8,
            "vocabulary": 300,
            "train_length": 2,
            "test_lengths": [3],
            "batch_size": 2,
            "validation_examples": 2,
            "test_examples": 2,
        },
    },
    "trainer": {
        "max_steps": 1,
        "accelerator": "cpu",
        "logger": False,
        "limit_val_batches": 0,
        "enable_progress_bar": False,
        "enable_model_summary": False,
        "callbacks": [{"class_path": "TaskAccuracy"}],
    },
}


def fit(folder: Path, *flags: str) -> Path:
    """Run it in a folder; its checkpoint."""
    (folder / "tiny.yaml").write_text(yaml.safe_dump(TINY))
    main(["fit", "--config", str(folder / "tiny.yaml"), "--run_dir", str(folder / "run"), *flags])
    return folder / "run" / "checkpoints" / "last.ckpt"

"""A run of one step on a task, for tests of the command line."""

from pathlib import Path
from typing import Any

import pytest
import yaml

import tests.parsers  # noqa: F401
from kerple.cli.main import main

TINY: dict[str, Any] = yaml.safe_load("""
seed_everything: 3
experiment: tiny
model: {position: KerpleLog, layers: 1, dim: 8, heads: 2}
data:
  class_path: TaskData
  init_args:
    {task: {class_path: Copy, init_args: {symbols: 26}}, length: 8, vocabulary: 300, train_length: 2,
     test_lengths: [3], batch_size: 2, validation_examples: 2, test_examples: 2}
trainer:
  {max_steps: 1, accelerator: cpu, logger: false, limit_val_batches: 0, enable_progress_bar: false,
   enable_model_summary: false, callbacks: [{class_path: TaskAccuracy}]}
""")


def fit(folder: Path, *flags: str) -> Path:
    """Run the fit in a folder, and return the path of its checkpoint."""
    (folder / "tiny.yaml").write_text(yaml.safe_dump(TINY))
    main(["fit", "--config", str(folder / "tiny.yaml"), "--output", str(folder / "run"), *flags])
    return folder / "run" / "checkpoints" / "last.ckpt"


def complaint(capsys: pytest.CaptureFixture[str], *arguments: object) -> str:
    """Run a command with a mistake, and return its error message."""
    with pytest.raises(SystemExit) as ended:
        main([str(argument) for argument in arguments])
    assert ended.value.code == 2
    (line,) = [line for line in capsys.readouterr().err.splitlines() if "rror: " in line]
    assert line.startswith("error: ")
    return line

"""An analysis that is named in a test is added to the callbacks of the checkpoint's run."""

from pathlib import Path

import pytest
import yaml

from kerple.cli.main import main


def test_a_test_appends_to_what_its_checkpoint_has(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    toy = {
        "model": {"position": "KerpleLog", "layers": 1, "dim": 16, "heads": 2},
        "data": {"class_path": "tests.analyses.random_text.RandomText", "init_args": {"tokens": 400}},
        "trainer": {
            "max_steps": 2,
            "accelerator": "cpu",
            "enable_progress_bar": False,
            "enable_model_summary": False,
            "callbacks": [{"class_path": "LastCheckpoint"}],
        },
    }
    (tmp_path / "toy.yaml").write_text(yaml.safe_dump(toy))
    shift = {"trainer": {"callbacks+": [{"class_path": "ShiftTest", "init_args": {"blocks": 5, "shifts": [0, 3]}}]}}
    (tmp_path / "shift.yaml").write_text(yaml.safe_dump(shift))
    main(["fit", "--config", "toy.yaml", "--run_dir", "run"])
    checkpoint = "run/checkpoints/last.ckpt"
    main(["test", "--ckpt_path", checkpoint, "--trust", "tests", "--config", "shift.yaml"])
    written = tmp_path / "run" / "test"
    assert (written / "shift.csv").is_file()
    callbacks = yaml.safe_load((written / "config.yaml").read_text())["trainer"]["callbacks"]
    assert [callback["class_path"].rpartition(".")[2] for callback in callbacks] == ["LastCheckpoint", "ShiftTest"]

"""The files of configs/analyses compose with a run's own configuration, in fit and in test."""

from pathlib import Path

import pytest
import yaml

from kerple.cli.main import main

ROOT = Path(__file__).parents[2]
FILES = sorted((ROOT / "configs" / "analyses").glob("*.yaml"))


def names(callbacks: list[dict]) -> list[str]:
    # a printed config names a class by its full path or by its name alone, as what is imported decides
    return [callback["class_path"].rpartition(".")[2] for callback in callbacks]


def classes(config: dict) -> list[str]:
    return names(config["trainer"]["callbacks"])


def own(path: Path) -> list[str]:
    trainer = yaml.safe_load(path.read_text())["trainer"]
    return names(trainer.get("callbacks", trainer.get("callbacks+")))


ADDED = [path for path in FILES if "callbacks+" in yaml.safe_load(path.read_text())["trainer"]]


@pytest.mark.parametrize("paths", [ADDED, *([path] for path in FILES if path not in ADDED)], ids=len)
def test_analyses_add_to_the_demo_or_take_the_callbacks_place(
    paths: list[Path], capsys: pytest.CaptureFixture[str]
) -> None:
    demo = ROOT / "configs" / "demo.yaml"
    with pytest.raises(SystemExit) as exit:
        main(["fit", "--config", str(demo), *(f"--config={path}" for path in paths), "--print_config"])
    assert exit.value.code == 0
    before = own(demo) if paths == ADDED else []
    found = classes(yaml.safe_load(capsys.readouterr().out))
    assert found == before + [name for path in paths for name in own(path)]


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
    assert classes(yaml.safe_load((written / "config.yaml").read_text())) == ["LastCheckpoint", "ShiftTest"]

"""A checkpoint that does not belong to what is asked for is named as that, before anything is loaded."""

import shutil
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml

from kerple.base.seal import SEAL, seal
from kerple.cli.main import main
from tests.cli.tiny import fit

Capture = pytest.CaptureFixture[str]


@pytest.fixture(scope="module")
def genuine(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return fit(tmp_path_factory.mktemp("genuine"))


def complaint(arguments: list[str], capsys: Capture) -> str:
    with pytest.raises(SystemExit) as ended:
        main(arguments)
    assert ended.value.code == 2
    (line,) = [line for line in capsys.readouterr().err.splitlines() if "rror" in line]
    return line


@pytest.mark.parametrize(
    ("option", "told"),
    [
        ("--model.position=RoPE", "model.position: got RoPE, the checkpoint has KerpleLog"),
        ("--model.position=KerplePower", "model.position: got KerplePower, the checkpoint has KerpleLog"),
        ("--model.dim=16", "model.dim: got 16, the checkpoint has 8"),
        ("--data.vocabulary=400", "model.vocabulary: got 400, the checkpoint has 300"),
    ],
)
@pytest.mark.parametrize("command", ["test", "fit"])
def test_another_model_is_named(
    command: str, option: str, told: str, genuine: Path, tmp_path: Path, capsys: Capture
) -> None:
    config = [f"--config={genuine.parents[2]}/tiny.yaml"] if command == "fit" else []
    line = complaint([command, *config, f"--ckpt_path={genuine}", f"--run_dir={tmp_path}/run", option], capsys)
    assert told in line
    assert "is of another model" in line


@pytest.mark.parametrize(
    ("option", "told"),
    [
        ("--model.optimizer=muon", "is of another training: model.optimizer: got muon, the checkpoint has adamw"),
        ("--model.lr=0.1", "is of another training: model.lr: got 0.1, the checkpoint has 0.0006"),
        ("--model.betas=[0.8, 0.9]", "model.betas: got (0.8, 0.9), the checkpoint has (0.9, 0.999)"),
        ("--model.warmup=0.5", "model.warmup: got 0.5, the checkpoint has 0.01"),
        ("--trainer.max_steps=20", "trainer.max_steps: got 20, but the learning rate in"),
    ],
)
def test_another_training_cannot_go_on(option: str, told: str, genuine: Path, tmp_path: Path, capsys: Capture) -> None:
    """The states of optimiser and schedule in the checkpoint would win over the options, and say nothing of it."""
    config = f"--config={genuine.parents[2]}/tiny.yaml"
    assert told in complaint(["fit", config, f"--ckpt_path={genuine}", f"--run_dir={tmp_path}/run", option], capsys)


@pytest.mark.parametrize("content", [{}, {"state_dict": {}}, {"state_dict": {"w": torch.zeros(1)}, "epoch": 0}])
def test_fit_refuses_a_foreign_checkpoint(content: Any, genuine: Path, tmp_path: Path, capsys: Capture) -> None:
    torch.save(content, tmp_path / "foreign.ckpt")
    config = f"--config={genuine.parents[2]}/tiny.yaml"
    line = complaint(["fit", config, f"--ckpt_path={tmp_path}/foreign.ckpt", f"--run_dir={tmp_path}/run"], capsys)
    assert "foreign.ckpt" in line
    assert not list((tmp_path / "run").rglob("*.ckpt"))


def test_the_training_length_is_that_of_the_checkpoint(
    genuine: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    lengths = []
    monkeypatch.setattr(
        "kerple.cli.lightning.agree", lambda *arguments, **_: lengths.append(arguments[2].network.shape.length)
    )
    main(["test", f"--ckpt_path={genuine}", f"--run_dir={tmp_path}/run", "--data.length=32"])
    config = yaml.safe_load((tmp_path / "run" / "config.yaml").read_text())
    assert config["data"]["init_args"]["length"] == 32
    assert lengths == [8]


def entries(node: Any) -> list[tuple[Any, Any]]:
    """Containers and keys of every entry, at any depth."""
    children = node.items() if isinstance(node, dict) else enumerate(node) if isinstance(node, list) else ()
    return [(node, key) for key, _ in children] + [e for _, child in children for e in entries(child)]


def test_one_field_of_a_checkpoint_changed_is_noticed_whatever_the_field(
    genuine: Path, tmp_path: Path, capsys: Capture
) -> None:
    """Every entry in turn, at any depth; the checksum itself too."""
    content = torch.load(genuine, weights_only=True)
    tried = 0

    for node, key in entries(content):
        whole = node[key]
        node[key] = ("changed", None, 10**9)[tried % 3]
        if seal(content) != content[SEAL]:  # else it was that before
            torch.save(content, tmp_path / "changed.ckpt")
            line = complaint(["test", f"--ckpt_path={tmp_path}/changed.ckpt", f"--run_dir={tmp_path}/run"], capsys)
            assert line.startswith(f"error: ckpt_path: {tmp_path}/changed.ckpt")
            tried += 1
        node[key] = whole
    print(f"checkpoints with one field changed: {tried}")
    assert tried > 100
    assert {path.name for path in tmp_path.iterdir()} == {"changed.ckpt"}


def resumed(
    every: int, genuine: Path, folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Change entries of a checkpoint, seal it anew as somebody would who means it, and go on training from it."""
    options = [f"--config={genuine.parents[2]}/tiny.yaml", f"--ckpt_path={folder}/changed.ckpt"]
    options += [f"--run_dir={folder}/run", "--trainer.max_steps=3"]
    content = torch.load(genuine, weights_only=True)
    torch.save(content, folder / "changed.ckpt")
    main(["fit", *options])  # as it is it goes on; or whatever is changed would be refused
    shutil.rmtree(folder / "run")
    ended: Counter[str] = Counter()
    for number, (node, key) in list(enumerate(entries(content)))[::every]:
        whole, node[key] = node[key], ("changed", None, 10**9, torch.zeros(3))[number % 4]
        torch.save(content | {SEAL: seal(content)}, folder / "changed.ckpt")
        value, node[key] = node[key], whole
        status = 0
        try:
            main(["fit", *options])
        except SystemExit as end:
            status = end.code
        said = capsys.readouterr().err
        lines = [line for line in said.splitlines() if line.startswith("error: ")]
        assert (status, len(lines)) in ((0, 0), (2, 1)), (key, value, said)
        ended["refused" if status else "ran"] += 1
        shutil.rmtree(folder / "run", ignore_errors=True)
    with capsys.disabled():
        print(f"\ncheckpoints with one field changed and sealed again, resumed: {dict(ended)}")
    assert ended["refused"] > ended["ran"] // 10
    assert [path.name for path in folder.iterdir()] == ["changed.ckpt"]


@pytest.mark.parametrize("key", ["random_states", "loops", "optimizer_states", "lr_schedulers", "callbacks"])
def test_a_state_that_is_none_is_refused(key: str, genuine: Path, tmp_path: Path, capsys: Capture) -> None:
    content = torch.load(genuine, weights_only=True) | {key: 10**9}
    torch.save(content | {SEAL: seal(content)}, tmp_path / "changed.ckpt")
    config = f"--config={genuine.parents[2]}/tiny.yaml"
    line = complaint(["fit", config, f"--ckpt_path={tmp_path}/changed.ckpt", f"--run_dir={tmp_path}/run"], capsys)
    assert line.startswith(f"error: ckpt_path: {tmp_path}/changed.ckpt: got a state that cannot be taken up")


def test_a_checkpoint_sealed_again_ends_in_one_line(
    genuine: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Capture
) -> None:
    resumed(41, genuine, tmp_path, monkeypatch, capsys)


@pytest.mark.slow
@pytest.mark.timeout(3000)
def test_all_fields_of_a_checkpoint_sealed_again(
    genuine: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Capture
) -> None:
    resumed(1, genuine, tmp_path, monkeypatch, capsys)

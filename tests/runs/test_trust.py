"""What a stranger's checkpoint may name, and what becomes of one that is none."""

import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml

from kerple.runs.trust import CONFIG_KEY, check, read_config

Change = Callable[[dict[str, Any]], object]


def config() -> dict[str, Any]:
    """As `fit` writes it, with texts that look like import paths where nothing is imported for a text."""
    return {
        "experiment": "demo.v2",
        "model": {"position": {"class_path": "kerple.positions.RoPE", "init_args": {}}, "activation": "gelu"},
        "data": {
            "class_path": "kerple.data.datamodule.TokenShards",
            "init_args": {"corpus": "code.jsonl", "tokenizer": "tokenizer.json", "directory": "data.v1"},
        },
        "trainer": {
            "callbacks": [
                {"class_path": "kerple.callbacks.Kernels", "init_args": {"every": 10}},
                {"class_path": "pytorch_lightning.callbacks.ModelCheckpoint", "init_args": {"filename": "{step}"}},
            ]
        },
    }


def write(path: Path, content: Any) -> Path:
    torch.save(content, path)
    return path


def test_a_checkpoint_of_this_project_is_read_as_it_is(tmp_path: Path) -> None:
    path = write(tmp_path / "last.ckpt", {CONFIG_KEY: yaml.safe_dump(config())})
    assert read_config(path) == config()


@pytest.mark.parametrize(
    "change",
    [
        lambda c: c.update(data="evil.Data"),
        lambda c: c.update(data="{class_path: evil.Data}"),
        lambda c: c["data"].update(class_path="evil.Data"),
        lambda c: c["data"]["init_args"].update(corpus={"class_path": "evil.Data"}),
        lambda c: c["data"]["init_args"].update(task="evil.Task"),
        lambda c: c["data"]["init_args"].update(task="[{init_args: {x: evil.f}}]"),
        lambda c: c["data"].update(init_args="{task: evil.Task}"),
        lambda c: c["model"].update(position="evil.position"),
        lambda c: c["trainer"].update(callbacks="evil.Callback"),
        lambda c: c["trainer"].update(callbacks=["evil.Callback"]),
        lambda c: c["trainer"]["callbacks"].append(
            {"class_path": "pytorch_lightning.callbacks.LambdaCallback", "init_args": {"on_test_start": "evil.f"}}
        ),
        lambda c: c["model"].update(position="evil.yaml"),
    ],
)
def test_whatever_the_parser_would_import_must_be_trusted(change: Change, tmp_path: Path) -> None:
    changed = config()
    change(changed)
    path = write(tmp_path / "last.ckpt", {CONFIG_KEY: yaml.safe_dump(changed)})
    with pytest.raises(ValueError, match=r"last\.ckpt (names the class evil\.|is not a checkpoint written by)"):
        read_config(path)


def test_a_file_of_further_configuration_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "more").write_text("class_path: evil.Data")
    changed = config()
    changed["model"]["position"] = "./more"
    path = write(tmp_path / "last.ckpt", {CONFIG_KEY: yaml.safe_dump(changed)})
    with pytest.raises(ValueError, match=r"names the class \./more"):
        read_config(path, ("",))


def test_a_trusted_package_is_trusted(tmp_path: Path) -> None:
    changed = config()
    changed["trainer"]["callbacks"] = [{"class_path": "good.Callback", "init_args": {"call": "good.f"}}]
    path = write(tmp_path / "last.ckpt", {CONFIG_KEY: yaml.safe_dump(changed)})
    assert read_config(path, ("good",)) == changed


@pytest.mark.parametrize(
    "content",
    [
        [1], torch.zeros(2), {}, {CONFIG_KEY: 3}, {CONFIG_KEY: "null"}, {CONFIG_KEY: "a: 1"}, {CONFIG_KEY: "{"},
        {CONFIG_KEY: "[" * 5000}, {CONFIG_KEY: "{model: 1, data: 2, trainer: 3}"},
    ],
)  # fmt: skip
def test_what_is_no_checkpoint_is_named(content: Any, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"last\.ckpt is not a checkpoint written by"):
        read_config(write(tmp_path / "last.ckpt", content))


def test_damage_anywhere_is_a_value_error_that_names_the_file(tmp_path: Path) -> None:
    """Bytes changed in the pickle inside, where torch's own reader raises whatever comes."""
    path = write(
        tmp_path / "last.ckpt", {CONFIG_KEY: "a: 1", "weights": torch.zeros(3), "more": [1, 2.5, None, (1, 2)]}
    )
    whole, generator, refused = path.read_bytes(), random.Random(0), 0
    begin = whole.index(b"\x80\x02")  # of the pickle
    for _ in range(300):
        damaged = bytearray(whole)
        for _ in range(4):
            damaged[generator.randrange(begin, begin + 250)] = generator.randrange(256)
        path.write_bytes(damaged)
        try:
            check(path)
        except ValueError as error:
            assert "last.ckpt" in str(error)  # noqa: PT017 (most of the damaged files are refused, not all)
            refused += 1
    assert refused > 200

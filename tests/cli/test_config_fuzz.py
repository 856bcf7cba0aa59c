"""A configuration with one key changed: a run that does what it says, or one line; nothing written elsewhere."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from kerple.cli.main import main
from tests.cli.tiny import TINY
from tests.cli.walk import SHARDS

CHOSEN_BY_A_RUN = {"precision", "default_root_dir", "logger", "enable_progress_bar", "callbacks", "seed_everything"}
CONFIG = TINY | {
    "data": SHARDS,
    "model": TINY["model"]
    | {
        "position": {"class_path": "KerpleLog", "init_args": {"floor": 0.02}},
        "lr": 0.001,
        "betas": [0.9, 0.99],
        "hidden": 16,
        "dropout": 0.1,
        "optimizer": "adamw",
    },
    "trainer": TINY["trainer"]
    | {
        "gradient_clip_val": 1.0,
        "accumulate_grad_batches": 1,
        "precision": "32-true",
        "callbacks": [{"class_path": "LastCheckpoint", "init_args": {"every_n_train_steps": 1}}],
    },
}
SCALARS = (
    st.none()
    | st.booleans()
    | st.integers(-3, 8)
    | st.integers()
    | st.floats()
    | st.sampled_from(
        ["", "auto", "os.system", "KerpleLog", "RoPE", "/etc/passwd", "nowhere.yaml", "{a: b}", "\u0000", "1e9"]
    )
    | st.text(max_size=8)
)
VALUES = st.recursive(
    SCALARS,
    lambda inner: st.lists(inner, max_size=2) | st.dictionaries(st.text(max_size=6), inner, max_size=2),
    max_leaves=4,
)


def places(node: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    for key, value in node.items() if isinstance(node, dict) else enumerate(node) if isinstance(node, list) else ():
        yield (*path, key)
        yield from places(value, (*path, key))


PLACES = [place for place in places(CONFIG) if place[-1] not in ("directory", "corpus", "logs")]


def put(config: Any, place: tuple[Any, ...], value: Any) -> Any:
    """A copy of a configuration with another value at a place."""
    copy = dict(config) if isinstance(config, dict) else list(config)
    copy[place[0]] = put(copy[place[0]], place[1:], value) if len(place) > 1 else value
    return copy


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("fuzz")
    (folder / "text.jsonl").write_text('{"text": "words and numbers, 1 2 3"}\n{"text": "more, 4 5 6"}\n' * 200)
    (folder / "here").mkdir()
    return folder


def run(folder: Path, config: dict[str, Any], capsys: pytest.CaptureFixture[str]) -> tuple[str, dict[str, Any]]:
    """The one line, empty if it ran, and the configuration that the run has stored."""
    trainer = config.get("trainer")
    bounded = config | {"trainer": trainer | {"max_time": "00:00:00:02"}} if isinstance(trainer, dict) else config
    (folder / "fuzz.yaml").write_text(yaml.safe_dump(bounded).replace("FOLDER", str(folder)))
    number = len(list(folder.glob("run*")))
    capsys.readouterr()
    status = 0
    try:
        main(["fit", f"--config={folder}/fuzz.yaml", f"--run_dir={folder}/run{number}"])
    except SystemExit as ended:
        status = ended.code
    said = capsys.readouterr().err
    if status:
        (line,) = [line for line in said.splitlines() if line.startswith("error: ")]
        assert status == 2
        return line, {}
    return "", yaml.safe_load((folder / f"run{number}" / "config.yaml").read_text())


def at(config: Any, place: tuple[Any, ...]) -> Any:
    for key in place:
        config = config[key]
    return config


def fuzz(
    examples: int,
    folder: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    repeatable: bool = True,
) -> None:
    monkeypatch.chdir(folder / "here")
    counts, default = {"refused": 0, "ran": 0}, set[str]()
    assert run(folder, CONFIG, capsys)[0] == ""  # or whatever is changed would be refused

    @given(place=st.sampled_from(PLACES), value=VALUES)
    @settings(
        max_examples=examples,
        deadline=None,
        suppress_health_check=list(HealthCheck),
        database=None,
        derandomize=repeatable,
    )
    def change(place: tuple[Any, ...], value: Any) -> None:
        before = {path.name for path in folder.iterdir()}
        line, stored = run(folder, put(CONFIG, place, value), capsys)
        counts["refused" if line else "ran"] += 1
        if not line and isinstance(value, int | float | str) and place[-1] not in CHOSEN_BY_A_RUN:
            kept = at(stored, place)  # what was asked for is what was run
            kept = kept["class_path"].rpartition(".")[2] if isinstance(kept, dict) else kept
            assert str(kept) == str(value) or float(kept) == float(value)
        after = {path.name for path in folder.iterdir() if not path.name.startswith("run")}
        assert after <= before | {"fuzz.yaml", "shards"}
        if place in (("data",), ("data", "init_args")):
            default.add("data")  # without a directory of its own, the data goes where the documentation says
        assert {path.name for path in (folder / "here").iterdir()} <= default

    change()
    with capsys.disabled():
        print(f"\nconfigurations with one key changed: {counts}")
    assert counts["refused"] > 0


def test_a_configuration_with_one_key_changed(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    fuzz(8, folder, monkeypatch, capsys)


@pytest.mark.slow
@pytest.mark.timeout(3000)
def test_many_configurations_with_one_key_changed(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    fuzz(400, folder, monkeypatch, capsys, repeatable=False)

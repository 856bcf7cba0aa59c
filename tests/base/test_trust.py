"""What a stranger's checkpoint may name, and what becomes of one that is none."""

import random
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
import yaml
from hypothesis import HealthCheck, event, given, settings
from hypothesis import strategies as st

import kerple.tasks
from kerple.base.errors import UserError
from kerple.base.seal import SEAL, seal
from kerple.base.signatures import base_in, is_plain, options
from kerple.base.trust import CONFIG_KEY, check, read_config
from kerple.cli.allowed_classes import offer
from kerple.positions import Position, strategies
from kerple.tasks import Task
from kerple.training.last_checkpoint import LastCheckpoint

Change = Callable[[dict[str, Any]], object]
OFFER = offer()
OFFERED = {f"{c.__module__}.{c.__qualname__}" for classes in OFFER.classes.values() for c in classes}


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
            ],
            "precision": "bf16-mixed",
        },
    }


def write(path: Path, content: Any) -> Path:
    torch.save(content, path)
    return path


def read(path: Path, config: Any, **trust: Any) -> dict[str, Any]:
    return read_config(write(path / "last.ckpt", {CONFIG_KEY: yaml.safe_dump(config)}), offer(**trust))


def instances(node: Any) -> Iterator[dict[str, Any]]:
    if isinstance(node, dict) and "class_path" in node:
        yield node
    for value in node.values() if isinstance(node, dict) else node if isinstance(node, list) else ():
        yield from instances(value)


def test_a_checkpoint_of_this_project_is_read_with_the_names_that_classes_have_now(tmp_path: Path) -> None:
    expected = config()
    expected["model"]["position"]["class_path"] = "kerple.positions.rotary.RoPE"
    expected["trainer"]["callbacks"][0]["class_path"] = "kerple.analyses.kernel_curves.Kernels"
    expected["trainer"]["callbacks"][1]["class_path"] = "pytorch_lightning.callbacks.model_checkpoint.ModelCheckpoint"
    assert read(tmp_path, config()) == expected


@pytest.mark.parametrize(
    "name",
    [
        "LastCheckpoint", "kerple.callbacks.LastCheckpoint", "kerple.training.last_checkpoint.LastCheckpoint",
        "kerple.callbacks.checkpoints.LastCheckpoint",
    ],
)  # fmt: skip
def test_a_class_is_known_by_the_names_it_has_and_had(name: str, tmp_path: Path) -> None:
    old = config()
    old["trainer"]["callbacks"] = {"class_path": name}
    found = read(tmp_path, old)["trainer"]["callbacks"]
    assert found == [{"class_path": f"{LastCheckpoint.__module__}.LastCheckpoint", "init_args": {}}]


@pytest.mark.parametrize("name", ["TokenShards", "kerple.data.TokenShards", "kerple.data.datamodule.TokenShards"])
def test_data_is_known_by_the_names_it_has_and_had(name: str, tmp_path: Path) -> None:
    old = config()
    old["data"]["class_path"] = name
    assert read(tmp_path, old)["data"]["class_path"] == "kerple.data.datamodule.TokenShards"


@pytest.mark.parametrize(
    "name",
    [
        "kerple.positions.content.FoX",
        "kerple.positions.relative.Shaw",
        "kerple.positions.row.SSMax",
        "kerple.positions.ALiBi",
    ],
)
def test_a_strategy_is_known_by_the_names_it_has_and_had(name: str, tmp_path: Path) -> None:
    old = config()
    old["model"]["position"] = name
    found = read(tmp_path, old)["model"]["position"]["class_path"]
    assert found.rpartition(".")[2] == name.rpartition(".")[2]
    module, _, last = found.rpartition(".")
    assert vars(sys.modules[module])[last] is strategies()[last]


def test_every_class_that_is_offered_is_what_its_name_gives_and_asks_for_no_function() -> None:
    """Options are numbers, texts and containers of those, or of a class that is offered itself."""
    for classes in OFFER.classes.values():
        for offered in classes:
            assert vars(sys.modules[offered.__module__])[offered.__qualname__] is offered
            for name, kind in options(offered).items():
                # the model gives the shape; of a bar's looks no text is taken from a checkpoint
                if name not in ("shape", "theme", "console_kwargs"):
                    assert is_plain(kind) or base_in(kind, OFFER.classes) is not None, (offered, name, kind)
    tasks = {value for name in kerple.tasks.__all__ if isinstance(value := getattr(kerple.tasks, name), type)}
    assert set(OFFER.classes[Task]) == {c for c in tasks if issubclass(c, Task) and c is not Task}


class Package:
    """A package that is imported, with a strategy of its own and what packages have besides."""

    def __init__(self, name: str) -> None:
        self.module = ModuleType(name)

        class Good(Position):
            def __init__(self, shape: Any, size: int = 1, free=None, then: Callable[..., Any] | None = None) -> None:
                super().__init__()

        class Plain:
            pass

        for kind in (Good, Plain):
            kind.__module__, kind.__qualname__ = name, kind.__name__
        vars(self.module).update(Good=Good, Plain=Plain, os=__import__("os"), Path=Path)


@pytest.fixture
def package(monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.setitem(sys.modules, "theirs", Package("theirs").module)
    return "theirs"


def test_a_class_of_a_trusted_package_may_be_named(package: str, tmp_path: Path) -> None:
    changed = config()
    changed["model"]["position"] = {"class_path": "theirs.Good", "init_args": {"size": 3, "free": "a.text"}}
    assert read(tmp_path, changed, trust=("theirs",))["model"]["position"] == changed["model"]["position"]
    with pytest.raises(UserError, match=r"names the class theirs\.Good, .* if you trust it, add --trust theirs"):
        read(tmp_path, changed, trust=())
    with pytest.raises(UserError, match=r"names the class theirs\.Good, expected one of [\w, ]+$"):
        read(tmp_path, changed)  # a command without the option does not advise it


@pytest.mark.parametrize(
    ("position", "message"),
    [
        ("theirs.os.system", "cannot be imported"),
        ("theirs.os", "expected a subclass of Position that a trusted package defines"),
        ("theirs.Path", "expected a subclass of Position that a trusted package defines"),
        ("theirs.Plain", "expected a subclass of Position that a trusted package defines"),
        ("theirs.Missing", "cannot be imported"),
        ({"class_path": "theirs.Good", "init_args": {"then": "shutil.rmtree"}}, "could be imported or opened"),
        ({"class_path": "theirs.Good", "init_args": {"then": {"class_path": "a.b"}}}, "expected no class"),
        ({"class_path": "theirs.Good", "init_args": {"free": "{class_path: a.b}"}}, "could be imported or opened"),
        ({"class_path": "theirs.Good", "init_args": {"more": 1}}, "no option of Good"),
    ],
)
def test_trust_is_in_the_classes_a_package_defines(position: Any, message: str, package: str, tmp_path: Path) -> None:
    changed = config()
    changed["model"]["position"] = position
    with pytest.raises(UserError, match=message):
        read(tmp_path, changed, trust=("theirs",))


NAMES = st.sampled_from(
    ["os.system", "kerple.cli.lightning.os.system", "torch.hub.load", "torch.serialization.os.system", "shutil.rmtree",
     "os",
     "kerple.positions.RoPE", "RoPE", "Kernels", "kerple.tasks.Copy", "TokenShards", "builtins.eval", "", ".", "..a",
     "kerple.positions", "kerple.positions.names", "kerple.base.trust.read_config", "/etc/passwd", "more.yaml",
     "{class_path: os.system}", "class_path: os.system", "https://example.org/a.yaml", "s3://bucket/key",
     "pytorch_lightning.callbacks.LambdaCallback", "kerple.positions.base.Position"]
)  # fmt: skip
SCALARS = st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | NAMES | st.text(max_size=12)
KEYS = st.sampled_from(
    ["class_path", "init_args", "dict_kwargs", "position", "task", "callbacks", "length", "dirpath", "cache", "then",
     "position.class_path", "__path__", "every", "config"]
)  # fmt: skip
NODES = st.recursive(
    SCALARS,
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(KEYS, inner, max_size=3)
        | st.fixed_dictionaries({"class_path": NAMES | inner}, optional={"init_args": st.dictionaries(KEYS, inner)})
    ),
    max_leaves=12,
)


def places(node: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    for key, value in node.items() if isinstance(node, dict) else enumerate(node) if isinstance(node, list) else ():
        yield (*path, key)
        yield from places(value, (*path, key))


@given(data=st.data())
@settings(max_examples=200, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_whatever_a_checkpoint_says_is_refused_or_names_what_is_offered(tmp_path: Path, data: st.DataObject) -> None:
    """A part of the configuration is replaced or added, at any depth; nothing is imported or opened for it."""
    changed = config()
    *parents, key = data.draw(st.sampled_from(list(places(changed))))
    node: Any = changed
    for step in parents:
        node = node[step]
    if isinstance(node, dict) and data.draw(st.booleans()):
        key = data.draw(KEYS)
    node[key] = data.draw(NODES)
    path = write(tmp_path / "last.ckpt", {CONFIG_KEY: yaml.safe_dump(changed)})
    opened.clear()
    watching.append(True)
    try:
        built = read_config(path, OFFER)
    except UserError as error:
        event("refused")
        assert "last.ckpt" in str(error)  # noqa: PT017 (the other outcome is checked below)
        return
    finally:
        watching.clear()
        assert {str(what) for what in opened} <= {str(path)}
    event("accepted")
    for instance in instances(built):
        assert instance.keys() == {"class_path", "init_args"}
        assert instance["class_path"] in OFFERED
        assert not instance["init_args"].keys() & {"dirpath", "cache", "keys", "__path__"}
    position = built["model"].get("position")
    assert position is None or position["class_path"].startswith("kerple.positions.")
    assert built["data"]["class_path"] in {"kerple.data.datamodule.TokenShards", "kerple.tasks.datamodule.TaskData"}
    # the same again, as the parser will give it back: nothing hides behind a second reading
    assert read(tmp_path, built) == built


watching: list[bool] = []
opened: list[Any] = []


def _watch(happened: str, arguments: tuple[Any, ...]) -> None:
    if watching and happened in ("open", "import", "exec", "os.system", "subprocess.Popen", "socket.connect"):
        opened.append(arguments[0])


sys.addaudithook(_watch)


@pytest.mark.parametrize(
    "content",
    [
        [1], torch.zeros(2), {}, {CONFIG_KEY: 3}, {CONFIG_KEY: "null"}, {CONFIG_KEY: "a: 1"}, {CONFIG_KEY: "{"},
        {CONFIG_KEY: "[" * 5000}, {CONFIG_KEY: "{model: 1, data: 2, trainer: 3}"}, {CONFIG_KEY: "&a [*a]"},
        {CONFIG_KEY: "model: {}\ndata: {}\ntrainer: 2001-99-99"}, {CONFIG_KEY: "x" * (1 << 21)},
    ],
)  # fmt: skip
def test_what_is_no_checkpoint_is_named(content: Any, tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"last\.ckpt is not a checkpoint written by"):
        read_config(write(tmp_path / "last.ckpt", content), OFFER)


@pytest.mark.parametrize("content", [b"", b"model: x", b"PK\x03\x04", b"\x80\x02}."])
def test_a_file_of_another_kind_is_said_to_be_one(content: bytes, tmp_path: Path) -> None:
    (tmp_path / "last.ckpt").write_bytes(content)
    with pytest.raises(UserError, match=r"last\.ckpt is not a checkpoint .*no archive of torch\.save, or was cut off"):
        check(tmp_path / "last.ckpt")


def test_damage_anywhere_is_an_error_that_names_the_file(tmp_path: Path) -> None:
    """Bytes changed in the pickle inside, where torch's own reader raises whatever comes; the seal sees the rest."""
    content = {CONFIG_KEY: "a: 1", "weights": torch.zeros(3), "more": [1, 2.5, None, (1, 2)]}
    path = write(tmp_path / "last.ckpt", {**content, SEAL: seal(content)})
    whole, generator, refused = path.read_bytes(), random.Random(0), 0
    begin = whole.index(b"\x80\x02")  # of the pickle
    for _ in range(300):
        damaged = bytearray(whole)
        for _ in range(4):
            damaged[generator.randrange(begin, begin + 250)] = generator.randrange(256)
        path.write_bytes(damaged)
        try:
            read = check(path)
        except UserError as error:
            assert "last.ckpt" in str(error)  # noqa: PT017 (most of the damaged files are refused, not all)
            refused += 1
        else:
            assert seal(read) == seal(content)  # what was damaged means nothing
    assert refused > 200


def test_a_byte_of_a_weight_is_noticed(tmp_path: Path) -> None:
    content = {"state_dict": {"w": torch.arange(64, dtype=torch.bfloat16)}}
    path = write(tmp_path / "last.ckpt", {**content, SEAL: seal(content)})
    assert check(path)["state_dict"]["w"][5] == 5
    whole = path.read_bytes()
    begin = whole.index(content["state_dict"]["w"].view(torch.uint8).numpy().tobytes())
    path.write_bytes(whole[: begin + 10] + b"\xff" + whole[begin + 11 :])
    with pytest.raises(UserError, match=r"last\.ckpt: its checksum is not that of what it holds"):
        check(path)


LOOP: list[Any] = []
LOOP.append(LOOP)
LAUGHS: list[Any] = ["ha"]
for _ in range(60):  # 2^60 texts, when each is read
    LAUGHS = [LAUGHS, LAUGHS]


@pytest.mark.parametrize("more", [{}, {SEAL: "0" * 64}], ids=["plain", "sealed"])
@pytest.mark.parametrize(
    "odd",
    [
        torch.zeros(1).expand(10**7, 10**7),  # 400 TB, when it is written out
        torch.eye(3).to_sparse(),
        torch.zeros(10**7, 10**7, device="meta"),
        LOOP,
        LAUGHS,
    ],
    ids=["expanded", "sparse", "meta", "loop", "laughs"],
)
def test_what_would_take_more_than_is_in_the_file_is_refused(odd: Any, more: dict[str, str], tmp_path: Path) -> None:
    path = write(tmp_path / "last.ckpt", {CONFIG_KEY: "a: 1", "state_dict": {"w": [odd]}, **more})
    with pytest.raises(UserError, match=r"last\.ckpt is not a checkpoint written by"):
        check(path)


def test_a_seal_tells_contents_apart_and_is_the_same_after_a_file(tmp_path: Path) -> None:
    contents: list[Any] = [
        {}, {"a": 1}, {"a": True}, {"a": "1"}, {"a": 1.0}, {"a": None}, {"a": [1]}, {"a": [[1]]}, {"a": [1, 2]},
        {"b": 1}, {"a": torch.ones(2)}, {"a": torch.ones(2, 1)}, {"a": torch.ones(2).double()}, {"a": torch.tensor(1)},
        {"a": b"1"}, {"a": torch.zeros(0)}, {"a": 1, "b": 2}, {"a": float("nan")}, {"a": -0.0}, {"a": 0.0}, {"a": {}},
    ]  # fmt: skip
    seals = [seal(content) for content in contents]
    assert len(set(seals)) == len(contents)
    for content, before in zip(contents, seals, strict=True):
        path = write(tmp_path / "x.ckpt", {**content, SEAL: before})
        assert seal(torch.load(path, weights_only=True)) == before

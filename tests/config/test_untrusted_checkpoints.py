"""Classes and options that the configuration of a checkpoint may name, and files that are not checkpoints."""

import codecs
import copy
import random
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from hypothesis import HealthCheck, event, given, settings
from hypothesis import strategies as st

from kerple.base.errors import UserError
from kerple.config.untrusted_checkpoints import CONFIG, Classes, load
from kerple.training.allowed_classes import allowed_classes
from kerple.training.stored_options import insert_stored_config
from tests.toy import entries

OFFERED = allowed_classes()
PATHS = {f"{kind.__module__}.{kind.__qualname__}" for kind in OFFERED.classes}


def config() -> dict[str, Any]:
    """Return a configuration of `fit`. Some options that are plain strings have values like import paths."""
    return yaml.safe_load("""
experiment: demo.v2
seed_everything: 3
model: {position: {class_path: kerple.positions.RoPE, init_args: {}}, activation: gelu}
data:
  class_path: kerple.data.datamodule.TokenShards
  init_args: {corpus: code.jsonl, tokenizer: tokenizer.json, directory: data.v1}
trainer:
  logger: {class_path: os.system, init_args: {command: "false"}}
  callbacks:
    - {class_path: kerple.measure.shift.ShiftTest, init_args: {}}
    - {class_path: pytorch_lightning.callbacks.LambdaCallback, init_args: {setup: os.system}}
  precision: 32-true
""")


def read(folder: Path, content: Any, allowed: Classes = OFFERED) -> dict[str, Any]:
    torch.save({CONFIG: content}, folder / "last.ckpt")
    return allowed.config(folder / "last.ckpt")


def test_a_configuration_is_read_without_loggers_and_callbacks_of_libraries(tmp_path):
    built, expected = read(tmp_path, config()), config()
    expected["model"]["position"]["class_path"] = "kerple.positions.rotary.RoPE"
    del expected["trainer"]["logger"], expected["trainer"]["callbacks"][1]
    assert built == expected


def test_names_are_looked_up_without_imports(tmp_path):
    for name in ("RoPE", "kerple.RoPE", "kerple.no.such.module.RoPE"):
        changed = config()
        changed["model"]["position"] = name
        assert read(tmp_path, changed)["model"]["position"]["class_path"] == "kerple.positions.rotary.RoPE"
    assert OFFERED.find("torch.optim.AdamW", "optimizer") is torch.optim.AdamW
    assert OFFERED.find("torch.optim.lr_scheduler.StepLR", "") is torch.optim.lr_scheduler.StepLR


def test_trust_covers_the_classes_of_a_package_but_not_its_imports(tmp_path):
    trusting = allowed_classes("tests,https://example.org/shards")
    assert trusting.find("tests.toy.ToyData", "data").__name__ == "ToyData"
    for name in ("tests.toy.Tensor", "tests.toy.torch", "tests.toy.os.system", "tests.nowhere.X", "os.system"):
        with pytest.raises(UserError):
            trusting.find(name, "data")
    with pytest.raises(UserError, match="add --trust tests"):
        OFFERED.find("tests.toy.ToyData", "data")
    for place in ("https://example.org/shards", "memory://x"):
        changed = config()
        changed["data"]["init_args"]["directory"] = place
        with pytest.raises(UserError, match=r"names '(https|memory)://.*add --trust (https|memory)://"):
            read(tmp_path, changed)
    changed["data"]["init_args"] |= {"directory": "https://example.org/shards/a", "mixture": None}  # an old option
    assert read(tmp_path, changed, trusting)["data"]["init_args"]["directory"]
    changed["data"]["init_args"]["directory"] = "https://example.org/shards.elsewhere"  # not below the trusted URL
    with pytest.raises(UserError, match="which is not read without consent"):
        read(tmp_path, changed, trusting)


def test_a_url_in_a_checkpoint_is_read_if_the_command_line_names_it_again(tmp_path):
    changed, url = config(), "https://example.org/shards"
    changed["data"]["init_args"]["directory"] = url
    torch.save({CONFIG: changed}, tmp_path / "last.ckpt")
    test = ["test", "--ckpt_path", str(tmp_path / "last.ckpt")]
    for option in ([], ["--data.directory", "https://example.org/others"], ["--data.directory=data"]):
        with pytest.raises(UserError, match=rf"names '{url}', which is not read without consent; add --trust {url}"):
            insert_stored_config([*test, *option])
    for option in (["--data.directory", url], [f"--data.init_args.directory={url}"], ["--trust", f"x,{url}"]):
        assert f"directory: {url}" in insert_stored_config([*test, *option])[2]


def test_models_of_the_hub_are_named_only_with_trust(tmp_path):
    options = {"lengths": [64, 128], "short": 8, "stride": 4}
    for evaluator, trust in (("owner/model", ""), ("gpt2", "owner/model"), ("gpt2", "gpt2"), (str(tmp_path), "")):
        changed = config()
        node = {"class_path": "LongPerplexity", "init_args": options | {"evaluator": evaluator}}
        changed["trainer"]["callbacks"] = [node]
        if evaluator in (trust, str(tmp_path)):
            assert read(tmp_path, changed, allowed_classes(trust))["trainer"]["callbacks"][0]["init_args"]["evaluator"]
        else:
            with pytest.raises(UserError, match=f"evaluator: names '{evaluator}', .*; add --trust {evaluator}"):
                read(tmp_path, changed, allowed_classes(trust))


NAMES = [
    "os.system", "builtins.eval", "kerple.cli.lightning.os.system", "torch.hub.load", "torch.load", "shutil.rmtree",
    "torch.nn.Linear", "kerple.positions", "kerple.positions.names", "kerple.config.untrusted_checkpoints.load",
    "subprocess.Popen",
    "kerple.base.atomic.write", "/etc/passwd", "more.yaml", "..os.system", "RoPE", "kerple.positions.ALiBi", "Copy",
    "KerpleLog", "kerple.training.language_model.LanguageModel", "{class_path: os.system}", "null", "a.b.c", "", ".",
    "torch.optim.SGD", "RandomizedPositions", "TaskData", "ShiftTest", "pytorch_lightning.Trainer", "https://a/b",
]  # fmt: skip
KEYS = st.sampled_from(
    [*config(), "class_path", "init_args", "dict_kwargs", "__path__", "position", "position.class_path", "corpus",
     "task", "parts", "cache", "keys", "dirpath", "callbacks", "base", "mixture"]
)  # fmt: skip
LEAVES = st.one_of(st.sampled_from(NAMES), st.integers(-9, 9), st.none(), st.booleans(), st.binary(max_size=2))
NODES = st.recursive(
    LEAVES,
    lambda inner: st.one_of(
        st.lists(inner, max_size=3),
        st.dictionaries(KEYS, inner, max_size=3),
        st.fixed_dictionaries({"class_path": inner, "init_args": st.dictionaries(KEYS, inner, max_size=2)}),
    ),
    max_leaves=8,
)


def classes_in(node: Any) -> list[dict[str, Any]]:
    children = node.values() if isinstance(node, dict) else node if isinstance(node, list) else ()
    named = [node] if isinstance(node, dict) and "class_path" in node else []
    return named + [found for child in children for found in classes_in(child)]


happened: list[Any] = []
watching: list[bool] = []
codecs.lookup("latin1")  # pickled bytes need it, and it is imported at its first use


def _watch(event: str, arguments: tuple[Any, ...]) -> None:
    if watching and event in ("open", "import", "exec", "os.system", "subprocess.Popen", "socket.connect"):
        happened.append(str(arguments[0]))


sys.addaudithook(_watch)


@settings(max_examples=100, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_random_configurations_import_and_open_nothing(tmp_path, data):
    changed = copy.deepcopy(config())
    *parents, key = data.draw(st.sampled_from(entries(changed)[1:]))
    node: Any = changed
    for step in parents:
        node = node[step]
    if isinstance(node, dict) and data.draw(st.booleans()):
        key = data.draw(KEYS)
    node[key] = data.draw(NODES)
    path = tmp_path / "last.ckpt"
    torch.save({CONFIG: changed}, path)
    happened.clear()
    watching.append(True)
    try:
        built = OFFERED.config(path)
    except UserError as error:
        event("refused")
        assert "last.ckpt" in str(error)  # noqa: PT017 (the other outcome is checked below)
        return
    finally:
        watching.clear()
        assert {what for what in happened if not what.endswith(".py")} <= {str(path)}
    event("accepted")
    for instance in classes_in(built):
        assert instance.keys() == {"class_path", "init_args"}
        assert instance["class_path"] in PATHS
        assert not instance["init_args"].keys() & {"cache", "keys", "__path__"}
    assert read(tmp_path, built) == built  # a second reading changes nothing


@pytest.mark.parametrize(
    "content",
    [[1], torch.zeros(2), {CONFIG: 3}, {CONFIG: {}}, {CONFIG: config() | {"data": torch.zeros(1)}}],
)
def test_other_files_than_checkpoints_give_an_error_that_names_the_file(content, tmp_path):
    torch.save(content, tmp_path / "last.ckpt")
    with pytest.raises(UserError, match=r"last\.ckpt"):
        OFFERED.config(tmp_path / "last.ckpt")


def test_damaged_pickles_give_an_error_or_have_no_effect(tmp_path):
    with pytest.raises(UserError, match="which is not a file"):
        load(tmp_path)  # Lightning would unpickle a sharded checkpoint, which is a folder
    path, refused = tmp_path / "last.ckpt", 0
    torch.save({CONFIG: {"a": 1}, "weights": torch.zeros(3), "more": [1, 2.5, None, (1, 2)]}, path)
    whole, generator = path.read_bytes(), random.Random(0)
    begin = whole.index(b"\x80\x02")  # start of the pickle
    for content in (b"", b"model: x", b"PK\x03\x04", b"\x80\x02}."):
        path.write_bytes(content)
        with pytest.raises(UserError, match=r"last\.ckpt is not a checkpoint"):
            load(path)
    for _ in range(200):
        damaged = bytearray(whole)
        for _ in range(4):
            damaged[generator.randrange(begin, begin + 250)] = generator.randrange(256)
        path.write_bytes(damaged)
        try:
            load(path)
        except UserError as error:
            assert "last.ckpt" in str(error)  # noqa: PT017 (some of the damaged files can be read)
            refused += 1
    assert refused > 130

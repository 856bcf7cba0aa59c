"""Digests of the source code of the user's classes."""

import pytest

from kerple.config.untrusted_checkpoints import Classes
from kerple.config.user_code_digests import source_digests, trust_option

SOURCE = """
SCALE = 1.0
def damp(d):
    return d / (1 + d)
try:
    from missing import shift
except ImportError:
    def shift(x):
        return x + 3
class Root:
    def bias(self, d):
        return SCALE * damp(shift(d))
if True:
    class Hyperbolic(Root):
        pass
def build():
    return Hyperbolic()
"""


@pytest.mark.parametrize(
    ("old", "new", "same"),
    [
        ("1.0", "1.0  # a comment\n", True),
        ("class Root", "class Another:\n    pass\nclass Root", True),
        ("pass", "scale = 2", False),
        ("d / (1", "d / (2", False),  # a function that its base class uses
        ("1.0", "2.0", False),
        ("x + 3", "x + 4", False),  # defined inside `try`
    ],
)
def test_a_digest_covers_the_class_and_the_definitions_that_it_uses(tmp_path, monkeypatch, old, new, same):
    monkeypatch.syspath_prepend(tmp_path)
    names = [f"{tmp_path.name}_{i}" for i in range(2)]
    for name, text in zip(names, (SOURCE, SOURCE.replace(old, new)), strict=True):
        (tmp_path / f"{name}.py").write_text(text)
    config = {f"{name}.{kind}.class_path": f"{name}.{kind}" for name in names for kind in ("Hyperbolic", "build")}
    config |= {"data.class_path": "kerple.data.TokenShards", "model.position.class_path": "NoPE"}
    of_class, of_function, *after = source_digests(config).values()  # classes of this project are left out
    assert [of_class == after[0], of_function == after[1]] == [same, same]


def test_a_nested_class_has_the_digest_of_the_class_around_it_and_is_found(tmp_path, monkeypatch) -> None:
    monkeypatch.syspath_prepend(tmp_path)
    digests = []
    for value in (1, 2):
        name = f"{tmp_path.name}_nested_{value}"
        (tmp_path / f"{name}.py").write_text(f"class Group:\n    class Root:\n        scale = {value}\n")
        digests += source_digests({"model.position.class_path": f"{name}.Group.Root"}).values()
        assert Classes([], trusted=(name,)).find(f"{name}.Group.Root", "").scale == value
    assert len(set(digests)) == 2


def test_a_test_trusts_the_packages_and_urls_in_the_configuration_of_its_fit() -> None:
    named = {"data.init_args.task.class_path": "my_task.Rotate", "data.class_path": "kerple.tasks.TaskData"}
    named |= {"model.position.class_path": "mine.biases.Root", "model.position.init_args.first.class_path": "my_task.B"}
    assert trust_option(named) == ["--trust=mine,my_task"]
    assert trust_option(named | {"data.init_args.directory": "s3://b/c"}) == ["--trust=mine,my_task,s3://b/c"]
    assert trust_option({"data.init_args.mixture.s3://b/c": 0.5}) == ["--trust=s3://b/c"]
    assert trust_option({"model.position.class_path": "KerpleLog", "data.init_args.corpus": "file:///x"}) == []
    evaluator = "trainer.callbacks.LongPerplexity.init_args.evaluator"
    assert trust_option({evaluator: "smollm2-135m"}) == []
    assert trust_option(named | {evaluator: "gpt2"}) == ["--trust=gpt2,mine,my_task"]

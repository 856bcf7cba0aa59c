import json

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from kerple.base.errors import UserError
from kerple.data.manifest import MANIFEST_FILE
from kerple.data.shards import Folder

ANYTHING = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=20),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3),
    max_leaves=8,
)
FUZZ = settings(max_examples=75, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])


def entries(value, path=()):
    """The path of every entry of nested mappings and lists."""
    children = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    return [path, *(p for key, child in children for p in entries(child, (*path, key)))]


@given(data=st.data())
@FUZZ
def test_a_manifest_that_lies_is_refused_by_name_or_is_what_it_says(prepared, tmp_path, data):
    """Any entry replaced by anything: one line that names the file, or shards of those sizes and no others."""
    lie = json.loads((prepared / MANIFEST_FILE).read_text())
    *parents, key = data.draw(st.sampled_from(entries(lie)[1:]))
    place = lie
    for step in parents:
        place = place[step]
    place[key] = data.draw(ANYTHING)
    (tmp_path / MANIFEST_FILE).write_text(json.dumps(lie))
    for path in (*prepared.glob("*.tar"), prepared / "tokenizer.json"):
        if not (tmp_path / path.name).exists():
            (tmp_path / path.name).symlink_to(path)
    complaint = None
    try:
        stream = Folder(str(tmp_path)).stream("train")
        tokens = stream.read(0, min(len(stream), 100_000))
    except UserError as error:
        complaint = str(error)
    if complaint is None:
        assert len(tokens) == sum(shard["tokens"] for shard in lie["splits"]["train"]["shards"])
    else:
        assert str(tmp_path) in complaint


@pytest.mark.parametrize("content", [None, b"[" * 100_000, b'{"format":' + b"9" * 5000 + b"}", b"\xff", b"[]"])
def test_what_is_no_manifest_is_named(tmp_path, content):
    if content is not None:
        (tmp_path / MANIFEST_FILE).write_bytes(content)
    with pytest.raises(UserError, match=str(tmp_path)):
        Folder(str(tmp_path))

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st

from kerple.base.errors import UserError
from kerple.data.manifest import parse_manifest, read_manifest, signed
from kerple.data.prepare.encode import parse
from kerple.data.shards import TokenStream

ANYTHING = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=20),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3),
    max_leaves=8,
)
FUZZ = settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])


def entries(value: Any, path: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    children = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    return [path, *(p for key, child in children for p in entries(child, (*path, key)))]


def test_a_manifest_comes_back(prepared: Path) -> None:
    manifest = read_manifest(prepared)

    assert parse_manifest(manifest.to_json().encode(), f"{prepared}/manifest.json") == manifest


@given(data=st.data())
@FUZZ
def test_a_manifest_that_lies_is_refused_by_name(prepared: Path, data: st.DataObject) -> None:
    """Any entry replaced by anything: a UserError that names the file, whatever the entry, bytes and counts too."""
    truth = (prepared / "manifest.json").read_text()
    lie = json.loads(truth)
    *parents, key = data.draw(st.sampled_from(entries(lie)[1:]))
    place = lie
    for step in parents:
        place = place[step]
    if data.draw(st.booleans()):
        place[key] = data.draw(ANYTHING)
    elif isinstance(place, list):
        place.append(place[key])
    else:
        del place[key]
    assume(json.dumps(lie, sort_keys=True) != json.dumps(json.loads(truth), sort_keys=True))
    with pytest.raises(UserError, match=r"here/manifest\.json"):
        parse_manifest(json.dumps(lie).encode(), "here/manifest.json")


@given(data=st.data())
@FUZZ
def test_a_manifest_that_lies_and_signs_it_is_what_it_says_or_refused(prepared: Path, data: st.DataObject) -> None:
    """The same with the checksum made anew, as somebody would who means it."""
    lie = json.loads((prepared / "manifest.json").read_text())
    del lie["sha256"]
    *parents, key = data.draw(st.sampled_from(entries(lie)[1:]))
    place = lie
    for step in parents:
        place = place[step]
    place[key] = data.draw(ANYTHING)
    complaint = None
    try:
        manifest = parse_manifest(signed(lie).encode(), "here/manifest.json")
    except UserError as error:
        complaint = str(error)
    if complaint is None:
        assert json.loads(manifest.to_json())["splits"] == lie["splits"]
    else:
        assert "here/manifest.json" in complaint


@pytest.mark.parametrize("key", ["bytes", "documents"])
def test_a_count_that_was_changed_is_noticed(prepared: Path, key: str) -> None:
    lie = json.loads((prepared / "manifest.json").read_text())
    lie["splits"]["train"][key] -= 1
    with pytest.raises(UserError, match="m: its sha256 is not that of its entries; prepare or copy the folder again"):
        parse_manifest(json.dumps(lie).encode(), "m")


def test_a_manifest_of_the_format_before_is_read_with_a_warning(prepared: Path) -> None:
    old = json.loads((prepared / "manifest.json").read_text()) | {"format": 1}
    del old["sha256"]
    with pytest.warns(match="without a checksum"):
        manifest = parse_manifest(json.dumps(old).encode(), f"{prepared}/manifest.json")
    assert manifest == read_manifest(prepared)


@given(st.binary(max_size=200) | ANYTHING.map(lambda value: json.dumps(value).encode()))
@FUZZ
def test_no_manifest_at_all(content: bytes) -> None:
    with pytest.raises(ValueError, match=r"here/manifest\.json"):
        parse_manifest(content, "here/manifest.json")


@pytest.mark.parametrize("content", [b"[" * 100_000, b'{"vocabulary":' + b"9" * 5000 + b"}", b"\xff\xfe"])
def test_json_that_is_meant_to_break_the_reader(content: bytes) -> None:
    with pytest.raises(ValueError, match="is not JSON"):
        parse_manifest(content, "m")


@given(place=st.integers(0, 10_000), content=st.binary(min_size=1, max_size=600), cut=st.booleans())
@FUZZ
def test_bytes_written_over_a_shard_are_noticed(
    prepared: Path, tmp_path: Path, place: int, content: bytes, cut: bool
) -> None:
    original = (prepared / "train-00001.tar").read_bytes()
    place %= len(original)
    changed = original[:place] + content + (b"" if cut else original[place + len(content) :])
    (tmp_path / "train-00001.tar").write_bytes(changed)
    stream = TokenStream(tmp_path, read_manifest(prepared), "train")
    complaint = None
    try:
        tokens = [stream.run(run).tolist() for run in range(3, 6)]
    except ValueError as error:
        complaint = str(error)
    if complaint is not None:
        assert "train-00001.tar" in complaint
    else:  # written where nothing is read: padding, the end of the archive
        true = TokenStream(prepared, read_manifest(prepared), "train")
        assert tokens == [true.run(run).tolist() for run in range(3, 6)]


@given(st.binary(max_size=100) | st.dictionaries(st.text(max_size=5), ANYTHING).map(lambda v: json.dumps(v).encode()))
@FUZZ
def test_a_line_is_a_text_or_has_a_fault(line: bytes) -> None:
    text, raw, fault = parse(line, True, "text")

    if fault is None:
        assert json.loads(line)["text"] == text
        assert raw == text.encode()
    else:
        assert fault.partition(":")[0] in ("empty", "broken JSON", "no text", "not Unicode", "JSON too deep")


def test_the_end_of_text_is_one_of_the_vocabulary(prepared: Path) -> None:
    lie = json.loads((prepared / "manifest.json").read_text())
    del lie["sha256"]
    lie["end_of_text"] = lie["vocabulary"]
    with pytest.raises(UserError, match="m: end_of_text must be a whole number in 0"):
        parse_manifest(signed(lie).encode(), "m")

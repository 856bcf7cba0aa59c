"""Corpora of random bytes become shards that hold what can be read, or one line; nothing is written elsewhere."""

import bz2
import gzip
import json
import warnings
from pathlib import Path
from tempfile import TemporaryDirectory

import zstandard
from hypothesis import given, settings
from hypothesis import strategies as st

from kerple.base.errors import UserError
from kerple.data.shards import Folder, verify

NAMES = [f"a.{kind}{packed}" for kind in ("jsonl", "tar", "txt") for packed in ("", ".gz", ".zst")]
NAMES += ["a.tgz", "a.parquet"]
LINES = b"".join(json.dumps({"text": f"the cat {i} sat"}).encode() + b"\n" for i in range(40))
PACKED = {"plain": LINES, "gzip": gzip.compress(LINES), "zstd": zstandard.compress(LINES), "bz2": bz2.compress(LINES)}


@st.composite
def contents(draw: st.DrawFn) -> bytes:
    """Random bytes, or a corpus of some kind with random bytes written over it, cut off or put before it."""
    if draw(st.booleans()):
        return draw(st.binary(max_size=2000))
    content = PACKED[draw(st.sampled_from(sorted(PACKED)))]
    place, noise = draw(st.integers(0, len(content))), draw(st.binary(max_size=30))
    rest = content[place + len(noise) :] if draw(st.booleans()) else b""
    return draw(st.sampled_from([content[:place] + noise + rest, noise + content, content]))


@given(name=st.sampled_from(NAMES), content=contents(), largest_loss=st.sampled_from([0.0, 0.01, 1.0]))
@settings(max_examples=60, deadline=None)
def test_any_bytes_become_shards_or_one_line(prepared, small_build, name, content, largest_loss):
    with TemporaryDirectory() as folder, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        corpus, directory = Path(folder, "corpus"), Path(folder, "shards")
        corpus.mkdir()
        (corpus / name).write_bytes(content)
        manifest, complaint = None, ""
        try:
            manifest = small_build(directory, corpus, tokenizer=str(prepared), largest_loss=largest_loss)
        except UserError as error:
            complaint = str(error)
        if manifest is None:
            assert complaint
            assert "\n" not in complaint
            assert not (directory / "manifest.json").exists()
        else:
            verify(Folder(str(directory)))
            assert sum(split.documents for split in manifest.splits.values()) > 0
            if largest_loss == 0:
                assert manifest.left_out.keys() <= {"empty"}
        assert {path.name for path in Path(folder).iterdir()} <= {"corpus", "shards"}
        assert [path.name for path in corpus.iterdir()] == [name]

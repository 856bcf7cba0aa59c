import hashlib
import json
import os
import shutil
import sys
import tarfile
from pathlib import Path

import numpy as np
import pytest
import webdataset
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from kerple.base.atomic import note_path
from kerple.base.errors import UserError
from kerple.cli import inspect_shards
from kerple.data import TokenShards
from kerple.data.manifest import MANIFEST_FILE, SPLITS
from kerple.data.prepare.corpus_reader import split_of
from kerple.data.shards import BLOCK, Folder, TokenStream, verify
from kerple.data.tokenizer import encode, end_of_text, load_tokenizer, token_bytes, train_tokenizer
from tests.data.conftest import small_build
from tests.toy import entries


def expected_streams(documents: list[str], folder: Path) -> dict[str, list[int]]:
    """The tokens of each split, encoded one document at a time."""
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    streams: dict[str, list[int]] = {split: [] for split in SPLITS}
    for part in range(3):
        for text in documents[part::3]:
            streams[split_of(text.encode(), (0.8, 0.1, 0.1))] += [*tokenizer.encode(text).ids, 0]
    return streams


def test_shards_hold_every_document_once_in_order(prepared, documents):
    folder = Folder(str(prepared))
    for split, expected in expected_streams(documents, prepared).items():
        stream = TokenStream(folder, split)
        assert stream[:].tolist() == expected
        begins = folder.documents(split)
        assert begins.tolist() == [0, *(np.flatnonzero(np.array(expected) == 0)[:-1] + 1).tolist()]
        entry = folder.manifest.splits[split]
        assert (len(expected), len(begins)) == (entry.tokens, entry.documents)
        assert len(entry.shards) > 5  # the slices below cross boundaries of shards
        for start in {0, *(max(end - 1, 0) for end in stream.ends), *stream.ends}:
            for end in (start + count for count in (0, 1, 2, 700, 5000)):
                assert stream[start:end].tolist() == expected[start:end]
    assert sum(s.documents for s in folder.manifest.splits.values()) == len(documents)
    assert sum(s.bytes for s in folder.manifest.splits.values()) == sum(len(text.encode()) for text in documents)


def test_checksums_are_those_of_the_tokens_for_any_division_into_shards(prepared, json_lines, documents, tmp_path):
    one = small_build(tmp_path, json_lines, tokenizer=str(prepared), part=1_000_000)
    assert [len(split.shards) for split in one.splits.values()] == [1, 1, 1]
    for split, expected in expected_streams(documents, prepared).items():
        checksum = hashlib.sha256(np.array(expected, "<u2").tobytes()).hexdigest()
        assert one.splits[split].sha256 == Folder(str(prepared)).manifest.splits[split].sha256 == checksum
    assert len({TokenShards(None, directory=str(folder)).checksum() for folder in (prepared, tmp_path)}) == 1


def test_webdataset_and_tar_read_the_same(prepared):
    stream, shards = TokenStream(Folder(str(prepared)), "train"), sorted(map(str, prepared.glob("train-*.tar")))
    dataset = webdataset.DataPipeline(webdataset.SimpleShardList(shards), webdataset.tarfile_to_samples())
    assert np.frombuffer(b"".join(sample["u16"] for sample in dataset), "<u2").tolist() == stream[:].tolist()
    with tarfile.open(shards[0]) as archive:
        assert archive.getnames() == ["train-00000.u16"]


@pytest.fixture
def copied(prepared, tmp_path):
    return shutil.copytree(prepared, tmp_path / "copy")


DAMAGES = {
    "flipped": lambda content: content[:700] + bytes([content[700] ^ 1]) + content[701:],
    "longer": lambda content: content + b"x",
    "shorter": lambda content: content[:-700],
    "missing": lambda content: None,
}


@pytest.mark.parametrize("name", ["train-00001.tar", "test-00000.tar", "lengths-train.u32", "tokenizer.json"])
@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_file_is_named(copied, damage, name):
    content = DAMAGES[damage]((copied / name).read_bytes())
    (copied / name).unlink() if content is None else (copied / name).write_bytes(content)
    with pytest.raises(UserError, match=str(copied / name)):
        verify(Folder(str(copied)))
    if name.startswith("train"):  # also found when the file is mapped
        with pytest.raises(UserError, match=name):
            TokenStream(Folder(str(copied)), "train")[:]


def test_a_shard_is_hashed_once_for_each_content(copied, monkeypatch):
    hashed, digest = [], hashlib.file_digest
    monkeypatch.setattr(hashlib, "file_digest", lambda file, k: hashed.append(Path(file.name).name) or digest(file, k))

    TokenStream(Folder(str(copied)), "train")[:]
    assert sorted(hashed) == sorted(path.name for path in copied.glob("train-*.tar"))
    TokenStream(Folder(str(copied)), "train")[:]
    assert len(hashed) == len(set(hashed))
    shard = copied / "train-00001.tar"
    times, content = shard.stat(), shard.read_bytes()
    shard.write_bytes(content[:BLOCK] + bytes(len(content) - BLOCK))
    os.utime(shard, ns=(times.st_atime_ns, times.st_mtime_ns))
    with pytest.raises(UserError, match="train-00001"):
        TokenStream(Folder(str(copied)), "train")[:]
    shard.write_bytes(content)
    (note,) = note_path("verified", copied).glob("train-00000.tar")
    note.write_bytes(b"\xff")
    TokenStream(Folder(str(copied)), "train")[:]
    assert len(hashed) == len(set(hashed)) + 3


def test_a_folder_that_is_only_read_is_not_written_to(copied, tmp_path, monkeypatch):
    files = Path(shutil.copytree(copied, tmp_path / "files of the user"))
    for name in (".verified", ".lock", ".parts"):
        (copied / name).unlink(missing_ok=True)
        (copied / name).symlink_to(files)

    def state():
        return {path: path.lstat().st_ctime_ns for path in (copied, *copied.iterdir(), files, *files.iterdir())}

    before = state()
    for cache in (tmp_path / "cache", Path("/dev/null"), Path("relative")):  # no note can be written to the last two
        monkeypatch.setenv("XDG_CACHE_HOME", str(cache))
        verify(Folder(copied))
        TokenShards(None, directory=str(copied)).prepare_data()
        assert state() == before
    assert (tmp_path / "cache/kerple/verified").is_dir()


@pytest.mark.parametrize("token", [299, 300])
def test_a_changed_shard_with_a_new_checksum_is_found_by_its_tokens(copied, token):
    shard, manifest = copied / "train-00000.tar", json.loads((copied / "manifest.json").read_text())
    old = shard.read_bytes()
    shard.write_bytes(content := old[:BLOCK] + token.to_bytes(2, "little") + old[BLOCK + 2 :])
    manifest["splits"]["train"]["shards"][0]["sha256"] = hashlib.sha256(content).hexdigest()
    (copied / "manifest.json").write_text(json.dumps(manifest))
    expected = "tokens of train differ from the manifest" if token < 300 else "train-00000.tar: got the token id 300"
    with pytest.raises(UserError, match=expected):
        verify(Folder(str(copied)))


def test_a_path_may_have_bytes_that_are_not_utf8_and_pattern_marks(json_lines, tmp_path, capsys):
    sys.stderr.reconfigure(errors="backslashreplace")  # Python's default for stderr
    corpus, folder = (tmp_path / os.fsdecode(name) for name in (b"[1] caf\xe9*", b"[x] caf\xe9"))
    shutil.copytree(json_lines, corpus)
    small_build(folder, corpus)
    inspect_shards.main(["--length", "5", "--seed", "1", "--documents", str(folder)])  # a switch takes no path
    assert "all checksums are correct" in capsys.readouterr().out


ANYTHING = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=20),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3),
    max_leaves=8,
)


@pytest.mark.slow
@given(data=st.data())
@settings(max_examples=75, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_a_manifest_with_a_random_entry_is_refused_by_name_or_describes_the_shards(prepared, tmp_path, data):
    """One entry is replaced by a random value. The error names the folder, or the shards have the manifest's sizes."""
    manifest = json.loads((prepared / MANIFEST_FILE).read_text())
    *parents, key = data.draw(st.sampled_from(entries(manifest)[1:]))
    place = manifest
    for step in parents:
        place = place[step]
    place[key] = data.draw(ANYTHING)
    (tmp_path / MANIFEST_FILE).write_text(json.dumps(manifest))
    for path in (*prepared.glob("*.tar"), prepared / "tokenizer.json"):
        if not (tmp_path / path.name).exists():
            (tmp_path / path.name).symlink_to(path)
    message = str(tmp_path)
    try:
        tokens = TokenStream(Folder(str(tmp_path)), "train")[:100_000]
        assert len(tokens) == sum(shard["tokens"] for shard in manifest["splits"]["train"]["shards"])
    except UserError as error:
        message = str(error)
    assert str(tmp_path) in message


@pytest.mark.parametrize("content", [None, b"[" * 100_000, b'{"format":' + b"9" * 5000 + b"}", b"\xff", b"[]"])
def test_a_file_that_is_not_a_manifest_is_named(tmp_path, content):
    if content is not None:
        (tmp_path / MANIFEST_FILE).write_bytes(content)
    with pytest.raises(UserError, match=str(tmp_path)):
        Folder(str(tmp_path))


# as SentencePiece makes them: ▁ for a space, and a token for each byte
IDS = {name: i for i, name in enumerate([*(f"<0x{b:02X}>" for b in range(256)), "▁", "a", "b", "é", "▁a", "ab"])}
PIECES = Tokenizer(models.BPE(IDS, [("▁", "a"), ("a", "b")], byte_fallback=True))
PIECES.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="never")
PIECES.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()])


@pytest.fixture(scope="module")
def tokenizer(documents):
    return train_tokenizer(documents, 400)


def test_training_cuts_only_long_runs(documents):
    long = train_tokenizer(["x" * 200_000, *documents], 400)  # without the cuts, this takes minutes
    assert long.to_str() == train_tokenizer(["x" * 256] * 781 + ["x" * 64] + documents, 400).to_str()
    assert len(long.encode("x" * 512).ids) < 512


@pytest.mark.slow
@given(st.text(max_size=200))
@settings(max_examples=100, deadline=None)
def test_decoding_gives_the_text_and_its_tokens_have_its_bytes(tokenizer, text):
    ids, sizes = encode(tokenizer, text), token_bytes(tokenizer)  # with 143 merges, most characters have several tokens
    assert tokenizer.decode(ids, skip_special_tokens=False) == text
    assert sum(sizes[i] for i in ids) == len(text.encode())


@given(st.lists(st.text(alphabet="ab é猫z.", min_size=1, max_size=8), max_size=9).map(" ".join))
@settings(max_examples=100, deadline=None)
def test_bytes_of_pieces_with_byte_fallback(text):
    sizes = token_bytes(PIECES)
    assert sum(sizes[i] for i in PIECES.encode(text, add_special_tokens=False).ids) == len(text.encode())


def test_special_tokens_have_no_bytes_and_their_names_in_a_text_are_ordinary_characters(tokenizer):
    copy = Tokenizer.from_str(tokenizer.to_str())
    copy.add_tokens(["é é"])
    sizes, end = token_bytes(copy), copy.token_to_id("<|endoftext|>")
    assert (sizes[copy.token_to_id("é é")], sizes[end]) == (5, 0)
    assert end not in encode(tokenizer, "a<|endoftext|>b")


@pytest.mark.parametrize("content", ["", '{"model": 3}', "\x00"])
def test_a_file_that_is_not_a_tokenizer_is_named(tmp_path, content):
    path = tmp_path / "tokenizer.json"
    path.write_text(content)
    with pytest.raises(ValueError, match=r"tokenizer: .*could not be loaded"):
        load_tokenizer(str(path))


ENDS = {
    ("<|end|>",): "<|end|>",
    ("<|end|>", "<|endoftext|>"): "<|endoftext|>",  # a chat model declares the end of a turn
    ("<|end|>", "</s>", "[SEP]"): "<|end|>",
    ("[SEP]",): "[SEP]",
}


@pytest.mark.parametrize("file", ["tokenizer_config", "special_tokens_map", "generation_config", "config", "manifest"])
@pytest.mark.parametrize("specials", ENDS)
def test_the_end_of_text_token_is_the_usual_or_the_declared_one(tmp_path, specials, file):
    tokenizer = Tokenizer(models.WordLevel({"a": 0, "b": 1, "c": 2}, "a"))
    tokenizer.add_special_tokens([*specials])
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    # the first id of each list is not in the tokenizer, and 0 is an ordinary token, like many defaults of classes
    declared: dict = {"eos_token": {"content": "<|end|>"}} if "token" in file else {"eos_token_id": [999, 0, 3]}
    content = {"end_of_text": 3} if file == "manifest" else declared
    (tmp_path / f"{file}.json").write_text(json.dumps(content | {"pad_token": "</s>"}))
    if file == "tokenizer_config":
        (tmp_path / "config.json").write_text('{"eos_token_id": 0}')
    expected = specials[0] if file == "manifest" else ENDS[specials]  # shards have the token of their manifest
    for source in (str(tmp_path), str(tmp_path / "tokenizer.json")):
        assert tokenizer.id_to_token(end_of_text(tokenizer, source)) == expected


@pytest.mark.parametrize("ends", [{"eos_token": "<END>"}, {"eos_token": "b", "pad_token": "</s>"}])
def test_shards_with_the_tokenizer_of_others_have_their_end_of_text_token(tmp_path, json_lines, ends):
    """The declared token is not special, so that without its declaration another one would be used."""
    tokenizer = Tokenizer(models.WordLevel({"a": 0, "b": 1, "<END>": 2}, "a"))
    tokenizer.add_special_tokens(["</s>"])
    (source := tmp_path / "source").mkdir()
    tokenizer.save(str(source / "tokenizer.json"))
    (source / "tokenizer_config.json").write_text(json.dumps(ends))
    first = small_build(tmp_path / "first", json_lines, 10**6, tokenizer=str(source))
    second = small_build(tmp_path / "second", json_lines, 10**6, tokenizer=str(tmp_path / "first"))
    assert first.end_of_text == second.end_of_text == tokenizer.token_to_id(ends["eos_token"])
    assert first.splits == second.splits


def test_the_end_of_text_is_not_declared_by_files_beside_another_name(tmp_path):
    tokenizer = Tokenizer(models.WordLevel({"a": 0, "b": 1}, "a"))
    tokenizer.save(str(tmp_path / "mine.json"))
    (tmp_path / "config.json").write_text('{"eos_token_id": 1}')
    with pytest.raises(UserError, match=r"expected an end-of-text token: <\|endoftext\|>.*as eos_token in"):
        end_of_text(tokenizer, str(tmp_path / "mine.json"))
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    assert end_of_text(tokenizer, str(tmp_path)) == 1
    (tmp_path / "config.json").write_text('{"eos_token_id"')
    with pytest.raises(UserError, match=r"config\.json: cannot be read"):
        end_of_text(tokenizer, str(tmp_path))

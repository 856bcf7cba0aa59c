import hashlib
import json
import shutil
import tarfile
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import webdataset
from tokenizers import Tokenizer

from kerple.data.manifest import SPLITS, read_manifest, signed
from kerple.data.prepare.encode import digest_of
from kerple.data.prepare.settings import Recipe
from kerple.data.shards import TokenStream, header
from kerple.data.verify import read_offsets, verify


def expected_streams(documents: list[str], folder: Path) -> dict[str, list[int]]:
    """What the shards must hold, made one document at a time."""
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    recipe = Recipe("", shares=(0.8, 0.1, 0.1))
    streams: dict[str, list[int]] = {split: [] for split in SPLITS}
    for part in range(3):
        for text in documents[part::3]:
            streams[recipe.split_of(digest_of(text.encode()))] += [*tokenizer.encode(text).ids, 0]
    return streams


def test_shards_hold_every_document_once_in_order(prepared: Path, documents: list[str]) -> None:
    manifest = read_manifest(prepared)
    for split, expected in expected_streams(documents, prepared).items():
        stream = TokenStream(prepared, manifest, split)
        assert stream.read(0, len(stream)).tolist() == expected
        offsets = read_offsets(prepared, manifest, split)
        assert offsets.tolist() == [0, *(np.flatnonzero(np.array(expected) == 0)[:-1] + 1).tolist()]
    assert sum(s.documents for s in manifest.splits.values()) == len(documents)
    assert sum(s.bytes for s in manifest.splits.values()) == sum(len(text.encode()) for text in documents)
    assert manifest.layout.shards(manifest.splits["train"].tokens) > 2  # or the shards' borders are not tested


@pytest.mark.parametrize(("start", "count"), [(0, 1), (999, 2), (500, 2500), (2999, 2), (1000, 1000), (0, 0)])
def test_reading_across_runs_and_shards(prepared: Path, documents: list[str], start: int, count: int) -> None:
    stream = TokenStream(prepared, read_manifest(prepared), "train")

    expected = expected_streams(documents, prepared)["train"]
    assert stream.read(start, count).tolist() == expected[start : start + count]


def test_webdataset_and_tar_read_the_same(prepared: Path) -> None:
    manifest = read_manifest(prepared)
    split = manifest.splits["train"]
    shards = [str(prepared / manifest.layout.shard("train", i)) for i in range(manifest.layout.shards(split.tokens))]

    dataset = webdataset.DataPipeline(webdataset.SimpleShardList(shards), webdataset.tarfile_to_samples())
    payloads = b"".join(sample["u16"] for sample in dataset)

    assert (
        np.frombuffer(payloads, "<u2").tolist()
        == TokenStream(prepared, manifest, "train").read(0, split.tokens).tolist()
    )
    with tarfile.open(shards[0]) as archive:
        assert archive.getnames() == [f"train-{i:08d}.u16" for i in range(3)]


def test_full_size_payloads_start_where_memory_can_be_mapped() -> None:
    assert len(header("train-00000000.u16", 2 << 20)) == 512


@pytest.fixture
def copied(prepared: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(prepared, tmp_path / "copy"))


def truncate(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-700])


def flip(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[700] ^= 1
    path.write_bytes(content)


def replace_header(**changes: object) -> Callable[[Path], None]:
    def change(path: Path) -> None:
        content = bytearray(path.read_bytes())
        member = tarfile.TarInfo.frombuf(bytes(content[:512]), "utf-8", "strict")
        for name, value in changes.items():
            setattr(member, name, value)
        content[:512] = member.tobuf(tarfile.USTAR_FORMAT)
        path.write_bytes(content)

    return change


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (truncate, "truncated"),
        (flip, "member train-00000000.u16: its sha256"),
        (replace_header(type=tarfile.SYMTYPE, linkname="/etc/passwd"), "found a symbolic link"),
        (replace_header(type=tarfile.LNKTYPE, linkname="x"), "found a hard link"),
        (replace_header(type=tarfile.CHRTYPE), "found a type"),
        (replace_header(name="../../outside.u16"), "outside"),
        (replace_header(name="/etc/passwd"), "/etc/passwd"),
        (replace_header(size=10), "of 10 bytes"),
        (Path.unlink, "no such file"),
    ],
)
def test_a_damaged_shard_is_named_with_its_member(copied: Path, damage: Callable[[Path], None], message: str) -> None:
    shard = copied / "train-00000.tar"
    damage(shard)
    with pytest.raises(ValueError, match=message) as caught:
        TokenStream(copied, read_manifest(copied), "train").read(0, 10)
    assert str(shard) in str(caught.value)
    with pytest.raises(ValueError, match=message):
        verify(copied, read_manifest(copied), progress=False)


def test_a_token_beyond_the_vocabulary_is_refused_though_its_checksum_is_right(copied: Path) -> None:
    shard = copied / "train-00000.tar"
    content = bytearray(shard.read_bytes())
    content[512:514] = (300).to_bytes(2, "little")
    shard.write_bytes(content)
    manifest = json.loads((copied / "manifest.json").read_text())
    run = manifest["splits"]["train"]["shards"][0]["runs"][0]
    run["sha256"] = hashlib.sha256(content[512 : 512 + 2000]).hexdigest()
    (copied / "manifest.json").write_text(signed(manifest))

    with pytest.raises(
        ValueError, match=r"train-00000\.tar: member train-00000000\.u16: got token 300, expected at most 299"
    ):
        TokenStream(copied, read_manifest(copied), "train").read(0, 1)


@pytest.mark.parametrize("name", ["tokenizer.json", "train.offsets", "test.offsets"])
def test_other_files_are_verified_too(copied: Path, name: str) -> None:
    flip_last = bytearray((copied / name).read_bytes())
    flip_last[-1] ^= 1
    (copied / name).write_bytes(flip_last)
    with pytest.raises(ValueError, match=name):
        verify(copied, read_manifest(copied), progress=False)


@pytest.mark.parametrize("lie", [[1], [2**63], [5, 5], [7, 6], [-1]])
def test_documents_that_cannot_be_are_refused_though_their_checksum_is_right(copied: Path, lie: list[int]) -> None:
    path = copied / "train.offsets"
    offsets = np.fromfile(path, "<u8")
    if lie == [1]:
        offsets[0] = 1
    elif lie == [-1]:
        offsets[-1] = read_manifest(copied).splits["train"].tokens
    else:
        offsets[1 : 1 + len(lie)] = lie
    offsets.tofile(path)
    manifest = json.loads((copied / "manifest.json").read_text())
    manifest["splits"]["train"]["offsets"]["sha256"] = hashlib.sha256(path.read_bytes()).hexdigest()
    (copied / "manifest.json").write_text(signed(manifest))
    with pytest.raises(ValueError, match=r"train\.offsets: must rise from 0 to below the [0-9]+ tokens"):
        read_offsets(copied, read_manifest(copied), "train")

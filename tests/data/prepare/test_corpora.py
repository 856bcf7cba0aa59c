import gzip
import io
import json
import tarfile
from collections.abc import Callable
from pathlib import Path

import pyarrow
import pytest
import zstandard
from pyarrow import parquet

from kerple.data.prepare.corpora import sources
from kerple.data.prepare.encode import parse
from kerple.data.prepare.packages import standard_library, top_modules
from kerple.data.prepare.record_tables import Parquet
from kerple.data.prepare.sources import JsonLines, Source, Tar, lines

TEXTS = [f"document {i} " * (i + 1) for i in range(25)]
LINES = "".join(json.dumps({"text": text}) + "\n" for text in TEXTS).encode()
LIMIT = 1 << 20


def read(corpus: Path | str, limit: int = LIMIT) -> list[str]:
    """All texts of a corpus; each also read again from its own place, as a resumed run would."""
    texts = []
    for source in sources(str(corpus)):
        records = list(source.records((0, 0), limit))
        for i, record in enumerate(records):
            assert [r.raw for r in source.records(record.next, limit)] == [r.raw for r in records[i + 1 :]]
            texts.append(parse(record.raw, record.json, "text")[0])
    return texts


def test_json_lines_plain_and_compressed(tmp_path: Path) -> None:
    half = LINES.index(b"\n", len(LINES) // 2) + 1
    (tmp_path / "a.jsonl").write_bytes(LINES)
    (tmp_path / "b.jsonl.gz").write_bytes(gzip.compress(LINES))
    compress = zstandard.ZstdCompressor().compress
    (tmp_path / "c.jsonl.zst").write_bytes(
        compress(LINES[:half]) + compress(LINES[half:])
    )  # two frames, as pzstd writes
    for name in ("a.jsonl", "b.jsonl.gz", "c.jsonl.zst"):
        assert read(tmp_path / name) == TEXTS
    assert read(tmp_path) == TEXTS * 3
    assert read(tmp_path / "*.gz") == TEXTS
    assert read(f"file://{tmp_path}/a.jsonl") == TEXTS


def test_a_tar_of_json_lines_passes_by_what_is_no_file(tmp_path: Path) -> None:
    with tarfile.open(tmp_path / "all.tar", "w") as archive:
        for name, content in (
            ("x/1.jsonl.zst", zstandard.compress(LINES)),
            ("x/2.jsonl", LINES),
            ("x/3.txt", b"plain"),
            ("../4.txt", b"outside"),  # a name only: nothing is ever extracted
        ):
            member = tarfile.TarInfo(name)
            member.size = len(content)
            archive.addfile(member, io.BytesIO(content))
        link = tarfile.TarInfo("x/link.txt")
        link.type, link.linkname = tarfile.SYMTYPE, "/etc/passwd"
        archive.addfile(link)
    assert read(tmp_path / "all.tar") == [*TEXTS, *TEXTS, "plain", "outside"]


def test_a_folder_of_text_files(tmp_path: Path) -> None:
    (tmp_path / "b").mkdir()
    for name, text in (("b/2.txt", "two"), ("a.md", "one"), (".hidden", "no")):
        (tmp_path / name).write_text(text)
    assert read(tmp_path) == ["one", "two"]


def test_parquet(tmp_path: Path) -> None:
    table = pyarrow.table({"text": [*TEXTS, None], "n": list(range(26))})
    parquet.write_table(table, tmp_path / "t.parquet", row_group_size=7)
    assert read(tmp_path / "t.parquet") == [*TEXTS, ""]
    with pytest.raises(ValueError, match=r"t\.parquet: has no column 'body'"):
        list(sources(str(tmp_path), "body")[0].records((0, 0), LIMIT))
    (tmp_path / "t.parquet").write_bytes(b"PAR1 nothing")
    with pytest.raises(ValueError, match=r"t\.parquet"):
        list(sources(str(tmp_path))[0].records((0, 0), LIMIT))


def test_a_huge_line_is_never_held(tmp_path: Path) -> None:
    class Endless(io.RawIOBase):
        """A line of 200 MB, then a good one; fails when asked for all of it at once."""

        left = 200

        def read(self, size: int = -1) -> bytes:
            assert 0 < size <= 1 << 20
            self.left -= 1
            return b"x" * size if self.left > 0 else b"\ngood\n" if self.left == 0 else b""

        def tell(self) -> int:
            return 0

    records = list(lines(Endless(), "huge", 0, 0, 1 << 21, Endless(), 0))
    assert [(r.raw, r.fault) for r in records] == [(b"", "more than 2097152 bytes"), (b"good", None)]


@pytest.mark.parametrize("cut", [True, False])
@pytest.mark.parametrize("ending", ["gz", "zst"])
def test_a_damaged_file_is_one_fault_with_its_name(tmp_path: Path, ending: str, cut: bool) -> None:
    packed = gzip.compress(LINES) if ending == "gz" else zstandard.compress(LINES)
    path = tmp_path / f"broken.jsonl.{ending}"
    path.write_bytes(packed[:-20] if cut else b"\1" * 9 + packed)
    *_, last = sources(str(path))[0].records((0, 0), LIMIT)
    assert last.fault is not None
    assert last.fault.startswith("damaged file")
    assert str(path) in last.name


def tar_of_five() -> bytes:
    packed = io.BytesIO()
    with tarfile.open(fileobj=packed, mode="w") as archive:
        for number in range(5):
            member = tarfile.TarInfo(f"{number}.jsonl")
            member.size = len(LINES)
            archive.addfile(member, io.BytesIO(LINES))
    return packed.getvalue()


def without_third_header(content: bytes) -> bytes:
    place = content.index(b"2.jsonl")
    return content[:place] + b"x" * 512 + content[place + 512 :]


def before_fourth_member(content: bytes) -> bytes:
    return content[: content.index(b"3.jsonl")]


@pytest.mark.parametrize("ending", ["tar", "tar.gz", "tgz", "tar.zst"])
@pytest.mark.parametrize("damage", [without_third_header, before_fourth_member])
def test_a_tar_that_lost_members_does_not_look_like_one_that_ended(
    tmp_path: Path, ending: str, damage: Callable[[bytes], bytes]
) -> None:
    pack = {"tar": bytes, "tar.zst": zstandard.compress}.get(ending, gzip.compress)
    path = tmp_path / f"broken.{ending}"
    path.write_bytes(pack(tar_of_five()))
    assert len(list(sources(str(path))[0].records((0, 0), LIMIT))) == 5 * LINES.count(b"\n")
    path.write_bytes(pack(damage(tar_of_five())))
    with pytest.raises(ValueError, match=rf"broken\.{ending}: is not a tar file that can be read to its end"):
        list(sources(str(path))[0].records((0, 0), LIMIT))


@pytest.mark.parametrize("ending", ["tar.gz", "tar.zst"])
@pytest.mark.parametrize("damage", [lambda b: b[:-20], lambda b: b"\1" * 9 + b, lambda b: b[:40] + b"\7" * 9 + b[49:]])
def test_a_damaged_tar_is_named(tmp_path: Path, ending: str, damage: Callable[[bytes], bytes]) -> None:
    path = tmp_path / f"broken.{ending}"
    path.write_bytes(damage((gzip.compress if ending == "tar.gz" else zstandard.compress)(tar_of_five())))
    with pytest.raises(ValueError, match=r"broken\.tar\..*: is not a tar file that can be read to its end"):
        list(sources(str(path))[0].records((0, 0), LIMIT))


def test_a_damaged_text_file_is_one_fault_with_its_name(tmp_path: Path) -> None:
    (tmp_path / "a.txt.gz").write_bytes(gzip.compress(b"some text " * 99)[:-9])
    (tmp_path / "b.txt.zst").write_bytes(b"no zstd at all")
    (tmp_path / "c.txt").write_bytes(b"good")
    records = list(sources(str(tmp_path))[0].records((0, 0), LIMIT))
    assert [(Path(r.name).name, r.raw, (r.fault or "")[:12]) for r in records] == [
        ("a.txt.gz", b"", "damaged file"), ("b.txt.zst", b"", "damaged file"), ("c.txt", b"good", ""),
    ]  # fmt: skip


def test_the_built_in_corpus_is_large_and_leaves_packages_out() -> None:
    corpus = standard_library()
    assert corpus.paths == standard_library().paths != sorted(corpus.paths)
    assert len(corpus.paths) > 500
    assert not any("site-packages" in path for path in corpus.paths)


def test_the_modules_come_in_alphabetical_order_without_packages() -> None:
    names = [Path(path).name for path in top_modules().paths]
    assert names == sorted(names)
    assert "argparse.py" in names
    assert sources("modules")[0].paths == top_modules().paths
    assert set(top_modules().paths) < set(standard_library().paths)
    assert len({Path(path).parent for path in top_modules().paths}) == 1


@pytest.mark.parametrize("corpus", ["pipe:cat /etc/passwd", "zip://a::http://b/c.zip", "github://a:b@/c", "sh://x"])
def test_what_is_no_plain_file_is_refused(corpus: str) -> None:
    with pytest.raises(ValueError, match="expected a local path or a URL"):
        sources(corpus)


def test_nothing_there(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="holds no files"):
        sources(str(tmp_path / "nowhere"))


def test_a_missing_optional_package_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(__import__("sys").modules, "datasets", None)
    with pytest.raises(ValueError, match="pip install datasets"):
        list(sources("hf:org/name")[0].records((0, 0), LIMIT))


def test_a_hub_dataset_is_streamed_and_goes_on_where_it_stopped(monkeypatch: pytest.MonkeyPatch) -> None:
    class Rows(list):  # type: ignore[type-arg]
        def skip(self, count: int) -> "Rows":
            return Rows(self[count:])

    class Datasets:
        @staticmethod
        def load_dataset(path: str, config: str | None, *, split: str, streaming: bool) -> Rows:
            assert (path, config, split, streaming) == ("org/name", "en", "train", True)
            return Rows({"text": text} for text in TEXTS)

    monkeypatch.setitem(__import__("sys").modules, "datasets", Datasets)
    assert read("hf:org/name:en") == TEXTS
    with pytest.raises(ValueError, match=r"corpus: hf:org/name:en: has no column 'body', but text"):
        list(sources("hf:org/name:en", "body")[0].records((0, 0), LIMIT))


def test_links_to_files_are_read(tmp_path: Path) -> None:
    (tmp_path / "cache").mkdir()
    (tmp_path / "cache/abc").write_bytes(LINES)
    (tmp_path / "snapshot").mkdir()
    (tmp_path / "snapshot/a.jsonl").symlink_to("../cache/abc")
    (tmp_path / "snapshot/gone.jsonl").symlink_to("../cache/nothing")
    assert read(tmp_path / "snapshot") == read(f"{tmp_path}/snapshot/*.jsonl") == TEXTS


def test_a_name_with_the_marks_of_a_pattern_is_a_name_where_it_exists(tmp_path: Path) -> None:
    (tmp_path / "[2020] x").mkdir()
    (tmp_path / "[2020] x/a.jsonl").write_bytes(LINES)
    assert read(tmp_path / "[2020] x") == TEXTS


@pytest.mark.parametrize(
    ("name", "kind"), [("x.jsonl.gz?download=1", JsonLines), ("x.tar#part", Tar), ("x.parquet?a=b.tar", Parquet)]
)
def test_what_a_web_address_asks_for_is_no_part_of_the_name(name: str, kind: type[Source]) -> None:
    (source,) = sources(f"https://127.0.0.1:9/{name}")
    assert type(source) is kind


def test_a_sparse_member_of_a_tar_is_a_fault_and_is_never_unpacked(tmp_path: Path) -> None:
    hole = tarfile.TarInfo("hole.jsonl")
    hole.pax_headers = {"GNU.sparse.major": "1", "GNU.sparse.minor": "0", "GNU.sparse.realsize": str(1 << 50)}
    hole.size = 512
    with tarfile.open(tmp_path / "t.tar", "w", format=tarfile.PAX_FORMAT) as archive:
        archive.addfile(hole, io.BytesIO(b"0\n".ljust(512, b"\0")))
        member = tarfile.TarInfo("a.jsonl")
        member.size = len(LINES)
        archive.addfile(member, io.BytesIO(LINES))
    records = list(sources(str(tmp_path / "t.tar"))[0].records((0, 0), LIMIT))
    assert [(r.name.rpartition(" ")[2], r.lost, r.raw) for r in records if r.fault == "sparse file"] == [
        ("hole.jsonl", 1 << 50, b"")
    ]
    assert [parse(r.raw, r.json, "text")[0] for r in records if not r.fault] == TEXTS


def test_a_string_of_a_table_that_is_not_unicode_is_one_fault(tmp_path: Path) -> None:
    broken = pyarrow.array([b"good", b"caf\xe9", b"better"], pyarrow.binary()).view(pyarrow.string())
    parquet.write_table(pyarrow.table({"text": broken}), tmp_path / "t.parquet")
    records = list(sources(str(tmp_path / "t.parquet"))[0].records((0, 0), LIMIT))
    assert [(r.raw, r.fault, r.lost) for r in records] == [
        (b"good", None, 0),
        (b"", "not Unicode", 4),
        (b"better", None, 0),
    ]

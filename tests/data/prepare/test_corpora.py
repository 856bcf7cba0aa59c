import gzip
import io
import json
import os
import sys
import tarfile
from itertools import combinations
from pathlib import Path
from types import SimpleNamespace

import fsspec
import numpy as np
import pyarrow
import pytest
import webdataset
import zstandard
from pyarrow import parquet
from tokenizers import Tokenizer

from kerple.base.errors import UserError
from kerple.data.file_opening import decompress
from kerple.data.prepare.build import prepare
from kerple.data.prepare.corpora import CORPORA, find_corpus, standard_library
from kerple.data.prepare.readers import Document, Fault, as_ids, read_lines
from kerple.data.shard_options import ShardOptions
from kerple.data.shards import Folder, TokenStream
from kerple.data.tokenizer import vocabulary_size
from tests.data.conftest import small_build
from tests.web_server import serving

TEXTS = [f"document {i} " * (i + 1) for i in range(25)]
LINES = "".join(json.dumps({"text": text}) + "\n" for text in TEXTS).encode()


def read(corpus: Path | str, text_field: str = "text") -> list[str]:
    """The texts of a corpus, and the reasons of its faults."""
    documents = find_corpus(ShardOptions(str(corpus), text_field=text_field)).documents()
    return [document.text if isinstance(document, Document) else document.reason for document in documents]


def test_json_lines_may_be_compressed_and_stand_beside_text_files(tmp_path):
    half = LINES.index(b"\n", len(LINES) // 2) + 1
    (tmp_path / "a.jsonl").write_bytes(LINES)
    (tmp_path / "b.jsonl.gz").write_bytes(gzip.compress(LINES))
    compress = zstandard.ZstdCompressor().compress
    two_frames = compress(LINES[:half]) + compress(LINES[half:])  # as pzstd writes them
    (tmp_path / "c.jsonl.zst").write_bytes(two_frames)
    for name in ("a.jsonl", "b.jsonl.gz", "c.jsonl.zst"):
        assert read(tmp_path / name) == TEXTS
    assert read(tmp_path) == TEXTS * 3
    (tmp_path / "README.md").write_text("about it")
    assert read(tmp_path) == ["about it", *TEXTS * 3]
    assert read(tmp_path / "*.{md,gz}") == ["about it", *TEXTS]
    assert read(tmp_path / "*.gz") == TEXTS
    assert read(f"file://{tmp_path}/a.jsonl") == TEXTS
    zeros = decompress(io.BytesIO(compress(bytes(3_000_000)) + compress(LINES)), "x.zst")
    assert zeros.read() == bytes(3_000_000) + LINES


@pytest.mark.parametrize("other", ["notes.jsonl", "notes.jsonl.gz", "notes.ndjson", "notes.json", "notes.tar"])
def test_a_text_file_and_another_format_of_the_same_name_are_refused(tmp_path, other, monkeypatch):
    (tmp_path / "notes.v1.txt").write_text("one")  # another name
    (tmp_path / other).write_bytes(gzip.compress(LINES) if other.endswith(".gz") else LINES)
    if not other.endswith(".tar"):
        assert read(tmp_path) == [*TEXTS, "one"]
    (tmp_path / "notes.txt").write_text("two")
    with pytest.raises(UserError, match=rf"got .*notes\.txt and .*{other}, which may have the same text"):
        read(tmp_path)
    assert read(tmp_path / "*.txt") == ["two", "one"]
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UserError, match=rf"such as '\*{other.removeprefix('notes')}'"):
        read("*")


SEVERAL = ["a.json", "a.jsonl", "a.jsonl.gz", "a.jsonl.zst", "a.NDJSON", "a.parquet", "a.tar", "a.tar.zst", "a.tgz"]
COPIES = ["a.txt", "a.txt.gz", "a.txt.zst"]


@pytest.mark.parametrize(("one", "other"), [*combinations(sorted(SEVERAL), 2), *combinations(COPIES, 2)])
def test_two_files_of_several_documents_with_one_name_and_compressed_copies_are_refused(tmp_path, one, other):
    for name in ("a.v1.jsonl", one, other):
        (tmp_path / name).write_bytes(LINES)
    advice = "rename or remove one, or give" if one in SEVERAL else "remove one$"
    with pytest.raises(UserError, match=rf"got .*/{one} and .*/{other}, which may have the same text; {advice}"):
        read(tmp_path)


def archive_of(path: Path, *names: str) -> Path:
    contents = {".gz": gzip.compress(LINES), ".npy": np.lib.format.magic(1, 0)}
    with tarfile.open(path, "w") as archive:
        for name in names:
            add(archive, name, contents.get(Path(name).suffix, LINES))
    return path


@pytest.mark.parametrize(
    "names",
    [
        ("x.txt", "x.txt.gz"), ("x.txt", "x.txt"), ("x.txt", "y.txt", "x.txt"), ("x.jsonl", "x.jsonl"),
        ("x.md", "x.md.gz"),
        ("x.jsonl", "x.txt"), ("x.txt", "x.jsonl"), ("x.jsonl", "x.jsonl.gz"), ("x.jsonl", "x.ndjson"),
        ("x.json", "x.jsonl"), ("x.jsonl", "x.npy"), ("x.json", "x.jsonl", "x.txt"), ("d/x.jsonl", "d/x.txt"),
    ],
)  # fmt: skip
def test_two_members_of_a_tar_file_that_may_have_the_same_text_are_refused(tmp_path, names):
    with pytest.raises(UserError, match=r"got .*x\..* (and .*x\..*|twice) in .*a\.tar.*; .*remove one$"):
        read(archive_of(tmp_path / "a.tar", *names))


def test_members_of_a_tar_file_with_other_names_are_all_read(tmp_path):
    names = ("c4.0.jsonl", "c4.1.jsonl.gz", "d/c4.0.jsonl", "e.jsonl", "f.json", "f.v1.json", "g.0.jsonl", "g.txt")
    assert read(archive_of(tmp_path / "a.tar", *names)) == [*TEXTS * 7, LINES.decode()]


@pytest.mark.parametrize("encoding", ["latin-1", "utf-16", "utf-16-le", "cp1252", "shift_jis", "utf-8-sig"])
def test_text_files_are_read_in_the_encoding_of_the_option_and_json_lines_in_utf_8(tmp_path, encoding):
    text = "日本語" if encoding == "shift_jis" else "naïve café"
    (tmp_path / "a.txt").write_bytes(text.encode(encoding))
    (tmp_path / "b.jsonl").write_text(json.dumps({"text": "λ"}, ensure_ascii=False), encoding="utf-8")
    assert [d.text for d in find_corpus(ShardOptions(str(tmp_path), encoding=encoding)).documents()] == [text, "λ"]


def test_the_first_encoding_that_fits_is_used_and_files_that_fit_none_are_named(tmp_path):
    contents = {"a.txt": "λ".encode("utf-8-sig"), "b.txt": "café".encode("latin-1"), "d.txt": b"d"}
    contents |= {
        "c.txt": "λ".encode("utf-16"),
        "e.txt": "text\n".encode("utf-16-le"),
        "image.png": b"\x89PNG\r\n\x1a\n\0\0\0\rIHDR",
    }
    for name, content in contents.items():
        (tmp_path / name).write_bytes(content)
    options = ShardOptions(str(tmp_path), encoding="utf-8,utf-16,latin-1")
    *documents, unmarked, image = find_corpus(options).documents()
    assert [document.text for document in documents] == ["λ", "café", "λ", "d"]
    assert unmarked.reason == image.reason == "not Unicode"
    faults = [d for d in find_corpus(ShardOptions(str(tmp_path))).documents() if isinstance(d, Fault)]
    assert [Path(fault.name).name for fault in faults] == ["b.txt", "c.txt", "e.txt", "image.png"]
    assert {fault.details for fault in faults} == {"it is not utf-8; set data.encoding"}


@pytest.mark.parametrize("encoding", ["utf-9", "base64", "rot13", "utf-8,", "a\0", "undefined", "latin-1,utf-8"])
def test_an_unknown_encoding_and_one_before_others_that_fits_any_file_are_refused(encoding):
    expected = "latin-1 in the last place" if "latin" in encoding else "names of encodings"
    with pytest.raises(UserError, match=rf"data\.encoding: got .*, expected {expected}"):
        ShardOptions("texts", encoding=encoding)


def test_alternatives_in_braces_are_patterns_unless_a_file_has_this_name(tmp_path):
    for name in ("a.txt", "b.md", "c.rst", "x{1,2}.txt", "{open.txt"):
        (tmp_path / name).write_text(name)
    assert read(tmp_path / "*.{txt,md}") == ["a.txt", "b.md", "x{1,2}.txt", "{open.txt"]
    assert read(tmp_path / "{a,b}.{txt,md}") == ["a.txt", "b.md"]
    assert read(tmp_path / "x{1,2}.txt") == ["x{1,2}.txt"]
    assert read(tmp_path / "{open.*") == ["{open.txt"]


@pytest.mark.parametrize("kind", ["jsonl", "ndjson", "json", "JSONL", "Json"])
@pytest.mark.parametrize("packed", ["", ".gz", ".zst", ".GZ", ".ZST"])
def test_the_content_and_not_the_case_of_an_extension_decides_what_is_read(tmp_path, kind, packed):
    pack = {"": bytes, ".gz": gzip.compress, ".zst": zstandard.ZstdCompressor().compress}[packed.lower()]

    def found(content: bytes) -> list[str]:
        (tmp_path / f"c4-train.00000-of-00003.{kind}{packed}").write_bytes(pack(content))
        return read(tmp_path)

    assert found(LINES) == TEXTS
    assert found(LINES.splitlines()[0]) == TEXTS[:1]
    if kind.lower() == "json":  # JSON that is not JSON lines is a text
        entries = [json.loads(line) for line in LINES.splitlines()]
        for content in (entries, entries[0], {"setting": [1]}, 3, []):
            for text in {json.dumps(content, indent=1), json.dumps(content)} - {json.dumps(entries[0])}:
                assert found(text.encode()) == [text]
        assert found(b'{"a": 1}\n{"text": "b"}') == ["no text", "b"]
        (tmp_path / "a.md").write_text("text")
        assert read(tmp_path) == ["text", "no text", "b"]
        assert found(b'{\n"a": 1}') == ["text", '{\n"a": 1}']
    if packed:
        (tmp_path / f"c4-train.00000-of-00003.{kind}{packed}").write_bytes(pack(LINES)[:-30])
        (tmp_path / "a.md").unlink(missing_ok=True)
        assert read(tmp_path)[-1] == "damaged file"


SAMPLES = {
    "a/0.json": b'{"url": "x"}', "a/0.txt": b"zero", "a/0.cls": b"3", "a/1.TXT": b"one", "a/1.jpg": b"\xff\xd8",
    "b/1.cls": b"3", "b/1.json": b'{"text": "two"}', "b/2.txt.gz": gzip.compress(b"three"),
    "b/3.py": b"four", "b/3.pyi": b"five", "b/4.json": b'{\n"key": 6}', "b/5.txt.gz": b"?",
    "b/6.tar": b"member", "b/7.json.GZ": gzip.compress(LINES),
}  # fmt: skip


def add(archive: tarfile.TarFile, name: str, content: bytes) -> None:
    member = tarfile.TarInfo(name)
    member.size = len(content)
    archive.addfile(member, io.BytesIO(content))


def test_a_sample_in_a_tar_file_is_one_document_and_its_metadata_is_no_text(tmp_path):
    with tarfile.open(tmp_path / "a.TAR.GZ", "w:gz") as archive:
        for name, content in SAMPLES.items():
            add(archive, name, content)
    first = ["metadata", "zero", "metadata", "one", "metadata", "metadata", "two", "three", "four", "five"]
    assert read(tmp_path / "a.TAR.GZ") == [*first, '{\n"key": 6}', "damaged file", "tar file inside a tar file", *TEXTS]


@pytest.mark.parametrize(("name", "pack"), [("all.tar", bytes), ("all.tgz", gzip.compress)])
def test_json_lines_and_text_files_of_a_tar_file_are_read_and_links_are_skipped(tmp_path, name, pack):
    # the path of ../4.txt has no effect, because members are not extracted to the disk
    members = {"1.jsonl.zst": zstandard.compress(LINES), "2.jsonl": LINES, "3.txt": b"plain", "../4.txt": b"outside"}
    packed = io.BytesIO()
    with tarfile.open(fileobj=packed, mode="w") as archive:
        for member_name, content in members.items():
            add(archive, member_name, content)
        link = tarfile.TarInfo("x/link.txt")
        link.type, link.linkname = tarfile.SYMTYPE, "/etc/passwd"
        archive.addfile(link)
    (tmp_path / name).write_bytes(pack(packed.getvalue()))
    assert read(tmp_path / name) == [*TEXTS, *TEXTS, "plain", "outside"]
    (tmp_path / name).write_bytes(pack(packed.getvalue()[:2000]))
    with pytest.raises(UserError, match=rf"{name} cannot be read as a tar file to its end"):
        read(tmp_path / name)


def test_text_files_of_a_folder_are_documents_and_hidden_files_are_skipped(tmp_path):
    (tmp_path / "b").mkdir()
    (tmp_path / ".git").mkdir()
    for name, text in (("b/2.txt", "two"), ("a.md", "one"), (".hidden", "no"), (".git/x", "no"), ("c", " \n")):
        (tmp_path / name).write_text(text)
    (tmp_path / "d.txt.gz").write_bytes(gzip.compress(b"three"))
    (tmp_path / "e.txt").write_bytes(b"caf\xe9")
    assert read(tmp_path) == ["one", "two", "empty", "three", "not Unicode"]


def test_a_corpus_at_a_url_is_read(tmp_path):
    (tmp_path / "c.jsonl").write_bytes(LINES)
    with serving(tmp_path) as server:
        corpus = f"{server.url}/c.jsonl?download=1"
        assert read(corpus) == TEXTS
        assert find_corpus(ShardOptions(corpus)).state() is None
        with pytest.raises(UserError, match=r"/none\.jsonl.* cannot be read"):
            read(corpus.replace("c.jsonl", "none.jsonl"))


@pytest.mark.parametrize("name", ["c.jsonl", "c.txt", "c.parquet", "c.tar"])
def test_the_query_of_a_url_which_may_be_a_secret_is_compared_but_not_written(prepared, tmp_path, name, capsys):
    (tmp_path / "served").mkdir()
    if name == "c.parquet":
        parquet.write_table(pyarrow.table({"text": [*TEXTS, None]}), tmp_path / "served" / name)
    elif name == "c.tar":
        archive_of(tmp_path / "served/c.tar", "x.jsonl", "y.txt")
    else:
        (tmp_path / "served" / name).write_bytes(LINES + b"{" * (name == "c.jsonl"))
    options = {"tokenizer": str(prepared), "split_fractions": (0.0, 0.0, 1.0)}  # test documents have names
    with serving(tmp_path / "served") as server:
        corpus = f"{server.url}/{name}?sig=SECRET"
        manifest = small_build(tmp_path / "out", corpus, **options)
        assert manifest.settings["corpus"].startswith(f"{server.url}/{name}?")
        assert small_build(tmp_path / "out", corpus, **options) == manifest
        with pytest.raises(UserError, match=r"settings: corpus was .*; choose another folder"):
            small_build(tmp_path / "out", f"{server.url}/{name}?sig=ANOTHER", **options)
        old = json.loads((tmp_path / "out/manifest.json").read_text())  # earlier versions wrote the query
        old["settings"]["corpus"] = corpus
        files = [*(tmp_path / "out").rglob("*")]
        assert not any(b"SECRET" in path.read_bytes() for path in files if path.is_file())
        (tmp_path / "out/manifest.json").write_text(json.dumps(old))
        small_build(tmp_path / "out", corpus, **options)
    assert "SECRET" not in capsys.readouterr().err


INDEX = """<a href="?C=N;O=D">Name</a> <a href="?C=M;O=A">Last modified</a> <a href="/">Parent Directory</a>
<a href="/w/">here</a> <a href="a.txt">a.txt</a> <a href="b.md">b.md</a> <a href="sub/">sub/</a>"""


@pytest.mark.parametrize("server_kind", ["python", "apache", "memory", "local"])
def test_folders_and_links_of_an_index_are_no_files_at_any_address(tmp_path, server_kind):
    contents = {"w/a.txt": "one", "w/b.md": "two", "w/sub/c.txt": "three"}
    (tmp_path / "w/sub").mkdir(parents=True)
    for name, text in contents.items():
        (tmp_path / name).write_text(text)
    if server_kind == "memory":
        memory = fsspec.filesystem("memory")
        memory.pipe({f"{tmp_path}/{name}": text.encode() for name, text in contents.items()})
    if server_kind == "apache":
        for folder, entries in (("w", INDEX), ("w/sub", '<a href="?C=N;O=D">Name</a> <a href="c.txt">c.txt</a>')):
            (tmp_path / folder / "index.html").write_text(f"<!DOCTYPE html>{entries}")
    with serving(tmp_path) as server:
        root = {"memory": f"memory://{tmp_path}", "local": str(tmp_path)}.get(server_kind, server.url)
        for corpus, expected in {
            "w/*": ["one", "two"], "w/*.txt": ["one"], "w/**": ["one", "two", "three"], "w/*/*": ["three"],
            "w": ["one", "two", "three"], "w/": ["one", "two", "three"], "w/a.txt": ["one"],
        }.items():  # fmt: skip
            if server_kind == "local" and corpus == "w/**":
                continue  # glob of the standard library needs w/**/*
            assert read(f"{root}/{corpus}") == expected, corpus
        if root == server.url:
            assert read(f"{root}/w/a.txt?download=1") == ["one"]


def test_a_link_is_read_unless_it_leaves_the_corpus_or_is_broken(tmp_path):
    (tmp_path / "outside").mkdir()
    (tmp_path / "outside/1").write_bytes(LINES)
    (tmp_path / "corpus/.blobs").mkdir(parents=True)
    (tmp_path / "corpus/.blobs/1").write_bytes(LINES)
    (tmp_path / "corpus/a.jsonl").symlink_to(".blobs/1")
    (tmp_path / "link").symlink_to("corpus")
    for name in ("corpus", "link", "corpus/*.jsonl", "link/a.jsonl"):
        assert read(tmp_path / name) == TEXTS
    for name, target, message in (
        ("b.jsonl", "../outside/1", "is a link out of"),
        ("below", "../outside", "is a link out of"),
        ("b.jsonl", ".blobs/2", "is not a regular file"),
    ):
        (tmp_path / "corpus" / name).symlink_to(target)
        for corpus in ("corpus", "corpus/**/*"):
            with pytest.raises(UserError, match=f"{name} {message}"):
                read(tmp_path / corpus)
        (tmp_path / "corpus" / name).unlink()


@pytest.mark.parametrize("ending", ["txt.gz", "jsonl.gz", "tar.gz"])
def test_a_document_that_does_not_fit_into_memory_is_an_error_of_one_line(tmp_path, monkeypatch, ending):
    class Endless(io.BytesIO):
        def read(self, *size: object) -> bytes:
            raise MemoryError

        __next__ = read

    monkeypatch.setattr("kerple.data.prepare.readers.decompress", lambda file, name: Endless())
    (tmp_path / f"a.{ending}").write_bytes(b"")
    with pytest.raises(UserError, match="does not fit into memory"):
        prepare(ShardOptions(str(tmp_path / f"a.{ending}"), directory=str(tmp_path / "out")))


def test_a_pipe_and_an_unreadable_folder_are_refused_by_name(tmp_path, monkeypatch):
    os.mkfifo(tmp_path / "pipe.txt")  # reading a pipe would never end
    for corpus in ("", "*.txt", "pipe.txt"):
        with pytest.raises(UserError, match=r"pipe\.txt is not a regular file"):
            read(tmp_path / corpus)
    (tmp_path / "snapshot/closed").mkdir(parents=True)
    scan = os.scandir

    def refuse(path: str) -> object:
        if str(path).endswith("closed"):  # file permissions would not stop root
            raise PermissionError(13, "Permission denied", path)
        return scan(path)

    monkeypatch.setattr(os, "scandir", refuse)
    with pytest.raises(UserError, match=r"data\.corpus: .*closed cannot be read \(Permission denied\)"):
        read(tmp_path / "snapshot")


@pytest.mark.parametrize(("ending", "cut"), [("jsonl.gz", True), ("jsonl.zst", False), ("txt.zst", True)])
def test_a_damaged_file_is_one_fault_with_its_name(tmp_path, ending, cut):
    packed = gzip.compress(LINES) if ending.endswith("gz") else zstandard.compress(LINES)
    path = tmp_path / f"broken.{ending}"
    path.write_bytes(packed[:-20] if cut else b"\1" * 9 + packed)
    *_, last = find_corpus(ShardOptions(str(path))).documents()
    assert isinstance(last, Fault)
    assert last.reason == "damaged file"
    assert str(path) in last.name
    assert last.bytes > 0


LINES_OF_JSON = {
    b'{"text": "a"}': "a", b"": "empty", b'{"text": ""}': "empty", b"[1]": "no text", b'{"text": null}': "no text",
    b"{": "broken JSON", b'{"text": "\\ud800"}': "not Unicode", b'{"text": "\xe9"}': "broken JSON",
    b'{"text": "\xc3\xa9"}': "é", b"[" * 200_000: "broken JSON",
}  # fmt: skip


def test_documents_and_faults_of_lines_of_json():
    entries = list(read_lines(io.BytesIO(b"\n".join(LINES_OF_JSON)), "x", "text"))
    found = [entry.text if isinstance(entry, Document) else entry.reason for entry in entries]
    assert found == list(LINES_OF_JSON.values())
    assert list(read_lines(io.BytesIO(b'{"body": "b", "text": 1}'), "x", "body")) == [Document("x:1", "b")]
    assert [entry.name for entry in entries] == [f"x:{number}" for number in range(1, len(entries) + 1)]


def test_parquet_files_are_read(tmp_path):
    broken = pyarrow.array([b"good", b"caf\xe9", b"better"], pyarrow.binary()).view(pyarrow.string())
    parquet.write_table(pyarrow.table({"text": [*TEXTS, None], "n": list(range(26))}), tmp_path / "a.parquet")
    parquet.write_table(pyarrow.table({"text": broken}), tmp_path / "b.parquet")
    assert read(tmp_path) == [*TEXTS, "no text", "good", "not Unicode", "better"]
    with pytest.raises(UserError, match=r"a\.parquet cannot be read .*'body'"):
        read(tmp_path, "body")
    (tmp_path / "a.parquet").write_bytes(b"PAR1 nothing")
    with pytest.raises(UserError, match=r"a\.parquet"):
        read(tmp_path)


def test_a_dataset_of_the_hub_is_streamed_and_no_folder_is_made_if_that_is_impossible(tmp_path, monkeypatch):
    def load_dataset(path: str, config: str | None, *, split: str, streaming: bool) -> list[dict[str, str]]:
        assert (path, config, split, streaming) == ("org/name", "en", "train", True)
        return [{"text": text} for text in TEXTS]

    monkeypatch.setitem(sys.modules, "datasets", SimpleNamespace(load_dataset=load_dataset))  # type: ignore[arg-type]
    assert read("hf:org/name:en") == TEXTS
    with pytest.raises(UserError, match=r"text_field: got 'body', but hf:org/name:en has text"):
        read("hf:org/name:en", "body")
    monkeypatch.setitem(sys.modules, "datasets", None)
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ModuleNotFoundError, match="datasets"):  # the command prints the error as one line
        prepare(ShardOptions("hf:org/name"))
    assert not list(tmp_path.iterdir())


@pytest.mark.slow
def test_files_of_the_standard_library_are_found_and_unknown_urls_are_refused():
    for corpus in ("zip://a::http://b/c.zip", "sh://x", "http://127.0.0.1:9/folder"):
        with pytest.raises(UserError, match=r"expected a local path, or a URL|cannot be read|got 'http"):
            find_corpus(ShardOptions(corpus))
    library, modules = standard_library(), CORPORA["modules"](Path())
    assert library.files == standard_library().files != sorted(library.files)
    assert len(library.files) > 500
    assert not any("site-packages" in path for path in library.files)
    names = [Path(path).name for path in modules.files]
    assert names == sorted(names)
    assert "argparse.py" in names
    assert set(modules.files) < set(library.files)


def test_token_ids_in_a_tar_file_are_used_as_they_are(prepared, tmp_path, monkeypatch):
    counted = []
    count = lambda tokenizer: counted.append(tokenizer) or vocabulary_size(tokenizer)  # noqa: E731
    monkeypatch.setattr("kerple.data.prepare.corpus_reader.vocabulary_size", count)
    tokenizer = Tokenizer.from_file(str(prepared / "tokenizer.json"))
    end, texts = tokenizer.token_to_id("<|endoftext|>"), ["grey wolves sang", "a mat", "seven cats and a wolf"]
    first, second, third = ([*tokenizer.encode(text).ids] for text in texts)
    unusual = [tokenizer.token_to_id(character) for character in "mat"]  # not what the tokenizer makes of "mat"
    with webdataset.TarWriter(str(tmp_path / "a.tar")) as archive:
        archive.write({"__key__": "a", "npy": np.array([*first, end, *second, end], "uint16"), "json": {"n": 1}})
        archive.write({"__key__": "b", "npy": np.array(unusual), "txt": "the text of this sample is used"})
        archive.write({"__key__": "c", "npy": np.array(third + unusual)})
        for key, content in (("d", np.array([0.5])), ("e", np.array([[1]])), ("f", np.array([10**6]))):
            archive.write({"__key__": key, "npy": content})
        pickled = io.BytesIO()
        np.save(pickled, np.array([{}], object), allow_pickle=True)
        archive.write({"__key__": "g", "npy": pickled.getvalue()})
    options = {"split_fractions": (1.0, 0.0, 0.0), "max_dropped_fraction": 1.0, "tokenizer": str(prepared)}
    manifest = small_build(tmp_path / "out", tmp_path / "a.tar", **options)
    assert len(counted) == 1  # not for each document
    expected = [*first, end, *second, end, *tokenizer.encode("the text of this sample is used").ids, end]
    assert TokenStream(Folder(tmp_path / "out"), "train")[:].tolist() == [*expected, *third, *unusual, end]
    assert manifest.splits["train"].documents == 4
    assert manifest.left_out == {
        "a token id outside the tokenizer": 1, "damaged file": 1, "metadata": 2, "no token ids": 2
    }  # fmt: skip
    with pytest.raises(
        UserError, match=r"got a tokenizer that is trained, but .*a.npy has token ids, expected the tok"
    ):
        small_build(tmp_path / "bpe", tmp_path / "a.tar")


def test_a_file_of_token_ids_with_a_damaged_header_is_a_fault():
    good = io.BytesIO()
    np.save(good, np.arange(30))
    header, archive = good.getvalue()[:128], io.BytesIO()
    np.savez(archive, np.arange(30))
    damaged = [archive.getvalue(), b"PK\3\4", header.replace(b"(30,)", b"(30,("), header.replace(b"<i8", b"i,,")]
    damaged += [header.replace(b"(30,)", b"(%d,)" % size).replace(b" " * 30, b"", 1) for size in (10**15, 10**24)]
    for content in damaged:
        if content.startswith(b"\x93NUMPY"):  # with the right length of the header
            content = content[:8] + (len(content) - 10).to_bytes(2, "little") + content[10:]
        assert isinstance(fault := as_ids(content, "a.npy"), Fault)
        assert (fault.reason, fault.bytes) == ("damaged file", len(content))
    assert as_ids(good.getvalue(), "a.npy") == Document("a.npy", "", ids=tuple(range(30)))


def test_files_of_token_ids_outside_a_tar_file_and_compressed_ones_name_the_place_for_them(tmp_path):
    np.save(tmp_path / "a.npy", np.arange(30))
    with tarfile.open(tmp_path / "b.tar", "w") as archive:
        add(archive, "c.npy.gz", gzip.compress((tmp_path / "a.npy").read_bytes()))
    details = [fault.details for fault in find_corpus(ShardOptions(str(tmp_path))).documents()]
    expected = "token ids are only read from .npy files inside a tar file"
    assert [each.partition(",")[0] for each in details] == [expected] * 2

import errno
import gzip
import json
import os
import re
import shutil
import warnings
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np
import pytest
import zstandard
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, models

from kerple.base.errors import UserError
from kerple.cli import inspect_shards, prepare
from kerple.data.evaluation_text import ShardText
from kerple.data.manifest import token_dtype
from kerple.data.prepare import build
from kerple.data.prepare.corpora import find_corpus
from kerple.data.prepare.corpus_reader import split_of
from kerple.data.shard_options import ShardOptions
from kerple.data.shards import BLOCK, Folder, TokenStream, verify
from kerple.data.tokenizer import load_tokenizer, train_tokenizer, vocabulary_size
from tests.data.conftest import contents, small_build, write_lines


def test_a_preparation_continues_after_a_full_disk_or_a_stop_at_any_write(json_lines, prepared, tmp_path, monkeypatch):
    """Shards, descriptions of parts, the tokenizer, settings and the manifest are written."""
    writes, stop_at = 0, 0

    def stopping(path: Path, content: bytes | str, durable: bool = True) -> None:
        nonlocal writes
        writes += 1
        if writes == stop_at:
            raise OSError(errno.ENOSPC, "No space left on device")
        real(path, content, durable)
        if writes == -stop_at:
            raise KeyboardInterrupt

    real = build.write
    for module in ("kerple.data.prepare.build", "kerple.data.shards", "kerple.data.manifest"):
        monkeypatch.setattr(f"{module}.write", stopping)
    small_build(tmp_path / "whole", json_lines)
    total = writes
    assert total > 40
    for stop in (2, total // 2, total):
        for stop_at in (stop, -stop):
            folder, writes = tmp_path / f"at{stop_at}", 0
            with pytest.raises((OSError, KeyboardInterrupt)):
                small_build(folder, json_lines)
            stop_at = 0
            small_build(folder, json_lines)
            assert contents(folder) == contents(prepared)
            shutil.rmtree(folder)


def stop_before_the_manifest(*arguments: Path, **options: object) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(build, "_check_documents", lambda *_: (_ for _ in ()).throw(KeyboardInterrupt))
        with pytest.raises(KeyboardInterrupt):
            small_build(*arguments, **options)


def test_finished_parts_are_kept_and_other_settings_refused(json_lines, prepared, tmp_path, monkeypatch):
    stop_before_the_manifest(tmp_path, json_lines)
    (tmp_path / "parts").mkdir()  # a folder of the user
    monkeypatch.setattr("kerple.data.prepare.workers.tokenise", lambda *_: pytest.fail("tokenised again"))
    with pytest.raises(UserError, match="prepared with other settings: drop_duplicates was False, is True"):
        small_build(tmp_path, json_lines, drop_duplicates=True)
    assert small_build(tmp_path, json_lines).splits == Folder(str(prepared)).manifest.splits
    assert (tmp_path / "parts").exists()


def test_a_finished_part_whose_text_has_changed_is_tokenised_again(documents, tmp_path):
    corpus = write_lines(tmp_path / "c.jsonl", documents)
    stop_before_the_manifest(tmp_path / "out", corpus)
    corpus.write_text(corpus.read_text().replace("wolves", "wolvez", 1))  # the size stays, and so does `Corpus.state`
    changed = small_build(tmp_path / "out", corpus, tokenizer="bpe")
    assert changed.splits == small_build(tmp_path / "fresh", corpus, tokenizer=str(tmp_path / "out")).splits


def test_a_tokenizer_whose_text_has_changed_is_trained_again(documents, tmp_path):
    corpus = write_lines(tmp_path / "c.jsonl", documents)
    stop_before_the_manifest(tmp_path / "out", corpus)
    before, times = load_tokenizer(str(tmp_path / "out")).to_str(), corpus.stat()
    corpus.write_text(corpus.read_text().replace("wolves", "xqxqxq").replace("seven", "zjzjz"))
    os.utime(corpus, ns=(times.st_atime_ns, times.st_mtime_ns))  # as by a copy that keeps the times
    assert small_build(tmp_path / "out", corpus) == small_build(tmp_path / "fresh", corpus)
    assert load_tokenizer(str(tmp_path / "out")).to_str() != before
    verify(Folder(tmp_path / "out"))


def test_the_tokenizer_of_the_user_is_used_where_a_trained_one_is_part_of_the_package(prepared, tmp_path):
    options = ShardOptions("code", str(prepared), 2048, str(tmp_path))
    given = build._accepted(load_tokenizer(options.tokenizer), options)
    tokenizer = build._corpus_tokenizer(tmp_path, options, find_corpus(options), {}, given)
    assert tokenizer.to_str() == Tokenizer.from_file(str(prepared / "tokenizer.json")).to_str()


def test_a_corpus_or_a_split_without_text_is_reported(documents, tmp_path, capsys):
    corpus = write_lines(tmp_path / "c.jsonl", documents)
    with pytest.raises(UserError, match="has no training document"):
        small_build(tmp_path / "out", corpus, tokenizer="bpe", text_field="body", max_dropped_fraction=1.0)
    small_build(tmp_path / "out", corpus, split_fractions=(1.0, 0.0, 0.0))
    assert "out: there is no validation and no test text" in capsys.readouterr().err
    with pytest.raises(UserError, match="the longest document has 0 tokens"):
        ShardText(Folder(tmp_path / "out"), "test").document_blocks(8)


def test_duplicates_are_dropped_by_option_and_bad_lines_are_counted_or_fatal(documents, tmp_path, capsys):
    corpus = write_lines(tmp_path / "bad.jsonl", documents + documents[:40] + documents[:10])
    unique = small_build(tmp_path / "unique", corpus, drop_duplicates=True)
    assert unique.left_out == {"duplicates": 50}
    assert sum(s.documents for s in unique.splits.values()) == len(documents)
    good = small_build(tmp_path / "good", write_lines(corpus, documents))
    corpus.write_bytes(b'{"text": "abc\n\n' + corpus.read_bytes() + b'{"text": 7}\n{"text": "\\ud800 alone"}\n{')
    left_out = r"2 × broken JSON \(first: .*bad\.jsonl:1\); 1 × no text \(.*:303.*\); 1 × not Unicode \(.*:304\)"
    with pytest.raises(UserError, match=rf"data\.max_dropped_fraction: got .* be used: {left_out}"):
        small_build(tmp_path / "out", corpus, max_dropped_fraction=0.0)
    manifest = small_build(tmp_path / "out", corpus, max_dropped_fraction=1.0)
    output = capsys.readouterr().err
    assert re.search(left_out, output)
    for line, reason in ((1, "broken JSON"), (303, "no text"), (304, "not Unicode"), (305, "broken JSON")):
        assert f"bad.jsonl:{line}: {reason}\n" in output
    assert manifest.left_out == {"broken JSON": 2, "empty": 1, "no text": 1, "not Unicode": 1}
    assert manifest.splits == good.splits


DAMAGES = {
    "cut to 30 bytes": lambda content: content[:30],
    "another start": lambda content: b"\1" * 9 + content[9:],
    "another end": lambda content: content[:-9] + b"\1" * 9,
}


@pytest.mark.parametrize("damage", DAMAGES)
@pytest.mark.parametrize("ending", ["txt.gz", "txt.zst", "jsonl.gz", "jsonl.zst"])
def test_a_damaged_file_is_refused_however_much_of_it_can_be_read(documents, prepared, tmp_path, ending, damage):
    (corpus := tmp_path / "corpus").mkdir()
    content = write_lines(corpus / "a.jsonl", documents).read_bytes()
    packed = (gzip.compress if ending.endswith("gz") else zstandard.ZstdCompressor(write_checksum=True).compress)(
        content
    )
    (corpus / f"b.{ending}").write_bytes(DAMAGES[damage](packed))
    options = {"tokenizer": str(prepared), "part": 10**6}
    expected = rf"data\.max_dropped_fraction: got 0\.01, expected 1, .* 1 × damaged file \(first: .*b\.{ending}"
    with pytest.raises(UserError, match=expected):
        small_build(tmp_path / "out", corpus, **options)
    assert small_build(tmp_path / "out", corpus, max_dropped_fraction=1.0, **options).left_out == {"damaged file": 1}


def test_a_refused_corpus_is_prepared_after_a_correction_of_options_or_files(documents, prepared, tmp_path):
    corpus = tmp_path / "texts"
    corpus.mkdir()
    for number, document in enumerate(documents):
        encoding = "utf-8" if number % 3 else "latin-1"
        (corpus / f"{number}.txt").write_bytes(f"{document} é".encode(encoding, "replace"))
    options = {"tokenizer": str(prepared), "split_fractions": (0.6, 0.2, 0.2)}
    with pytest.raises(UserError, match=r"data\.max_dropped_fraction: got 0\.01, .* set data\.encoding\)"):
        small_build(tmp_path / "out", corpus, **options)
    corrected = small_build(tmp_path / "out", corpus, encoding="utf-8,latin-1", **options)
    assert corrected == small_build(tmp_path / "new", corpus, encoding="utf-8,latin-1", **options)
    with pytest.raises(UserError, match="max_dropped_fraction"):
        small_build(tmp_path / "again", corpus, **options)
    for number, document in enumerate(documents):
        (corpus / f"{number}.txt").write_text(f"{document} é")
    small_build(tmp_path / "again", corpus, **options)
    verify(Folder(str(tmp_path / "again")))


def test_tokens_of_a_large_vocabulary_have_four_bytes(prepared, json_lines, tmp_path, monkeypatch):
    assert (token_dtype(1 << 16), token_dtype((1 << 16) + 1)) == (np.uint16, np.uint32)
    for module in ("manifest", "prepare.build"):
        monkeypatch.setattr(f"kerple.data.{module}.token_dtype", lambda _: np.dtype("<u4"))
    small_build(tmp_path, json_lines)
    verify(Folder(str(tmp_path)))
    monkeypatch.undo()
    expected = TokenStream(Folder(str(prepared)), "train")
    tokens = np.concatenate([np.fromfile(path, "<u4")[BLOCK // 4 :] for path in sorted(tmp_path.glob("train-*"))])
    assert tokens[tokens > 0].tolist() == [t for t in expected[:].tolist() if t]  # 0 is padding too


def test_splits_have_their_fractions_and_the_tokenizer_learns_from_training_text_only(tmp_path):
    splits = [split_of(str(i).encode(), (0.949, 0.05, 0.001)) for i in range(40_000)]
    assert abs(splits.count("train") / 40_000 - 0.949) < 0.005
    assert abs(splits.count("test") / 40_000 - 0.001) < 0.0008
    fractions = (0.5, 0.25, 0.25)
    every = [f"{n}: " + f"{word} " * 30 for n in range(100) for word in ("seen", "kept")]
    texts = [text for text in every if (split_of(text.encode(), fractions) == "train") == ("seen" in text)]
    manifest = small_build(tmp_path / "out", write_lines(tmp_path / "c.jsonl", texts), split_fractions=fractions)
    learned = Tokenizer.from_file(str(tmp_path / "out" / "tokenizer.json")).get_vocab()
    assert manifest.splits["test"].documents > 0
    assert any("seen" in piece for piece in learned)
    assert not any("ep" in piece or "pt" in piece for piece in learned)


def test_a_corpus_that_has_changed_is_noticed(documents, tmp_path):
    (folder := tmp_path / "corpus").mkdir()
    one, two = (write_lines(folder / f"{name}.jsonl", documents) for name in ("one", "two"))
    small_build(tmp_path / "out", folder)
    os.utime(one, (0, 0))  # as in a copy, which is the same corpus
    small_build(tmp_path / "out", folder)
    two.rename(folder / "three.jsonl")
    with pytest.raises(UserError, match=r"files was '2 files, .* is '2 files, .*; choose another folder"):
        small_build(tmp_path / "out", folder)
    shutil.rmtree(folder)  # shards can be used without their corpus
    small_build(tmp_path / "out", folder)


def test_a_tokenizer_that_has_changed_is_noticed_and_a_folder_named_code_gets_its_own(documents, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("code").mkdir()
    write_lines(Path("code/c.jsonl"), documents)
    small_build(Path("out"), "./code", vocabulary=2048)
    assert vocabulary_size(load_tokenizer("out")) < 2048  # not the tokenizer of the corpus `code`
    shutil.copy("out/tokenizer.json", "mine.json")
    small_build(Path("other"), "./code", tokenizer="mine.json", vocabulary=2048)
    train_tokenizer(documents, 300).save("mine.json")
    with pytest.raises(UserError, match=r"prepared with another content of mine\.json; choose another folder"):
        small_build(Path("other"), "./code", tokenizer="mine.json", vocabulary=2048)


def test_nothing_of_a_rejected_or_replaced_tokenizer_is_kept(json_lines, documents, tmp_path):
    tokenizer = Tokenizer(models.WordLevel({"[UNK]": 0}, "[UNK]"))
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    directory = tmp_path / "out"
    for vocabulary, message in ((300, "expected an end-of-text token"), (0, "data.vocabulary: got 0")):
        with pytest.raises(UserError, match=message):
            small_build(directory, json_lines, tokenizer=str(tmp_path), vocabulary=vocabulary)
        assert not directory.exists()
    tokenizer.add_special_tokens(["</s>"])
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    stop_before_the_manifest(directory, json_lines, tokenizer=str(tmp_path))
    train_tokenizer(documents, 300).save(str(tmp_path / "tokenizer.json"))
    small_build(directory, json_lines, tokenizer=str(tmp_path))
    small_build(tmp_path / "new", json_lines, tokenizer=str(tmp_path))
    assert contents(directory) == contents(tmp_path / "new")


@pytest.mark.parametrize("name", [".lock", ".parts"])
def test_links_in_an_unfinished_folder_are_refused(json_lines, tmp_path, name):
    stop_before_the_manifest(tmp_path / "out", json_lines)
    (tmp_path / "out" / name).replace(elsewhere := tmp_path / "elsewhere")
    (tmp_path / "out" / name).symlink_to(elsewhere)
    before = {path: path.lstat() for path in (elsewhere, *elsewhere.glob("*"))}
    with pytest.raises(UserError, match=rf"data\.directory: .*{name} is a link; delete it, or choose another folder"):
        small_build(tmp_path / "out", json_lines)
    assert {path: path.lstat() for path in (elsewhere, *elsewhere.glob("*"))} == before


def test_a_folder_inside_the_corpus_or_with_other_shards_is_refused(json_lines, tmp_path):
    with pytest.raises(UserError, match=r"data\.directory: got .*inside the corpus"):
        small_build(json_lines / "below" / "shards", json_lines)
    assert not (json_lines / "below").exists()
    directory = tmp_path / "out"
    small_build(directory, json_lines)
    (directory / ".lock").unlink()
    (directory / ".lock").mkdir()  # so that the folder cannot be locked, not even by root
    assert small_build(directory, json_lines).splits["train"].tokens
    with pytest.raises(UserError, match=r"prepared with other settings: vocabulary was 300, is 400"):
        small_build(directory, json_lines, vocabulary=400)
    (directory / "manifest.json").unlink()  # shards without a manifest are not overwritten
    (directory / ".lock").rmdir()
    with pytest.raises(UserError, match=r"data\.directory: .* has .*\.tar but no manifest"):
        small_build(directory, json_lines)
    for shard in directory.glob("*.tar"):
        shard.unlink()
    (directory / "tokenizer.json").write_text("that of a model")
    with pytest.raises(UserError, match=r"data\.directory: .* has tokenizer\.json but no manifest"):
        small_build(directory, json_lines)
    assert (directory / "tokenizer.json").read_text() == "that of a model"


def test_a_corpus_without_documents_can_be_corrected(json_lines, prepared, tmp_path):
    corpus = tmp_path / "corpus"
    corpus.mkdir()
    write_lines(corpus / "a.jsonl", [""])
    with pytest.raises(UserError, match=r"data\.corpus: .* no document that can be used"):
        small_build(tmp_path / "out", corpus, tokenizer=str(prepared))
    shutil.copytree(json_lines, corpus, dirs_exist_ok=True)
    assert small_build(tmp_path / "out", corpus, tokenizer=str(prepared)).splits["train"].tokens


def test_the_command_prepares_the_corpus_of_a_configuration(json_lines, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    shutil.copytree(json_lines, "books.d")
    options = "{corpus: elsewhere, vocabulary: 300, prepare_workers: 1, length: 8}"
    Path("config.yaml").write_text(f"data: {{class_path: TokenShards, init_args: {options}}}\nlogs: x\n")
    prepare.main(["--config", "config.yaml", "--data", "TokenShards", "--data.init_args.corpus", "books.d"])
    inspect_shards.main(["data/books-bpe300", "--length", "5", "--seed", "1"])
    assert "all checksums are correct" in capsys.readouterr().out
    Path("data/books-bpe300/train-00000.tar").unlink()
    with pytest.raises(UserError, match=r"train-00000.tar: is missing, or not \d+ bytes long; copy the folder"):
        prepare.main(["--config", "config.yaml", "--data.corpus", "books.d"])
    Path("config.yaml").write_text("data: {class_path: TaskData, init_args: {task: Copy}}")
    for path in ("config.yaml", "nowhere.yaml", "books.d/part0.jsonl"):
        with pytest.raises(UserError, match=r"(config|data): got|cannot be read"):
            prepare.main(["--config", path])


CORPORA = [f"a.{kind}{packed}" for kind in ("jsonl", "tar", "txt") for packed in ("", ".gz", ".zst")]
CORPORA += ["a.tgz", "a.parquet"]
LINES = b"".join(json.dumps({"text": f"the cat {i} sat"}).encode() + b"\n" for i in range(40))
PACKED = {"plain": LINES, "gzip": gzip.compress(LINES), "zstd": zstandard.compress(LINES)}


@st.composite
def damaged(draw: st.DrawFn) -> bytes:
    """Random bytes, or a corpus in which random bytes are put over a part, at the start, or instead of the end."""
    if draw(st.booleans()):
        return draw(st.binary(max_size=2000))
    content = PACKED[draw(st.sampled_from(sorted(PACKED)))]
    place, noise = draw(st.integers(0, len(content))), draw(st.binary(max_size=30))
    rest = content[place + len(noise) :] if draw(st.booleans()) else b""
    return draw(st.sampled_from([content[:place] + noise + rest, noise + content, content]))


@given(name=st.sampled_from(CORPORA), content=damaged(), max_dropped_fraction=st.sampled_from([0.0, 0.01, 1.0]))
@settings(max_examples=60, deadline=None)
def test_any_bytes_become_shards_or_an_error_of_one_line(prepared, name, content, max_dropped_fraction):
    with TemporaryDirectory() as folder, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        corpus, directory = Path(folder, "corpus"), Path(folder, "shards")
        corpus.mkdir()
        (corpus / name).write_bytes(content)
        manifest, message = None, ""
        options = {"tokenizer": str(prepared), "max_dropped_fraction": max_dropped_fraction}
        try:
            manifest = small_build(directory, corpus, **options)
        except UserError as error:
            message = str(error)
        if manifest is None:
            assert len(message.splitlines()) == 1
            assert not (directory / "manifest.json").exists()
        else:
            verify(Folder(str(directory)))
            assert sum(split.documents for split in manifest.splits.values()) > 0
            if max_dropped_fraction == 0:
                assert manifest.left_out.keys() <= {"empty"}
        assert {path.name for path in Path(folder).iterdir()} <= {"corpus", "shards"}
        assert [path.name for path in corpus.iterdir()] == [name]
